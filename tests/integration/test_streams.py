"""Many streams at once: nobody starves, everybody finishes, and who leaves gives its blocks back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.serving import Server, start_server
from tests.integration.traffic import body, client, metrics, prompts, settled, stream

NUM_STREAMS = 64
PROMPTS = prompts(NUM_STREAMS, longest=40, seed=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("tiny", "--enforce-eager", "--device", "cpu", "--max-num-batched-tokens", "128")
    with start_server(tmp_path_factory.mktemp("server"), *arguments) as server:
        server.wait_ready()
        yield server


class Counts:
    """Tokens that each of several streams has got, and what the others had when somebody finished."""

    def __init__(self, number: int) -> None:
        self.tokens = [0] * number
        self.at_first_end: list[int] | None = None
        self.all_at_five = asyncio.Event()

    async def follow(self, http: httpx.AsyncClient, url: str, index: int, request: dict[str, Any]) -> None:
        async with http.stream("POST", f"{url}/v1/completions", json={**request, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.tokens[index] += len(choice.get("token_ids") or [])
                    if min(self.tokens) >= 5:
                        self.all_at_five.set()
        if self.at_first_end is None:
            self.at_first_end = list(self.tokens)


async def test_all_streams_move_together(server: Server) -> None:
    counts = Counts(NUM_STREAMS)
    async with client() as http:
        await asyncio.gather(*(counts.follow(http, server.url, i, body("tiny", p, 60)) for i, p in enumerate(PROMPTS)))
    assert counts.tokens == [60] * NUM_STREAMS
    assert counts.at_first_end is not None
    assert min(counts.at_first_end) >= 15, "a stream stood still while another went all the way"


async def test_a_long_prompt_does_not_stop_the_streams(server: Server) -> None:
    counts = Counts(16)
    async with client() as http:
        tasks = [
            asyncio.create_task(counts.follow(http, server.url, i, body("tiny", p, 300)))
            for i, p in enumerate(PROMPTS[:16])
        ]
        await counts.all_at_five.wait()
        before = list(counts.tokens)
        long_prompt = [i * 7 % 256 for i in range(2500)]
        tokens, _ = await stream(http, server.url, body("tiny", long_prompt, 1))
        gained = [now - then for now, then in zip(counts.tokens, before, strict=True)]
        await asyncio.gather(*tasks)
    assert len(tokens) == 1
    # 2500 tokens in steps of 128 of which the streams have 16: 23 steps at least.
    assert min(gained) >= 15


async def test_streams_that_are_left_give_their_blocks_back(server: Server) -> None:
    before = metrics(server.url)
    async with client() as http:
        leavers = [
            asyncio.create_task(stream(http, server.url, body("tiny", p, 3000), leave_after=5)) for p in PROMPTS[::2]
        ]
        stayers = [asyncio.create_task(stream(http, server.url, body("tiny", p, 150))) for p in PROMPTS[1::2]]
        await asyncio.gather(*leavers)
        for tokens, ended in await asyncio.gather(*stayers):
            assert ended
            assert len(tokens) == 150
    after = await settled(server.url)
    assert after["kv_cache_usage_perc"] == 0
    assert after["request_success_total:abort"] - before["request_success_total:abort"] == len(leavers)
    assert after["request_success_total:length"] - before["request_success_total:length"] == len(stayers)
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert generated < 150 * len(stayers) + 2000 * len(leavers), "who left must not be served to the end"
