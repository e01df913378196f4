"""Load generators side by side against `benchctl mock`, whose own clock says what is true.

    python scripts/compare_loadgens.py [--only benchctl] [--repeat 3] [--output FILE.json]

Every tool that is installed (aiperf and guidellm are not dependencies of benchctl; install them into environments of
their own and name the commands with --aiperf and --guidellm; written for aiperf 0.13.0 and guidellm 0.8.1) drives the
same mock, on the same cores, one after the other. Both want a tokenizer for their prompts: COMPARE_TOKENIZER names a
model or a folder (default gpt2).

- events per second that a tool takes in, 64 streams, at 1 and at 8 events per write, the mock streaming instantly;
- TTFT and ITL that a tool reports against the mock's clock, 64 and 8 streams paced at 5 ms;
- benchctl alone: the achieved rate of Poisson arrivals at 400/s, and a Kolmogorov-Smirnov test of the gaps between
  sent requests at 1,000/s against the exponential distribution.

Timings need a quiet machine; each figure is the median of --repeat rounds, with the lowest and highest beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchctl.loadgen.options import LoadOptions
from benchctl.loadgen.records import Records
from benchctl.loadgen.run import run_load
from workloads import build_workload
from workloads.arrivals import build_schedule

Figures = dict[str, float]
INPUT_TOKENS = 16


@contextlib.contextmanager
def mock(folder: Path, **options: float) -> Iterator[tuple[str, Path]]:
    """A mock process: its URL and the file of its log."""
    ready, log = folder / "ready.json", folder / "mock.jsonl"
    for file in (ready, log):
        file.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "benchctl", "mock", "--port", "0", "--ready-file", str(ready), "--log", str(log)]
    for name, value in options.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        while not ready.exists():
            time.sleep(0.02)
            if process.poll() is not None:
                sys.exit("the mock did not start")
        yield json.loads(ready.read_text())["url"], log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def mock_figures(entries: list[dict[str, Any]]) -> Figures:
    """What the mock's clock says of a run."""
    begin = min(entry["received_ns"] for entry in entries)
    end = max(entry["writes_ns"][-1] for entry in entries)
    events = sum(sum(entry["events"]) for entry in entries)
    ttft = [(entry["writes_ns"][0] - entry["received_ns"]) / 1e6 for entry in entries]
    gaps = np.concatenate([np.diff(entry["writes_ns"]) for entry in entries]) / 1e6
    return {"events_per_s": events / (end - begin) * 1e9} | percentiles("ttft", ttft) | percentiles("itl", gaps)


def percentiles(name: str, milliseconds: Any) -> Figures:
    p50, p99 = np.percentile(milliseconds, (50, 99))
    return {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99)}


def run_benchctl(url: str, folder: Path, *, requests: int, output_len: int, arrival: dict[str, Any]) -> Records:
    spec = {"name": "synthetic", "num_requests": requests, "input_len": INPUT_TOKENS, "output_len": output_len}
    workload = build_workload(spec, seed=1, tokenizer=None)
    options = LoadOptions(url=url, model="mock")
    outcome = run_load(options, workload, build_schedule(arrival, requests, 1), output=folder / "run.records")
    if outcome.metrics.failed or outcome.interrupted:
        sys.exit(f"requests failed: {outcome.metrics.errors}")
    return Records(outcome.records)


def benchctl_figures(records: Records, log: Path) -> Figures:
    """benchctl's own figures, and request by request their distance from the mock's clock."""
    rows = records.rows
    begin, end = int(rows["scheduled_ns"].min()), int(rows["last_ns"].max())
    figures = {"events_per_s": int(rows["n_events"].sum()) / (end - begin) * 1e9}
    figures |= percentiles("ttft", (rows["first_ns"] - rows["sent_ns"]) / 1e6)
    truth = {int(entry["id"]): entry for entry in read_log(log)}
    first = np.array([truth[index]["writes_ns"][0] for index in rows["index"].tolist()])
    received = np.array([truth[index]["received_ns"] for index in rows["index"].tolist()])
    figures |= percentiles("ttft_error", (rows["first_ns"] - rows["sent_ns"] - (first - received)) / 1e6)
    errors, gaps = [], []
    for block, events in records.blocks():
        at = 0
        for row in block:
            offsets = events["offset_us"][at : at + row["n_events"]].astype(np.int64)
            at += int(row["n_events"])
            entry = truth[int(row["index"])]
            sent = np.repeat(entry["writes_ns"], entry["events"])
            gaps.append(np.diff(offsets) / 1e3)
            errors.append(np.abs(np.diff(offsets) / 1e3 - np.diff(sent) / 1e6))
    figures |= percentiles("itl", np.concatenate(gaps))
    return figures | percentiles("itl_error", np.concatenate(errors))


def run_aiperf(command: str, url: str, folder: Path, streams: int, requests: int, output_len: int) -> Figures:
    artifacts = folder / "aiperf"
    shutil.rmtree(artifacts, ignore_errors=True)
    argv = [*shlex.split(command), "profile", "--url", url, "--model", "mock", "--endpoint-type", "completions"]
    argv += ["--streaming", "--concurrency", str(streams), "--request-count", str(requests), "--ui", "none"]
    argv += ["--isl", str(INPUT_TOKENS), "--osl", str(output_len), "--extra-inputs", "ignore_eos:true"]
    argv += ["--artifact-dir", str(artifacts), "--tokenizer", os.environ.get("COMPARE_TOKENIZER", "gpt2")]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    document = json.loads(next(artifacts.rglob("profile_export_aiperf.json")).read_text())
    return {
        "events_per_s": document["output_token_throughput"]["avg"],
        "ttft_p50_ms": document["time_to_first_token"]["p50"],
        "ttft_p99_ms": document["time_to_first_token"]["p99"],
        "itl_p50_ms": document["inter_token_latency"]["p50"],
        "itl_p99_ms": document["inter_token_latency"]["p99"],
    }


def run_guidellm(command: str, url: str, folder: Path, streams: int, requests: int, output_len: int) -> Figures:
    report = folder / "guidellm.json"
    report.unlink(missing_ok=True)
    tokenizer = os.environ.get("COMPARE_TOKENIZER", "gpt2")
    argv = [*shlex.split(command), "run", "--disable-console"]
    argv += ["--backend", f"kind=openai_http,target={url},model=mock,request_format=/v1/completions"]
    argv += ["--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={requests}"]
    argv += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={output_len}"]
    argv += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={report}"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]
    itl = metrics["inter_token_latency_ms"]["successful"]
    return {
        "events_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_p50_ms": ttft["median"],
        "ttft_p99_ms": ttft["percentiles"]["p99"],
        "itl_p50_ms": itl["median"],
        "itl_p99_ms": itl["percentiles"]["p99"],
    }


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Figures]]:
    """All rounds of every case, by `case / tool`; the mock's own view of a round is under `case / tool, mock clock`."""
    rivals = {
        "aiperf": (arguments.aiperf, run_aiperf),
        "guidellm": (arguments.guidellm, run_guidellm),
    }
    cases = [
        ("64 streams, 1 event per write", {"events_per_write": 1}, 64, 1024, 256),
        ("64 streams, 8 events per write", {"events_per_write": 8}, 64, 2048, 512),
        ("64 streams paced 5 ms", {"itl": 0.005}, 64, 640, 100),
        ("8 streams paced 5 ms", {"itl": 0.005}, 8, 80, 100),
    ]
    rounds: dict[str, list[Figures]] = {}
    for _ in range(arguments.repeat):
        for case, script, streams, requests, output_len in cases:
            for tool in ("benchctl", *rivals):
                if arguments.only and tool not in arguments.only:
                    continue
                if tool != "benchctl" and shutil.which(shlex.split(rivals[tool][0])[0]) is None:
                    continue
                with mock(folder, **script) as (url, log):
                    if tool == "benchctl":
                        arrival = {"name": "concurrency", "concurrency": streams}
                        records = run_benchctl(url, folder, requests=requests, output_len=output_len, arrival=arrival)
                    else:
                        command, run = rivals[tool]
                        figures = run(command, url, folder, streams, requests // 4, output_len)
                # The mock writes its log when it ends.
                if tool == "benchctl":
                    figures = benchctl_figures(records, log)
                truth = mock_figures(read_log(log))
                rounds.setdefault(f"{case} / {tool}", []).append(figures)
                rounds.setdefault(f"{case} / {tool}, mock clock", []).append(truth)
        if not arguments.only or "benchctl" in arguments.only:
            rounds.setdefault("Poisson / benchctl", []).append(open_loop(folder))
    return rounds


def open_loop(folder: Path) -> Figures:
    """Whether an open loop keeps its rate and its spacing."""
    with mock(folder) as (url, _):
        rows = run_benchctl(url, folder, requests=4000, output_len=8, arrival={"name": "poisson", "rate": 400}).rows
        sent = np.sort(rows["sent_ns"]) / 1e9
        wanted = np.sort(rows["scheduled_ns"]) / 1e9
        rate_400 = (wanted[-1] - wanted[0]) / (sent[-1] - sent[0])
        lag_400 = percentiles("lag_at_400", (rows["sent_ns"] - rows["scheduled_ns"]) / 1e6)
    with mock(folder) as (url, _):
        rows = run_benchctl(url, folder, requests=3000, output_len=1, arrival={"name": "poisson", "rate": 1000}).rows
        gaps = np.diff(np.sort(rows["sent_ns"])) / 1e9
        test = stats.kstest(gaps, "expon", args=(0, 1 / 1000))
        lag_1000 = percentiles("lag_at_1000", (rows["sent_ns"] - rows["scheduled_ns"]) / 1e6)
    return {
        "achieved_of_400": float(rate_400),
        **lag_400,
        "ks_statistic_1000": float(test.statistic),
        "ks_p_value_1000": float(test.pvalue),
        **lag_1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=("benchctl", "aiperf", "guidellm"), help="tools to run")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--aiperf", default="aiperf", help="its command")
    parser.add_argument("--guidellm", default="guidellm", help="its command")
    parser.add_argument("--output", type=Path, help="write all rounds here as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchctl-compare-") as folder:
        rounds = compare(arguments, Path(folder))
    for case, figures in rounds.items():
        print(case)
        for name in figures[0]:
            values = [round_[name] for round_ in figures]
            print(f"  {name:<20} {statistics.median(values):>12,.3f}   ({min(values):,.3f} to {max(values):,.3f})")
    if arguments.output:
        arguments.output.write_text(json.dumps(rounds, indent=2))


if __name__ == "__main__":
    main()
