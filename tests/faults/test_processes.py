"""Processes of the server are killed and stopped for real: no client hangs, the tree ends, nothing stays behind.

All starts of this file use one port, so that each proves that the one before left it usable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.harness import (
    MODULES,
    TINY,
    Stream,
    can_bind,
    free_port,
    health_statuses,
    open_session,
    runtime_base,
    serve,
    wait_children,
)
from tests.integration.serving import Server, gone

NOTICE_S = 5.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


def assert_nothing_left(server: Server, children: list[int], tmp_path: Path, port: int) -> None:
    assert gone(children)
    assert can_bind(port)
    assert not list(runtime_base(tmp_path).iterdir()), "the directory of the ipc sockets is gone"


def words_for(number: signal.Signals) -> str:
    return "was killed by SIGKILL" if number == signal.SIGKILL else "has been stopped by a signal"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", MODULES)
async def test_under_64_streams(tmp_path: Path, port: int, module: str, number: signal.Signals) -> None:
    with serve(tmp_path, *TINY, port=port) as server:
        await asyncio.to_thread(server.wait_ready)
        children = server.children()
        async with open_session() as session:
            streams = [Stream() for _ in range(64)]
            running = [asyncio.create_task(stream.run(session, server.url)) for stream in streams]
            async with asyncio.timeout(60):
                await asyncio.gather(*(stream.started.wait() for stream in streams))
            statuses = asyncio.create_task(health_statuses(session, server.url, server.process))
            injected = time.monotonic()
            os.kill(server.child(module), number)
            async with asyncio.timeout(30):
                await asyncio.gather(*running)
            # What a dead API process cannot say, its closed connections do.
            expected = {"cut"} if module == "server.api" else {"error"}
            assert {stream.ending for stream in streams} == expected, server.log_text()
            assert max(stream.ended_at for stream in streams) - injected < NOTICE_S
            seen = await statuses
        assert 503 in seen or module == "server.api"
        assert 200 not in seen[seen.index(503) :] if 503 in seen else True
        assert server.process.wait(20) == 1
        assert words_for(number) in server.log_text()
        assert_nothing_left(server, children, tmp_path, port)


def test_the_port_serves_again(tmp_path: Path, port: int) -> None:
    with serve(tmp_path, *TINY, port=port) as server:
        server.wait_ready()
        assert server.url.endswith(f":{port}")


@pytest.mark.nightly
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", MODULES)
def test_idle(tmp_path: Path, port: int, module: str, number: signal.Signals) -> None:
    with serve(tmp_path, *TINY, port=port) as server:
        server.wait_ready()
        children = server.children()
        os.kill(server.child(module), number)
        assert server.process.wait(20) == 1
        assert words_for(number) in server.log_text()
        assert_nothing_left(server, children, tmp_path, port)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", MODULES)
def test_while_starting(tmp_path: Path, port: int, module: str, number: signal.Signals) -> None:
    with serve(tmp_path, *TINY, port=port) as server:
        children = wait_children(server)
        os.kill(server.child(module), number)
        assert server.process.wait(20) == 1
        assert words_for(number) in server.log_text()
        assert not server.ready_file.exists()
        assert_nothing_left(server, children, tmp_path, port)


def test_a_pause_shorter_than_the_limit_is_survived(tmp_path: Path, port: int) -> None:
    with serve(tmp_path, *TINY, port=port) as server:
        server.wait_ready()
        pids = [*server.children(), server.process.pid]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(1.0)
        assert server.process.poll() is None, server.log_text()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
