"""The same 200 greedy requests alone, together, and with everything around them that must not matter: equal tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.serving import Server, start_server
from tests.integration.traffic import body, client, complete, complete_all, metrics, prompts, settled, stream

TINY = ("tiny", "--enforce-eager", "--device", "cpu", "--block-size", "16")
TOKENS = 12
REQUESTS = [body("tiny", prompt, TOKENS) for prompt in prompts(200, longest=60, seed=1)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("server"), *TINY) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def alone(server: Server) -> list[list[int]]:
    """Tokens of the requests one after the other."""
    tokens = asyncio.run(complete_all(server.url, REQUESTS, concurrency=1))
    assert all(len(output) == TOKENS for output in tokens)
    assert len({token for output in tokens for token in output}) > 50, "a model that repeats itself proves nothing"
    return tokens


def test_together_and_from_the_prefix_cache(server: Server, alone: list[list[int]]) -> None:
    before = metrics(server.url)
    assert asyncio.run(complete_all(server.url, REQUESTS, concurrency=200)) == alone
    after = asyncio.run(settled(server.url))
    assert after["prefix_cache_hits_total"] > before["prefix_cache_hits_total"]
    assert after["kv_cache_usage_perc"] == 0
    steps = after["num_steps_total"] - before["num_steps_total"]
    assert steps < 0.2 * before["num_steps_total"], "they must have run in one batch"


def test_with_aborts_around_them(server: Server, alone: list[list[int]]) -> None:
    before = metrics(server.url)

    async def run() -> list[list[int]]:
        async with client(400) as http:
            leavers = [
                asyncio.create_task(stream(http, server.url, {**request, "max_tokens": 3000}, leave_after=i % 9))
                for i, request in enumerate(REQUESTS[:100])
            ]
            tokens = await asyncio.gather(*(complete(http, server.url, request) for request in REQUESTS))
            left = await asyncio.gather(*leavers)
        assert not any(ended for _, ended in left)
        for i, (seen, _) in enumerate(left):
            assert seen[:TOKENS] == alone[i][: len(seen)]
        return list(tokens)

    assert asyncio.run(run()) == alone
    after = asyncio.run(settled(server.url))
    assert after["request_success_total:abort"] - before["request_success_total:abort"] == 100
    assert after["kv_cache_usage_perc"] == 0


def test_a_seeded_request_does_not_depend_on_its_company(server: Server, alone: list[list[int]]) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5}
    requests = [{**request, **sampled, "seed": i} for i, request in enumerate(REQUESTS[:40])]
    first = asyncio.run(complete_all(server.url, requests, concurrency=1))
    assert first != alone[:40]
    together = asyncio.run(complete_all(server.url, [*requests, *REQUESTS[:100], *requests], concurrency=180))
    assert together == [*first, *alone[:100], *first]


@pytest.mark.parametrize(
    ("arguments", "preempted"),
    [
        pytest.param(("--no-enable-prefix-caching",), False, id="no prefix cache"),
        pytest.param(("--num-gpu-blocks-override", "32"), True, id="tiny pool"),
        pytest.param(
            ("--num-gpu-blocks-override", "32", "--no-enable-prefix-caching", "--no-async-scheduling"),
            True,
            id="tiny pool, synchronous, no prefix cache",
        ),
        pytest.param(("--max-num-batched-tokens", "16"), False, id="chunks of 16 tokens"),
        pytest.param(("--api-server-count", "2"), False, id="two API processes"),
    ],
)
def test_in_another_configuration(
    tmp_path: Path, alone: list[list[int]], arguments: tuple[str, ...], preempted: bool
) -> None:
    with start_server(tmp_path, *TINY, *arguments) as server:
        server.wait_ready()
        assert asyncio.run(complete_all(server.url, REQUESTS, concurrency=200)) == alone
        after = asyncio.run(settled(server.url))
        assert bool(after["num_preemptions_total"]) == preempted
        assert bool(after["prefix_cache_queries_total"]) == ("--no-enable-prefix-caching" not in arguments)
        assert after["kv_cache_usage_perc"] == 0
        assert after["generation_tokens_total"] == len(REQUESTS) * TOKENS
        assert after["request_success_total:length"] == len(REQUESTS)
        assert after["num_compilations_total"] == after["num_jit_events_total"] == 0
