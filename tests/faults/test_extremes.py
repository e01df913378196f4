"""The farthest values that validation lets through, all together, with too few KV blocks and impatient clients: the
real engine and worker answer or are left, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.faults.harness import TINY, open_session, serve
from tests.integration.serving import Server

LIMITS = ("--max-model-len", "256", "--num-gpu-blocks-override", "20", "--block-size", "16")


def extreme(choose: random.Random) -> dict[str, Any]:
    return {
        "prompt": [choose.randrange(512) for _ in range(choose.randrange(1, 120))],
        "max_tokens": choose.randrange(1, 60),
        "n": choose.randrange(1, 4),
        "stream": choose.random() < 0.5,
        "echo": choose.random() < 0.3,
        "ignore_eos": True,
        "temperature": choose.choice([0, 1, 1e-30, 1e308]),
        "top_p": choose.choice([1, 1e-30, 0.5]),
        "top_k": choose.choice([0, 1, 5, 2**31 - 1, -1]),
        "min_p": choose.choice([0, 1, 0.5]),
        "logprobs": choose.choice([None, 0, 5, 20]),
        "seed": choose.choice([None, 0, -1, 2**63 - 1, -(2**63)]),
        "presence_penalty": choose.choice([0, 2, -2]),
        "frequency_penalty": choose.choice([0, 2, -2]),
        "repetition_penalty": choose.choice([1, 1e-300, 1e300]),
        "logit_bias": choose.choice([None, {"5": 100}, {str(token): -100 for token in range(512)}]),
        "stop": choose.choice([None, ["a" * 200, "\0"]]),
        "priority": choose.choice([0, 2**31 - 1, -(2**31)]),
    }


async def ask(session: aiohttp.ClientSession, server: Server, choose: random.Random) -> int | None:
    """The status; None when the client did not wait for it."""
    timeout = aiohttp.ClientTimeout(total=choose.choice([0.05, 0.3, 60, 60]))
    try:
        async with session.post(f"{server.url}/v1/completions", json=extreme(choose), timeout=timeout) as response:
            text = await response.text()
            assert '"error"' not in text, text[-300:]
            return response.status
    except TimeoutError:
        return None


async def gauges(session: aiohttp.ClientSession, server: Server) -> list[float]:
    async with session.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("num_requests_running{", "num_requests_waiting{", "kv_cache_usage_perc{")
    return [float(line.split()[-1]) for line in lines if any(name in line for name in names)]


async def test_extreme_requests_leave_nothing_behind(tmp_path: Path) -> None:
    choose = random.Random(1)
    with serve(tmp_path, *TINY, *LIMITS) as server:
        await asyncio.to_thread(server.wait_ready)
        async with open_session() as session:
            statuses = [await asyncio.gather(*(ask(session, server, choose) for _ in range(25))) for _ in range(2)]
            assert {status for round in statuses for status in round} <= {200, None}
            deadline = time.monotonic() + 20
            while await gauges(session, server) != [0, 0, 0]:
                assert time.monotonic() < deadline, await gauges(session, server)
                await asyncio.sleep(0.1)
        assert server.process.poll() is None, server.log_text()
        assert "Warning" not in server.log_text()
