"""What goes wrong between a load and a server, told apart by its cause; and a load generator that itself breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchctl.loadgen import run as run_module
from benchctl.loadgen import worker as worker_module
from benchctl.loadgen.liveness import why_gone
from benchctl.loadgen.records import FLUSH_BYTES, Cause, Records
from benchctl.loadgen.run import LoadGeneratorError
from benchctl.mock.script import Failure
from server.errors import UserError
from tests.integration.mocking import load, load_here, running_mock, synthetic
from tests.unit.loadgen.recording import record, write
from workloads.base import Message, Workload, WorkloadRequest

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
USERS = {"name": "concurrency", "concurrency": 2}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunks(*portions: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(portion), portion) for portion in portions)


@contextlib.contextmanager
def serving(handler: Handler, **options: Any) -> Iterator[int]:
    """A TCP server in a thread; its port."""
    loop = asyncio.new_event_loop()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0, **options))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:

        async def close() -> None:
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def answering(*portions: bytes, close: bool = False, pause_s: float = 0.0) -> Handler:
    """Answers every request of a connection with these bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                for portion in portions:
                    writer.write(portion)
                    await writer.drain()
                    if pause_s:
                        await asyncio.sleep(pause_s)
                if close:
                    break
        writer.close()

    return handle


def test_a_retry_after_beyond_the_timeout_is_not_waited_for(tmp_path: Path) -> None:
    for pause in (b"601", b"9" * 400):
        refusal = b"HTTP/1.1 429 Busy\r\nretry-after: " + pause + b"\r\ncontent-length: 0\r\n\r\n"
        with serving(answering(refusal)) as port:
            outcome = load_here(f"http://127.0.0.1:{port}", synthetic(2), USERS, tmp_path / "r", retries=3)
        assert (outcome.metrics.errors, outcome.metrics.retries) == ({"http 429": 2}, 0)


@pytest.mark.parametrize("said", [b"99999999999", b"-7", b"123456789012345678901234567890", b"0"])
def test_a_usage_that_cannot_be_is_as_good_as_none(tmp_path: Path, said: bytes) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":' + said + b',"completion_tokens":' + said + b"}}\n\n"
    with serving(answering(CHUNKED, chunks(EVENT, EVENT, usage, DONE), b"0\r\n\r\n")) as port:
        metrics = load_here(f"http://127.0.0.1:{port}", synthetic(2), USERS, tmp_path / "r").metrics
    assert (metrics.completed, metrics.errors) == (2, {})
    assert (metrics.throughput.output_tokens, metrics.output_token_source) == (4, "events")


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (Failure("503", 3), "http 503"),
        (Failure("reset", 3), "connection reset"),
        (Failure("reset", 3, 4), "connection reset"),
        (Failure("error", 3, 2), "error event"),
        (Failure("truncate", 3, 2), "truncated stream"),
        (Failure("abort", 3, 2), "aborted answer"),
    ],
)
def test_failures_of_the_mock_by_cause(tmp_path: Path, failure: Failure, cause: str) -> None:
    with running_mock(failures=(failure,)) as mock:
        outcome = load_here(mock.url, synthetic(12), USERS, tmp_path / "r")
    metrics = outcome.metrics
    assert (metrics.completed, metrics.failed, metrics.errors) == (8, 4, {cause: 4})
    assert outcome.error_details[cause]
    assert metrics.ttft_s.n == 8
    assert metrics.retries == 0


@pytest.mark.parametrize(
    ("portions", "close", "cause"),
    [
        ((HEAD + b"\r\n" + EVENT + DONE,), True, None),  # neither length nor chunks: ends with the connection
        ((b"HTTP/1.0 200 OK\r\n\r\n" + EVENT + DONE,), True, None),
        ((HEAD + b"content-length: %d\r\n\r\n" % len(EVENT + DONE) + EVENT, DONE), False, None),
        ((HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks(EVENT, DONE, b""),), True, None),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED, chunks(EVENT + DONE, b"")), False, None),
        ((CHUNKED + chunks(EVENT, DONE),), True, None),  # the last chunk lacks
        ((CHUNKED + chunks(EVENT),), True, "truncated stream"),
        ((CHUNKED + chunks(EVENT, b""),), False, "truncated stream"),
        ((HEAD + b"\r\n" + EVENT,), True, "truncated stream"),
        ((CHUNKED + chunks(b"data: nonsense\n\n", b""),), False, "bad stream"),
        ((b"SSH-2.0-OpenSSH_9\r\n",), True, "bad http"),
        ((HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",), True, "bad http"),
        ((b"HTTP/1.1 200",), True, "connection reset"),
        ((b"",), True, "connection reset"),
        ((b'HTTP/1.1 401 No\r\ncontent-length: 30\r\n\r\n{"error":{"message":"no key"}}',), False, "http 401"),
        ((b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n",), False, "http 307"),
        ((b'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}',), False, "truncated stream"),
        ((b'HTTP/1.1 200 OK\r\ncontent-type: text/x\r\ncontent-length: 2\r\n\r\n{}',), False, "bad stream"),
        ((b'HTTP/1.1 200 OK\r\nContent-Type: text/x; q=1\r\n\r\n{}',), True, "bad stream"),
    ],
)  # fmt: skip
def test_answers_of_odd_servers(tmp_path: Path, portions: tuple[bytes, ...], close: bool, cause: str | None) -> None:
    with serving(answering(*portions, close=close)) as port:
        outcome = load_here(
            f"http://127.0.0.1:{port}", synthetic(3), {"name": "concurrency", "concurrency": 1}, tmp_path / "r"
        )
    metrics = outcome.metrics
    assert metrics.errors == ({} if cause is None else {cause: 3})
    assert metrics.completed == (3 if cause is None else 0)
    if cause == "http 401":
        assert outcome.error_details == {"http 401": "no key"}
    if any(b"text/x" in portion for portion in portions):
        assert outcome.error_details == {"bad stream": "answered with text/x instead of text/event-stream"}


def test_every_cut_of_the_bytes_gives_the_same_answer(tmp_path: Path) -> None:
    whole = CHUNKED + chunks(EVENT, EVENT + EVENT, DONE, b"")
    portions = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    with serving(answering(*portions, pause_s=0.001)) as port:
        outcome = load_here(f"http://127.0.0.1:{port}", synthetic(2), USERS, tmp_path / "r")
    assert Records(outcome.records).rows["n_events"].tolist() == [3, 3]


def test_a_timeout_ends_a_request_and_its_connection(tmp_path: Path) -> None:
    with running_mock(itl_s=5.0) as mock:
        outcome = load_here(mock.url, synthetic(3), {"name": "burst"}, tmp_path / "r", timeout_s=0.3)
        assert not mock.connections or all(connection.closed for connection in mock.connections)
    assert outcome.metrics.errors == {"timeout": 3}
    rows = Records(outcome.records).rows
    assert (rows["n_events"] == 1).all()
    assert ((rows["end_ns"] - rows["sent_ns"]) >= 300_000_000).all()


def test_a_done_answer_whose_message_does_not_end_is_complete(tmp_path: Path) -> None:
    with serving(answering(CHUNKED + chunks(EVENT, DONE))) as port:
        outcome = load_here(f"http://127.0.0.1:{port}", synthetic(2), USERS, tmp_path / "r", timeout_s=30)
    assert (outcome.metrics.completed, outcome.metrics.errors) == (2, {})
    rows = Records(outcome.records).rows
    assert ((rows["end_ns"] - rows["sent_ns"]) < 900_000_000).all()


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        outcome = load_here(f"http://127.0.0.1:{port}", synthetic(4), {"name": "burst"}, tmp_path / "r")
    assert outcome.metrics.errors == {"connect error": 4}
    assert "refused" in outcome.error_details["connect error"].lower()
    assert outcome.metrics.client_lag_s.reason == "no request was sent"


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    outcome = load_here("http://no-such-host.invalid:1", synthetic(2), {"name": "burst"}, tmp_path / "r")
    assert outcome.metrics.errors == {"connect error": 2}


def test_a_server_that_is_gone_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the limits are shortened: the load gives up instead of burning a long workload down."""
    monkeypatch.setattr(worker_module, "_GIVE_UP_NS", 50_000_000)
    monkeypatch.setattr(worker_module, "_GIVE_UP_CONNECTS", 5)
    monkeypatch.setattr(worker_module, "_REFUSED_PAUSE_NS", 1_000_000)
    outcome = load_here("http://127.0.0.1:9", synthetic(100_000), USERS, tmp_path / "r")
    assert outcome.aborted is not None
    assert "takes no connections any more: Connection refused" in outcome.aborted
    assert outcome.metrics.failed < 100


def test_a_server_that_dies_before_the_end_fails_the_load_at_once(tmp_path: Path) -> None:
    """The users burn what is left of the workload long before the load would give up by itself."""
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running_mock(ttft_s=0.02))

        def die(progress: Any) -> None:
            if progress.completed:
                stack.close()

        outcome = load(mock.url, synthetic(60, 1), USERS, tmp_path / "r", on_progress=die)
    assert outcome.aborted == f"{mock.url} takes no connections any more: Connection refused"
    assert 0 < outcome.metrics.completed < 60
    assert outcome.metrics.errors["connect error"] > 0


def test_a_last_request_that_fails_is_no_death(tmp_path: Path) -> None:
    with running_mock(failures=(Failure("reset", 4),)) as mock:
        outcome = load(mock.url, synthetic(12), {"name": "concurrency", "concurrency": 1}, tmp_path / "r")
    assert (outcome.aborted, outcome.metrics.errors) == (None, {"connection reset": 3})


@pytest.mark.parametrize(("status", "gone"), [(b"503 No", True), (b"404 No", False), (b"200 OK", False)])
def test_a_server_whose_engine_is_dead_is_asked_for_its_health(tmp_path: Path, status: bytes, gone: bool) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        dead = b"HTTP/1.1 500 Dead\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        health = b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n"
        writer.write(health if head.startswith(b"GET /health ") else dead)
        await writer.drain()

    with serving(handle) as port:
        outcome = load(f"http://127.0.0.1:{port}", synthetic(4), USERS, tmp_path / "r")
    said = f"http://127.0.0.1:{port} is not healthy any more: /health is answered with HTTP 503"
    assert outcome.aborted == (said if gone else None)


@pytest.mark.parametrize(
    ("refused", "after", "said"),
    [(5, 0, "took no connection for the last 5 of 45 requests"), (4, 0, None), (5, 1, None)],
)
def test_a_server_that_is_back_by_the_end_was_gone_all_the_same(
    tmp_path: Path, refused: int, after: int, said: str | None
) -> None:
    causes = [Cause.OK] * (45 - refused - after) + [Cause.CONNECT] * refused + [Cause.RESET] * after
    rows = write(tmp_path / "r", [record(n, n, [], cause=cause) for n, cause in enumerate(causes)]).rows
    with running_mock() as mock:
        found = why_gone(rows[::-1], mock.url, "completions")
        assert found == (None if said is None else f"{mock.url} {said}")


@pytest.mark.parametrize(
    ("failure", "retried"), [(Failure("503", 2), True), (Failure("reset", 2), True), (Failure("reset", 2, 3), False)]
)
def test_retries_are_made_and_counted(tmp_path: Path, failure: Failure, retried: bool) -> None:
    with running_mock(failures=(failure,)) as mock:
        one_user = {"name": "concurrency", "concurrency": 1}
        outcome = load_here(mock.url, synthetic(6), one_user, tmp_path / "r", retries=3)
    metrics = outcome.metrics
    if retried:
        # Requests 2, 4, ... of the mock fail; the retry is the next number.
        assert (metrics.completed, metrics.failed) == (6, 0)
        assert metrics.retries == 5
    else:
        assert metrics.retries == 0  # tokens had come: sending it again would measure something else
        assert metrics.failed == 3


def test_retry_after_is_obeyed_and_waits_in_ttft(tmp_path: Path) -> None:
    state = {"asked": 0}
    ok = answering(CHUNKED + chunks(EVENT, DONE, b""), close=True)
    busy = answering(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n", close=True)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state["asked"] += 1
        await (busy if state["asked"] == 1 else ok)(reader, writer)

    with serving(handle) as port:
        one = {"name": "concurrency", "concurrency": 1}
        outcome = load_here(f"http://127.0.0.1:{port}", synthetic(1), one, tmp_path / "r", retries=1)
    metrics = outcome.metrics
    assert (metrics.completed, metrics.retries) == (1, 1)
    assert (metrics.ttft_s.min or 0) >= 1.0
    assert (metrics.client_lag_s.max or 9) < 0.9


def test_turns_after_a_failed_one_fail_with_it(tmp_path: Path) -> None:
    requests = [
        WorkloadRequest(
            index=turn, messages=[Message("user", "x")], max_tokens=2, conversation=0, turn=turn, append_reply=turn > 0
        )
        for turn in range(4)
    ]
    workload = Workload(name="talk", parameters={}, seed=0, requests=requests)
    with running_mock(failures=(Failure("503", 2),)) as mock:
        outcome = load_here(mock.url, workload, USERS, tmp_path / "r", endpoint="chat")
    assert outcome.metrics.completed == 1
    assert outcome.metrics.errors == {"turn before failed": 2, "http 503": 1}


def test_an_idle_connection_that_the_server_closed_is_replaced(tmp_path: Path) -> None:
    """A server may close an idle connection just as the next request is on its way; that is nobody's failure."""
    ok = answering(CHUNKED + chunks(EVENT, DONE, b""))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serve_one = asyncio.ensure_future(ok(reader, writer))
        await asyncio.sleep(0.4)
        serve_one.cancel()
        writer.close()

    with serving(handle) as port:
        arrival = {"name": "constant", "rate": 1.25}
        outcome = load_here(f"http://127.0.0.1:{port}", synthetic(3, 1), arrival, tmp_path / "r")
    assert (outcome.metrics.completed, outcome.metrics.errors) == (3, {})


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(argv, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the openssl command")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    answer = answering(CHUNKED, chunks(EVENT), chunks(EVENT, DONE, b""))
    with serving(answer, ssl=context) as port:
        url = f"https://localhost:{port}"
        refused = load_here(url, synthetic(2), USERS, tmp_path / "r")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        outcome = load_here(url, synthetic(6), USERS, tmp_path / "r")
    assert refused.metrics.errors == {"connect error": 2}
    assert "certificate" in refused.error_details["connect error"].lower()
    assert (outcome.metrics.completed, outcome.metrics.errors) == (6, {})
    assert Records(outcome.records).rows["n_events"].tolist() == [2] * 6


def test_a_worker_that_dies_is_an_error_and_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real_start = run_module.start_worker

    def start(*arguments: Any) -> Any:
        worker, pipe = real_start(*arguments)
        started.append(worker.pid)
        return worker, pipe

    monkeypatch.setattr(run_module, "start_worker", start)
    killer = threading.Timer(0.0, lambda: None)

    def kill_one(progress: Any) -> None:
        nonlocal killer
        if progress.completed and started:
            os.kill(started[0], signal.SIGKILL)

    from benchctl.loadgen.options import LoadOptions
    from workloads.arrivals import build_schedule

    with running_mock(ttft_s=0.02) as mock:
        options = LoadOptions(url=mock.url, model="mock", workers=2)
        outcome = run_module.run_load(
            options, synthetic(50_000), build_schedule(USERS, 50_000, 0), output=tmp_path / "r", on_progress=kill_one
        )
    assert "killed by signal 9" in (outcome.aborted or "")
    assert outcome.metrics.completed > 0
    assert outcome.metrics.ttft_s.n == outcome.metrics.completed
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_disk_that_fills_in_the_middle_keeps_what_was_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 3 * FLUSH_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with running_mock() as mock:
            outcome = load(mock.url, synthetic(50_000, 40), USERS, tmp_path / "r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in (outcome.aborted or "")
    assert outcome.metrics.completed > 10
    assert (tmp_path / "r").stat().st_size <= limit


def test_nothing_is_reported_of_a_load_that_broke_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_start = run_module.start_worker

    def start(*arguments: Any) -> Any:
        worker, pipe = real_start(*arguments)
        worker.kill()
        return worker, pipe

    monkeypatch.setattr(run_module, "start_worker", start)
    with running_mock() as mock, pytest.raises(LoadGeneratorError, match="killed by signal 9"):
        load(mock.url, synthetic(10), USERS, tmp_path / "r")


def test_a_full_disk_ends_the_load_with_its_reason(tmp_path: Path) -> None:
    """/dev/full takes nothing; through a link it stands where the records go."""
    (tmp_path / "full").symlink_to("/dev/full")
    with running_mock() as mock, pytest.raises(UserError, match="disk is full"):
        load(mock.url, synthetic(10), USERS, tmp_path / "full")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"timeout_s": 0.0}, "--timeout 0"),
        ({"timeout_s": float("nan")}, "--timeout nan"),
        ({"retries": -1}, "--retries -1"),
        ({"url": "ftp://x"}, "expected http://"),
        ({"url": "http://u:p@h/"}, "--api-key"),
        ({"url": "http://h:99999"}, "--url"),
        ({"endpoint": "chat"}, "--endpoint completions"),
        ({"slos": ("ttft",)}, "METRIC:TIME"),
        ({"warmup": "x"}, "--warmup"),
        ({"api_key": "a\r\nb"}, "--api-key"),
    ],
)
def test_bad_options_are_named_before_anything_starts(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(options.pop("url", "http://127.0.0.1:9"), synthetic(2), USERS, tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


def test_an_empty_workload_is_an_error(tmp_path: Path) -> None:
    from benchctl.loadgen.options import LoadOptions
    from workloads.arrivals import Schedule

    empty = Workload(name="none", parameters={}, seed=0, requests=[])
    schedule = Schedule(spec={}, seed=0, times_s=None, concurrency=1)
    with pytest.raises(UserError, match="has no request"):
        run_module.run_load(LoadOptions(url="http://x", model="m"), empty, schedule, output=tmp_path / "r")
