"""`benchctl run` from its options to its files and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchctl.cli import build_app
from benchctl.loadgen import sweep
from benchctl.loadgen.records import FLUSH_BYTES, Records
from benchctl.mock.script import Failure
from benchctl.output_lock import OutputLock
from reports.directory import load_results
from reports.results import read_index
from server.errors import UserError
from tests.integration.mocking import running_mock
from tests.integration.test_loadgen_failures import serving
from tests.unit.reports.published_schema import assert_published

SMALL = ["-n", "12", "--set", "input_len=4", "--set", "output_len=4", "--workers", "1"]


def run(*argv: str, output: Path | None = None) -> Result:
    options = [] if output is None else ["--output", str(output)]
    # The machine that runs the tests may have other things to do; whether a run is valid is not what they are about.
    options += [] if "--max-client-lag" in argv else ["--max-client-lag", "60"]
    return CliRunner().invoke(build_app(["run"]), ["run", *argv, *options])


def bad_input(*argv: str) -> str:
    """The one line that the command ends with."""
    result = run(*argv)
    assert isinstance(result.exception, UserError), result.output
    assert result.exception.exit_code == 2
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_a_run_writes_a_result_its_records_and_reports(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with running_mock(ttft_s=0.01) as mock:
        result = run("--url", mock.url, "--rate", "100", *SMALL, "--slo", "ttft:10s", output=output)
    assert result.exit_code == 0, result.output
    for word in ("completed", "TTFT", "TPOT", "client lag", "goodput", "100.0%", "report.html"):
        assert word in result.output
    assert assert_published(output) == 2
    (cell,) = load_results(output).results
    assert cell.cell_id == "url/mock/synthetic/rate-100"
    assert (cell.status, cell.reason) == ("ok", None)
    assert cell.config.model == "mock"  # asked of the endpoint
    assert cell.config.arrival == {"name": "poisson", "rate": 100.0}
    assert cell.metrics is not None
    assert cell.metrics.completed == 12
    assert cell.metrics.goodput[0].met == 12
    assert cell.workload is not None
    assert cell.workload.requests == 12
    assert cell.raw_records is not None
    assert len(Records(output / cell.raw_records).rows) == 12
    for name in ("report.html", "report.md", "report.csv", "matrix.json"):
        assert (output / name).is_file()


def test_a_result_says_how_its_client_was_told_to_count(tmp_path: Path) -> None:
    with running_mock() as mock:
        run("--url", mock.url, "--concurrency", "1", *SMALL, "--warmup", "4", "--retries", "1", output=tmp_path)
    (cell,) = load_results(tmp_path).results
    assert cell.config.client == {"workers": 1, "retries": 1, "warmup": "4", "lag_bound_s": 60.0}


def test_a_timed_run_that_ends_early_says_so(tmp_path: Path) -> None:
    with running_mock() as mock:
        result = run("--url", mock.url, "--concurrency", "1", "--duration", "600", *SMALL, output=tmp_path)
    (cell,) = load_results(tmp_path).results
    assert (result.exit_code, cell.status) == (0, "ok")
    assert cell.reason is not None
    assert cell.reason.startswith("all 12 requests were answered after ")
    assert "of 600 s" in " ".join(result.output.split())


def test_the_tokenizer_of_a_run_counts_its_prompts_too(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    turns = '[{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "a b c d e f"}]'
    (tmp_path / "chats.json").write_text(f'[{{"conversations": {turns}}}]')
    workload = f"sharegpt:path={tmp_path / 'chats.json'}"
    with running_mock() as mock:
        argv = ("--url", mock.url, "--concurrency", "1", "-w", workload, "--workers", "1")
        assert "--tokenizer" in str(run(*argv, output=tmp_path / "out").exception)
        result = run(*argv, "--tokenizer", str(tmp_path), output=tmp_path / "out")
    assert result.exit_code == 0, result.output
    (cell,) = load_results(tmp_path / "out").results
    assert cell.workload is not None
    assert cell.workload.prompt_tokens_total == 5


def make_tokenizer(folder: Path) -> None:
    from tests.unit.workloads.conftest import byte_level_bpe

    byte_level_bpe().save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("workload", "endpoint"),
    [
        ("synthetic:input_len=16,output_len=3,num_requests=5,prompt_format=text", "completions"),
        ("synthetic:input_len=16,output_len=3,num_requests=5,prompt_format=text", "chat"),
        ("trace:path=FOLDER/azure.csv,prompt_format=text", "completions"),
        ("sharegpt-like:num_requests=5,length_scale=0.1", "chat"),
    ],
)
def test_prompts_are_sent_as_text_with_a_tokenizer(tmp_path: Path, workload: str, endpoint: str) -> None:
    make_tokenizer(tmp_path)
    rows = "".join(f"2023-11-16 18:15:46.{n}000000,16,3\n" for n in range(5))
    (tmp_path / "azure.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    argv = ("--rate", "100", "-w", workload.replace("FOLDER", str(tmp_path)), "--workers", "1", "--endpoint", endpoint)
    with running_mock() as mock:
        result = run("--url", mock.url, *argv, "--tokenizer", str(tmp_path), output=tmp_path / "out")
    assert result.exit_code == 0, result.output
    (cell,) = load_results(tmp_path / "out").results
    assert cell.metrics is not None
    assert cell.metrics.completed == 5
    assert cell.workload is not None
    assert cell.workload.prompt_tokens_total is not None
    if not workload.startswith("sharegpt-like"):
        assert cell.workload.prompt_tokens_total == 5 * 16


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("synthetic:prompt_format=text", "give --tokenizer"),
        ("synthetic:prompt_format=text,nonsense=1", "unknown key `nonsense`"),
        ("sharegpt:path=FILE", "give --tokenizer"),
    ],
)
def test_text_that_the_served_model_cannot_count_starts_no_server(tmp_path: Path, workload: str, words: str) -> None:
    file = tmp_path / "chats.json"
    file.write_text("[]")
    argv = ("--serve", "tiny", "--rate", "1", "-w", workload.replace("FILE", str(file)))
    assert words in bad_input(*argv, "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists(), "a server would have its log there"


@pytest.mark.parametrize(
    "how",
    [
        ("--concurrency", "2"),
        ("--rate", "100"),
        ("--sweep-concurrency", "2,3"),
        ("--find-max-rate", "--rate", "100", "--slo", "ttft:60s"),
    ],
)
def test_an_endpoint_that_dies_before_the_end_fails_the_run(tmp_path: Path, how: tuple[str, ...]) -> None:
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running_mock(ttft_s=0.01))

        def die() -> None:
            while mock.requests < 20:
                time.sleep(0.01)
            stack.close()

        killer = threading.Thread(target=die)
        killer.start()
        result = run("--url", mock.url, *how, "-n", "60", *SMALL[2:], output=tmp_path)
        killer.join()
    assert result.exit_code == 1, result.output
    (cell,) = load_results(tmp_path).results
    assert cell.status == "failed"
    assert "takes no connections any more: Connection refused; " in (cell.reason or "")
    assert cell.metrics is not None
    assert 0 < cell.metrics.completed < 60
    assert (tmp_path / "report.html").is_file()


def saying(*events: str) -> Callable[..., Awaitable[None]]:
    """A server that streams these events to every request for an answer, and has nothing else."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return  # a connection that was opened ahead
        body = "".join(f"data: {event}\n\n" for event in events)
        answer = f"200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}"
        if head.startswith(b"GET"):
            answer = "404 Not Found\r\ncontent-length: 0\r\n\r\n"
        writer.write(f"HTTP/1.1 {answer}".encode())
        await writer.drain()

    return handle


def test_answers_without_a_single_token_fail_the_run(tmp_path: Path) -> None:
    with serving(saying("[DONE]")) as port:
        argv = ("--url", f"http://127.0.0.1:{port}", "--model", "m", "--concurrency", "2", *SMALL)
        result = run(*argv, output=tmp_path)
    assert result.exit_code == 1, result.output
    (cell,) = load_results(tmp_path).results
    assert (cell.status, cell.reason) == (
        "failed",
        "12 answers and not one token in any: the server generates nothing",
    )


def test_answers_that_are_too_short_are_said_where_a_person_looks(tmp_path: Path) -> None:
    with serving(saying('{"choices":[{"index":0,"text":"a"}]}', "[DONE]")) as port:
        argv = ("--url", f"http://127.0.0.1:{port}", "--model", "m", "--concurrency", "2", *SMALL)
        result = run(*argv, output=tmp_path)
    assert result.exit_code == 0, result.output
    said = "answers hold 12 output tokens instead of the 48 that were forced (12 shorter of 12)"
    assert said in " ".join(result.output.split())
    assert said in (tmp_path / "report.md").read_text().replace("\\", "")


@pytest.mark.parametrize("how", [("--concurrency", "2"), ("--sweep-concurrency", "1,2")])
def test_a_reader_that_goes_costs_no_report(tmp_path: Path, how: tuple[str, ...]) -> None:
    with running_mock() as mock:
        argv = [sys.executable, "-m", "benchctl", "run", "--url", mock.url, *how, *SMALL, "-o", str(tmp_path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.wait(timeout=120) in (0, 1)
    assert len(load_results(tmp_path).results) == (2 if how[0] == "--sweep-concurrency" else 1)
    for name in ("report.html", "report.md", "report.csv"):
        assert (tmp_path / name).is_file()


def test_reports_are_there_when_standard_output_is_full(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with running_mock() as mock, open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "benchctl", "run", "--url", mock.url, "--rate", "99", *SMALL, "-o", str(tmp_path)]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert (tmp_path / "report.html").is_file()


def test_a_disk_that_fills_up_leaves_the_figures_of_what_was_recorded(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * FLUSH_BYTES, hard))
    try:
        with running_mock() as mock:
            lengths = ("--set", "input_len=4", "--set", "output_len=40", "--workers", "1")
            run("--url", mock.url, "--sweep-concurrency", "2,3", "-n", "50000", *lengths, output=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (cell,) = load_results(tmp_path).results  # a second load would break as well
    assert cell.status == "failed"
    assert "File too large" in (cell.reason or "")
    assert cell.metrics is not None
    assert cell.metrics.completed > 10


def test_two_runs_cannot_mix_their_records(tmp_path: Path) -> None:
    with running_mock() as mock, OutputLock(tmp_path):
        result = run("--url", mock.url, "--concurrency", "1", *SMALL, output=tmp_path)
    assert isinstance(result.exception, UserError)
    assert "another benchctl is writing its results here" in str(result.exception)
    with running_mock() as mock:
        assert run("--url", mock.url, "--concurrency", "1", *SMALL, output=tmp_path).exit_code == 0


def test_a_sweep_makes_a_result_for_each_value(tmp_path: Path) -> None:
    with running_mock() as mock:
        bare = mock.url.removeprefix("http://")
        result = run("--url", bare, "--sweep-concurrency", "1,3", *SMALL, output=tmp_path)
    assert result.exit_code == 0, result.output
    assert "sending: concurrency-1\nsending: concurrency-3\n" in result.stderr, "a log would be silent for minutes"
    cells = load_results(tmp_path).results
    assert [cell.config.arrival["concurrency"] for cell in cells] == [1, 3]
    assert len({cell.workload.digest for cell in cells if cell.workload}) == 2, (
        "the prefix cache would hold the prompts"
    )


def test_the_search_finds_where_the_objective_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "PRECISION", 2.0)
    # One request at a time, 40 ms each: about 25 per second, less what waiting in line costs.
    with running_mock(ttft_s=0.04) as mock:
        result = run(
            *("--url", mock.url, "--find-max-rate", "--rate", "4", "--slo", "ttft:150ms", "--max-concurrency", "1"),
            *("-n", "16", "--set", "input_len=4", "--set", "output_len=1", "--workers", "1"),
            output=tmp_path,
        )
    assert result.exit_code == 0, result.output
    description = read_index(tmp_path).description
    assert "highest rate that met the SLOs" in description
    found = float(description.split(":")[1].split()[0])
    assert 3 < found < 60
    results = load_results(tmp_path).results
    rates = [cell.config.arrival["rate"] for cell in results]
    assert len({cell.workload.digest for cell in results if cell.workload}) == len(results)
    assert rates[:2] == [4.0, 8.0]
    for cell in results:
        assert cell.metrics is not None
        assert cell.metrics.offered_rate == pytest.approx(cell.config.arrival["rate"])
    assert "(sent at " in description
    assert max(rates) > found


def test_loads_that_repeat_the_prompts_of_a_file_say_so(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "max_tokens": 2}\n{"prompt": "two", "max_tokens": 2}\n')
    workload = f'{{"name": "custom", "path": "{prompts}"}}'
    with running_mock() as mock:
        result = run("--url", mock.url, "--sweep-concurrency", "1,2", "-w", workload, output=tmp_path / "out")
    assert result.exit_code == 0, result.output
    first, second = (cell.workload.notes for cell in load_results(tmp_path / "out").results if cell.workload)
    assert not any("prefix cache" in note for note in first)
    assert any("prefix cache" in note for note in second)


def test_failed_requests_are_said_and_a_run_without_any_answer_fails(tmp_path: Path) -> None:
    with running_mock(failures=(Failure("503", 3),)) as mock:
        some = run("--url", mock.url, "--concurrency", "2", *SMALL, output=tmp_path / "some")
    assert some.exit_code == 0
    assert "4 × http 503 (the mock is told to fail)" in some.output
    with running_mock(failures=(Failure("503", 1),)) as mock:
        every = run("--url", mock.url, "--concurrency", "2", *SMALL, output=tmp_path / "every")
    assert every.exit_code == 1
    (cell,) = load_results(tmp_path / "every").results
    assert cell.status == "failed"
    assert cell.reason == "no request was completed: 12 × http 503 (the mock is told to fail)"
    assert cell.metrics is not None
    assert cell.metrics.ttft_s.n == 0


def test_chat_and_other_workloads(tmp_path: Path) -> None:
    spec = "sharegpt-like:num_requests=6,length_scale=0.02,prompt_format=text"
    with running_mock() as mock:
        result = run(
            "--url", mock.url, "--endpoint", "chat", "-w", spec, "--arrival", "burst", "--workers", "2", output=tmp_path
        )
    assert result.exit_code == 0, result.output
    (cell,) = load_results(tmp_path).results
    assert cell.config.endpoint == "chat"
    assert cell.metrics is not None
    assert cell.metrics.completed == 6


def test_a_duration_asks_for_requests_enough(tmp_path: Path) -> None:
    with running_mock() as mock:
        result = run(
            *("--url", mock.url, "--rate", "400", "--duration", "0.5", "--workers", "1"),
            *("--set", "input_len=4", "--set", "output_len=1"),
            output=tmp_path,
        )
    assert result.exit_code == 0, result.output
    (cell,) = load_results(tmp_path).results
    assert cell.metrics is not None
    assert 130 < cell.metrics.completed < 270


URL = ("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--rate", "1"), "--url URL"),
        ((*URL, "--serve", "tiny", "--rate", "1"), "--url URL"),
        (URL, "--rate 4"),
        ((*URL, "--rate", "1", "--concurrency", "2"), "--rate and --concurrency"),
        ((*URL, "--rate", "0"), "rate must be a number above 0"),
        ((*URL, "--rate", "-1"), "rate must be a number above 0"),
        ((*URL, "--rate", "nan"), "rate must be a number above 0"),
        ((*URL, "--concurrency", "0"), "above 0"),
        ((*URL, "--rate", "1", "--duration", "-1"), "duration_s must be a number above 0"),
        ((*URL, "--rate", "1", "--max-concurrency", "0"), "max_concurrency must be a number above 0"),
        ((*URL, "--concurrency", "1", "--max-concurrency", "3"), "--max-concurrency is for open loops"),
        ((*URL, "--arrival", "poison:rate=1"), "did you mean `poisson`"),
        ((*URL, "--arrival", "poisson:rte=1"), "rate"),
        ((*URL, "--arrival", "trace:speed=2", "-w", "trace:path=x"), "did you mean `speedup`"),
        ((*URL, "--rate", "1", "-w", "synthetik"), "did you mean `synthetic`"),
        ((*URL, "--rate", "1", "-w", "{"), "not a JSON object"),
        ((*URL, "--rate", "1", "--set", "input_len=-5"), "input_len"),
        ((*URL, "--rate", "1", "--set", "nonsense=5"), "nonsense"),
        ((*URL, "--rate", "1", "-n", "0"), "num_requests"),
        ((*URL, "--rate", "1", "--slo", "fast"), "METRIC:TIME"),
        ((*URL, "--rate", "1", "--warmup", "soon"), "--warmup"),
        ((*URL, "--rate", "1", "--workers", "0"), "--workers"),
        ((*URL, "--rate", "1", "--timeout", "0"), "--timeout"),
        ((*URL, "--rate", "1", "--retries", "-1"), "--retries"),
        ((*URL, "--rate", "1", "--max-client-lag", "0"), "--max-client-lag"),
        ((*URL, "--rate", "1", "--mode", "eager"), "--mode"),
        ((*URL, "--rate", "1", "--endpoint", "chat"), "token ids cannot go to the chat endpoint"),
        ((*URL, "--arrival", "burst", "--duration", "3"), "--duration: does not apply to arrival burst"),
        ((*URL, "--arrival", "poisson:8"), "arrival '8': expected key=value"),
        ((*URL, "--rate", "1", "-w", "synthetic:8"), "workload '8': expected key=value"),
        ((*URL, "--rate", "1", "--set", "input_len=x"), "an object has a `distribution`: fixed, histogram, lognormal"),
        ((*URL, "--rate", "1", "-w", "sharegpt:path=/not/there"), "workload sharegpt: cannot read /not/there"),
        ((*URL, "--rate", "1", "--tokenizer", "tokeniser"), "model 'tokeniser': neither a folder"),
        (("--serve", "tyni", "--rate", "1"), "model 'tyni': neither a folder"),
        (("--serve", "tiny", "--rate", "1", "--server", "max_num_seq=1"), "did you mean `max_num_seqs`"),
        (
            ("--serve", "tiny", "--rate", "1", "--server", "max_num_seqs=x"),
            "--server.max_num_seqs = 'x': Expected `int`",
        ),
        (("--serve", "tiny", "--rate", "1", "--server", "max_model_len=9999"), "model 'tiny' takes 1 to 4096"),
        (("--serve", "tiny", "--rate", "1", "--server", "8"), "--server '8': expected key=value"),
        ((*URL, "--find-max-rate"), "needs an objective"),
        ((*URL, "--find-max-rate", "--slo", "ttft:1s", "--concurrency", "2"), "leave --concurrency out"),
        ((*URL, "--sweep-rate", "1,x"), "--sweep-rate"),
        ((*URL, "--sweep-rate", "1,0"), "above 0"),
        ((*URL, "--sweep-concurrency", "1.5"), "whole"),
        ((*URL, "--rate", "1"), "does not answer"),
        (("--url", "nonsense://x", "--rate", "1"), "expected http://"),
        (("--url", "http://", "--rate", "1"), "expected http://"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, argv: tuple[str, ...], words: str) -> None:
    assert words in bad_input(*argv, "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with running_mock() as mock:
        line = bad_input("--url", mock.url, "--rate", "1", "-o", str(tmp_path / "file"))
    assert f"{tmp_path / 'file'}: is not a directory" in line


def group_ends(group: int) -> bool:
    """Whether no process of the group is left; multiprocessing's resource tracker ends just after its parent."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with running_mock(ttft_s=0.02) as mock:
        argv = [sys.executable, "-m", "benchctl", "run", "--url", mock.url, "--concurrency", "2", "-n", "4000"]
        argv += ["--set", "input_len=4", "--set", "output_len=1", "--workers", "2", "-o", str(tmp_path)]
        process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while mock.requests < 20:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    assert group_ends(process.pid)
    index = read_index(tmp_path)
    assert index.interrupted
    (cell,) = load_results(tmp_path).results
    assert cell.status == "interrupted"
    assert cell.metrics is not None
    assert cell.metrics.completed > 0
    assert b"Traceback" not in output


def test_a_server_that_dies_in_the_middle_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launched one: its exit is seen, what had been answered stays."""
    from benchctl import targets
    from benchctl.targets import RunningServer
    from benchctl.targets.process import ServerProcess

    argv = [sys.executable, "-m", "benchctl", "mock", "--port", "0", "--ttft", "0.02"]
    process = ServerProcess([*argv, "--ready-file", str(tmp_path / "ready")], log_path=tmp_path / "log")
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    import json

    url = json.loads((tmp_path / "ready").read_text())["url"]
    server = RunningServer(url=url, model="mock", process=process, startup=None, info=None)

    def launch(*_: Any, **__: Any) -> RunningServer:
        return server

    monkeypatch.setattr(targets, "launch", launch)
    from benchctl.loadgen import session as session_module

    def on_progress(progress: Any) -> None:
        if progress.completed > 10:
            os.kill(process.pid, signal.SIGKILL)

    from benchctl.loadgen.options import LoadOptions
    from reports.schema import CellConfig

    workload = {"name": "synthetic", "num_requests": 60, "input_len": 4, "output_len": 1}
    config = CellConfig(engine="benchctl", model="tiny", workload=workload, arrival={})
    options = LoadOptions(url="", model="", workers=1)
    with session_module.LoadSession(config, options, tmp_path / "out", on_progress=on_progress) as session:
        result = session.run({"name": "constant", "rate": 20})
    assert result.status == "failed"
    assert result.reason == "the server was killed by signal 9 during the run"
    assert result.metrics is not None
    assert result.metrics.completed > 10
    assert result.metrics.failed > 0
