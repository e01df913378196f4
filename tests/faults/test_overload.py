"""More than the server can do: the queue is bounded, the refused are told when to come back, memory stays flat, the
admitted are served as before, and afterwards everything is as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from tests.faults.harness import TINY, Stream, open_session, serve
from tests.integration.serving import Server

# 8 run and 8 wait: 160 at once are ten times what is admitted.
LIMITS = ("--max-num-seqs", "8", "--max-queue", "8")
ADMITTED = 16
ARRIVALS = 160


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("overload"), *TINY, *LIMITS) as running:
        running.wait_ready()
        yield running


def metrics(server: Server) -> dict[str, float]:
    """Plain counters and gauges by name."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if "{" in line}


def rss_bytes(server: Server) -> int:
    """Resident memory of all processes of the server."""
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.children())
    return sum(pages) * 4096


async def burst(session: aiohttp.ClientSession, server: Server, count: int) -> list[tuple[int, str | None]]:
    """(status, Retry-After) of `count` requests at once; bodies are read."""

    async def one(index: int) -> tuple[int, str | None]:
        body = {"prompt": [1, index % 200, 3] * 20, "max_tokens": 20, "ignore_eos": True, "stream": index % 2 == 0}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            text = await response.text()
            assert '"error"' in text if response.status != 200 else "length" in text
            return response.status, response.headers.get("Retry-After")

    return await asyncio.gather(*(one(index) for index in range(count)))


async def test_ten_times_the_capacity(server: Server) -> None:
    async with open_session() as session:
        await burst(session, server, ADMITTED)
        sizes = []
        for _ in range(6):
            answers = await burst(session, server, ARRIVALS)
            statuses = [status for status, _ in answers]
            assert set(statuses) == {200, 429}
            assert statuses.count(200) >= ADMITTED
            assert all(retry is not None and int(retry) >= 1 for status, retry in answers if status == 429)
            sizes.append(rss_bytes(server))
        assert sizes[-1] - sizes[1] < 16 << 20, f"memory grows: {sizes}"
        # Full recovery: nothing waits, nothing is held, and as many as fit are taken at once.
        assert [status for status, _ in await burst(session, server, ADMITTED)] == [200] * ADMITTED
        now = metrics(server)
        assert now["benchctl:num_requests_running"] == now["benchctl:num_requests_waiting"] == 0
        assert now["benchctl:kv_cache_usage_perc"] == 0
        assert now["benchctl:requests_rejected_total"] > 0


async def test_admitted_streams_go_on_while_others_are_refused(server: Server) -> None:
    async with open_session() as session:
        streams = [Stream() for _ in range(ADMITTED)]
        running = [asyncio.create_task(stream.run(session, server.url, max_tokens=300)) for stream in streams]
        await asyncio.gather(*(stream.started.wait() for stream in streams[: ADMITTED // 2]))
        refused = 0
        while streams[0].ending != "done":
            async with session.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response:
                refused += response.status == 429
        await asyncio.gather(*running)
        assert [stream.ending for stream in streams] == ["done"] * ADMITTED
        assert refused > 0


async def test_a_client_that_stops_reading_stalls_nobody(server: Server) -> None:
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"), limit=1)
    body = b'{"prompt": [1], "max_tokens": 4000, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await writer.drain()
    async with open_session() as session:
        stream = Stream()
        await stream.run(session, server.url, max_tokens=50)
        assert stream.ending == "done"
    writer.transport.abort()
    deadline = time.monotonic() + 20
    while metrics(server)["benchctl:num_requests_running"]:
        assert time.monotonic() < deadline, "the request of a client that is gone is aborted"
        await asyncio.sleep(0.1)
    assert metrics(server)["benchctl:kv_cache_usage_perc"] == 0
    del reader
