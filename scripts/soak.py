"""Long mixed traffic against the bundled server: does anything leak, and do tokens stay those of a quiet run?

    python scripts/soak.py --minutes 30

Starts `benchctl serve tiny`, asks for a set of greedy and seeded completions one at a time, then keeps many clients
busy that read to the end, hang up at random points, cancel, or send nonsense. Meanwhile it samples memory and open
files of every process. Ends with 0 when every answer had the tokens of the quiet run, no KV block is held afterwards,
no process has more files open than before and none grew by more than the limit over the second half; else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

MIB = 1 << 20
# A pool and a batch that the traffic exceeds: preemption, eviction and a queue are part of it.
SERVE = ("tiny", "--enforce-eager", "--device", "cpu", "--block-size", "16", "--num-gpu-blocks-override", "40",
         "--max-num-seqs", "24", "--max-num-batched-tokens", "128")  # fmt: skip
SAMPLE_S = 1.0


@dataclass
class Sample:
    """One look at a process."""

    time_s: float
    rss: int
    """Resident bytes."""
    fds: int


@dataclass
class Report:
    """What the soak found; `problems` is empty when all is well."""

    minutes: float
    outcomes: dict[str, int] = field(default_factory=dict)
    """How often clients did what."""
    problems: list[str] = field(default_factory=list)
    growth_mib: dict[str, float] = field(default_factory=dict)
    """Per process: growth of resident memory over the second half, by least squares."""
    fds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per process: open files before and after."""
    preemptions: int = 0
    prefix_cache_hits: int = 0


class Soak:
    """Traffic of `concurrency` clients against a server at `url`."""

    def __init__(self, url: str, report: Report, seed: int) -> None:
        self.url = url
        self.report = report
        self.rng = random.Random(seed)
        self.requests = [self._request() for _ in range(60)]
        self.expected: list[list[int]] = []

    def _request(self) -> dict[str, Any]:
        rng = self.rng
        common = [i * 5 % 256 for i in range(rng.choice([0, 20, 60]))]
        prompt = common + [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        request = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 60), "return_token_ids": True}
        sampled = {"temperature": 1.0, "seed": rng.randrange(1000), "top_p": 0.95}
        return {**request, "ignore_eos": True, **(sampled if rng.random() < 0.3 else {"temperature": 0})}

    async def quiet_run(self, http: httpx.AsyncClient) -> None:
        self.expected = [await self._complete(http, request) for request in self.requests]

    async def run(self, http: httpx.AsyncClient, concurrency: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(http, random.Random(i), deadline) for i in range(concurrency)))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random, deadline: float) -> None:
        kinds = [self._read_all, self._read_stream, self._hang_up, self._cancel, self._nonsense]
        while time.monotonic() < deadline:
            kind = rng.choice(kinds)
            index = rng.randrange(len(self.requests))
            try:
                await kind(http, rng, index)
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self._problem(f"{kind.__name__} of request {index}: {type(error).__name__}: {error}")
            name = kind.__name__.strip("_")
            self.report.outcomes[name] = self.report.outcomes.get(name, 0) + 1

    def _problem(self, text: str) -> None:
        if len(self.report.problems) < 20:
            self.report.problems.append(text)

    async def _complete(self, http: httpx.AsyncClient, request: dict[str, Any]) -> list[int]:
        response = await http.post(f"{self.url}/v1/completions", json=request)
        response.raise_for_status()
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    async def _read_all(self, http: httpx.AsyncClient, rng: random.Random, index: int) -> None:
        tokens = await self._complete(http, self.requests[index])
        if tokens != self.expected[index]:
            self._problem(f"request {index}: {tokens} instead of {self.expected[index]}")

    async def _stream(self, http: httpx.AsyncClient, index: int, leave_after: int | None) -> None:
        request = {**self.requests[index], "stream": True}
        tokens: list[int] = []
        ended = False
        async with http.stream("POST", f"{self.url}/v1/completions", json=request) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
                ended |= line == "data: [DONE]"
                if leave_after is not None and len(tokens) >= leave_after:
                    break
        expected = self.expected[index]
        if tokens != expected[: len(tokens)] or (leave_after is None and (not ended or len(tokens) < len(expected))):
            self._problem(f"stream of request {index}: {tokens} instead of {expected}")

    async def _read_stream(self, http: httpx.AsyncClient, rng: random.Random, index: int) -> None:
        await self._stream(http, index, None)

    async def _hang_up(self, http: httpx.AsyncClient, rng: random.Random, index: int) -> None:
        await self._stream(http, index, rng.randrange(len(self.expected[index])))

    async def _cancel(self, http: httpx.AsyncClient, rng: random.Random, index: int) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._complete(http, self.requests[index]), rng.random() * 0.3)

    async def _nonsense(self, http: httpx.AsyncClient, rng: random.Random, index: int) -> None:
        fields: dict[str, Any] = rng.choice(
            [{"temperature": -1}, {"prompt": []}, {"max_tokens": "x"}, {"prompt": [10**9]}, {"n": 0}]
        )
        response = await http.post(f"{self.url}/v1/completions", json={**self.requests[index], **fields})
        if response.status_code != 400:
            self._problem(f"{fields} was answered {response.status_code}")


def metrics(url: str) -> dict[str, float]:
    """Unlabelled samples of `/metrics` by name."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {s.name.removeprefix("benchctl:"): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def processes(supervisor: int) -> dict[str, int]:
    """Pids of the server's processes by name."""
    found = {"supervisor": supervisor}
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = next((a for a in arguments if a.startswith("server.")), f"process {pid}")
        found[name] = int(pid)
    return found


def look(pid: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    return Sample(time.monotonic(), rss, len(list(Path(f"/proc/{pid}/fd").iterdir())))


async def watch(pids: dict[str, int], samples: dict[str, list[Sample]]) -> None:
    """Sample every process until cancelled."""
    while True:
        for name, pid in pids.items():
            samples[name].append(look(pid))
        await asyncio.sleep(SAMPLE_S)


async def settle(url: str, timeout_s: float = 30.0) -> dict[str, float]:
    """Metrics once the engine is idle, or after `timeout_s` as they are then."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await asyncio.to_thread(metrics, url)
        idle = not found["num_requests_running"] and not found["num_requests_waiting"]
        if idle or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


def growth_mib(samples: list[Sample]) -> float:
    """Growth over the second half of the samples, MiB, by the least-squares line."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return 0.0
    times = np.array([s.time_s for s in half])
    slope = np.polyfit(times - times[0], np.array([s.rss for s in half]), 1)[0]
    return float(slope * (times[-1] - times[0]) / MIB)


async def soak(url: str, supervisor: int, options: argparse.Namespace) -> Report:
    """Run everything against a ready server; returns what was found."""
    report = Report(options.minutes)
    traffic = Soak(url, report, options.seed)
    pids = processes(supervisor)
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        await traffic.quiet_run(http)
    # Connections of the client are gone: what is open now belongs to the server.
    before = {name: look(pid).fds for name, pid in pids.items()}
    watcher = asyncio.create_task(watch(pids, samples))
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        await traffic.run(http, options.concurrency, options.minutes * 60)
    watcher.cancel()
    end = await settle(url)
    if pids != processes(supervisor):
        report.problems.append("a process of the server was replaced or is gone")
        return report
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if end[name]:
            report.problems.append(f"{name} is {end[name]:g} afterwards")
    report.preemptions = int(end["num_preemptions_total"])
    report.prefix_cache_hits = int(end["prefix_cache_hits_total"])
    for name, pid in pids.items():
        after = look(pid).fds
        for _ in range(50):  # closed connections are noticed by and by
            if after <= before[name]:
                break
            await asyncio.sleep(0.1)
            after = look(pid).fds
        report.fds[name] = (before[name], after)
        report.growth_mib[name] = round(growth_mib(samples[name]), 2)
        if after > before[name]:
            report.problems.append(f"{name} has {after} files open, {before[name]} before")
        if report.growth_mib[name] > options.max_growth_mib:
            report.problems.append(f"{name} grew by {report.growth_mib[name]} MiB over the second half")
    return report


@contextlib.contextmanager
def server() -> Iterator[tuple[str, int]]:
    """A ready `benchctl serve`: its URL and the supervisor's pid."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "benchctl", "serve", *SERVE, "--port", "0", "--ready-file", str(ready)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode} before it was ready")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak the bundled server; exit code 1 when something leaks.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-growth-mib", type=float, default=8.0, help="most that a process may grow over the second half"
    )
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()
    with server() as (url, pid):
        report = asyncio.run(soak(url, pid, options))
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
