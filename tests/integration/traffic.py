"""Requests to a running server and a look at its metrics."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


def metrics(url: str) -> dict[str, float]:
    """Samples of `/metrics` by name (without the `benchctl:` prefix), with the phase or reason where there is one."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            kind = sample.labels.get("phase") or sample.labels.get("finished_reason")
            name = sample.name.removeprefix("benchctl:")
            found[f"{name}:{kind}" if kind else name] = sample.value
    return found


async def settled(url: str, timeout_s: float = 10.0) -> dict[str, float]:
    """Metrics once nothing runs or waits. AssertionError when that does not come to be."""
    for _ in range(int(timeout_s / 0.05)):
        found = await asyncio.to_thread(metrics, url)
        if not found["num_requests_running"] and not found["num_requests_waiting"]:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"still busy: {found}")


def client(connections: int = 256) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=connections))


def body(model: str, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy request that returns token ids."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


async def complete(http: httpx.AsyncClient, url: str, request: dict[str, Any]) -> list[int]:
    """Token ids of one completion."""
    response = await http.post(f"{url}/v1/completions", json=request)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    token_ids: list[int] = choice["token_ids"]
    return token_ids


async def complete_all(url: str, requests: list[dict[str, Any]], concurrency: int) -> list[list[int]]:
    """Token ids of all requests, at most `concurrency` of them at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(request: dict[str, Any]) -> list[int]:
        async with gate:
            return await complete(http, url, request)

    async with client(concurrency) as http:
        return await asyncio.gather(*map(one, requests))


async def stream(
    http: httpx.AsyncClient, url: str, request: dict[str, Any], leave_after: int | None = None
) -> tuple[list[int], bool]:
    """Token ids of a streamed completion and whether it ended; hangs up after `leave_after` tokens."""
    tokens: list[int] = []
    async with http.stream("POST", f"{url}/v1/completions", json={**request, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return tokens, True
            if line.startswith("data: "):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or []
                if leave_after is not None and len(tokens) >= leave_after:
                    return tokens, False
    return tokens, False


def prompts(count: int, longest: int, seed: int, vocabulary: int = 256) -> list[list[int]]:
    """Random prompts; half of them begin as others do."""
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    families = [draw(longest) for _ in range(6)]
    made = []
    for i in range(count):
        own = draw(rng.randrange(1, longest // 2))
        made.append(own if i % 2 else rng.choice(families)[: rng.randrange(1, longest // 2)] + own)
    return made
