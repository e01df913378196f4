"""Answers that take long to write leave the event loop to others."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from server.api.generation import INLINE_POSITIONS, Delta, Generation, Prompt, Sequence
from server.api.responses import PromptTokensDetails, Usage
from server.api.routes_tokenize import token_strings
from server.api.serving import Job, run_whole
from server.api.tokenizer import load_tokenizer
from server.api.validation import Limits, StopConditions
from server.ipc.engine_to_api import RequestOutput, TokenLogprobs
from server.sampling_params import SamplingParams

TINY = load_tokenizer("tiny")


class Choice(msgspec.Struct):
    text: str


class Answer(msgspec.Struct):
    choices: list[Any]
    usage: Usage


class Format:
    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def choice(self, delta: Delta) -> Choice:
        self.threads.add(threading.current_thread())
        return Choice(delta.text)

    def response(self, choices: list[Any], usage: Usage) -> Answer:
        return Answer(choices, usage)


@pytest.mark.parametrize(("positions", "apart"), [(INLINE_POSITIONS // 2, False), (INLINE_POSITIONS, True)])
async def test_log_probabilities_of_many_positions_are_written_in_a_thread(positions: int, apart: bool) -> None:
    generation = Generation("g", 0, whole=True)
    prompts = [Prompt([1]), Prompt([1])]
    for prompt in prompts:
        detokenizer = TINY.detokenizer([], skip_special_tokens=True)
        conditions = StopConditions((), False, True, 0)
        Sequence(generation, "g", prompt, SamplingParams(max_tokens=9), conditions, detokenizer)

    def submit(generation: Generation, priority: int) -> None:
        logprobs: list[TokenLogprobs | None] = [TokenLogprobs([65], [-1.0], 1)] * positions
        for sequence, text in reversed(list(zip(generation.sequences, b"ab", strict=True))):
            sequence.push(RequestOutput("g", [text], finish_reason="length", prompt_logprobs=logprobs))

    client = SimpleNamespace(submit=submit, release=lambda generation: None)
    exchange = SimpleNamespace(watch=lambda on_gone: None, unwatch=lambda: None)
    http = SimpleNamespace(scope={"state": {"exchange": exchange}})
    with ThreadPoolExecutor(1) as thread:
        state = SimpleNamespace(client=client, writer_thread=thread)
        format = Format()
        answer = await run_whole(Job(generation, prompts, 0), cast(Any, state), cast(Any, http), format)
    expected = Answer([Choice("a"), Choice("b")], Usage(2, 2, 4, PromptTokensDetails(0)))
    assert answer.body == msgspec.json.encode(expected)
    assert (threading.current_thread() not in format.threads) == apart


async def test_strings_of_many_tokens_are_told_in_turns() -> None:
    state = SimpleNamespace(tokenizer=TINY, limits=Limits(4096, 512, ()))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(count_turns())
    assert await token_strings([97, 98] * 10_000, cast(Any, state)) == ["a", "b"] * 10_000
    assert turns > 5
    other.cancel()
