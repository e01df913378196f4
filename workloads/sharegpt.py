"""`sharegpt`: real conversations from a file in ShareGPT's schema, filtered as vLLM's benchmarks filter them."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import msgspec
import numpy as np

from server.errors import UserError
from workloads.base import Message, Workload, WorkloadRequest
from workloads.conversations import ConversationFile
from workloads.files import open_data
from workloads.length_filter import LengthFilter
from workloads.parameters import check_num_requests, convert, with_defaults
from workloads.rng import generator
from workloads.tokenizer import HOW_TO_GIVE, TokenizerLike


class ShareGptParameters(LengthFilter, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `sharegpt`.

    The filter's prompt is the turn's own text; its total is, in `conversation` mode, the whole history with it.
    """

    path: str
    """A .json array or a .jsonl file."""
    num_requests: int | None = None
    """Stop when there are this many; None: all that the file gives."""
    mode: Literal["single", "conversation"] = "single"
    """`single`: the first question that an answer follows. `conversation`: every turn, each after the answer to the
    one before."""
    request_format: Literal["prompt", "messages"] = "prompt"
    """How `single` sends the question: as plain text or as one chat message."""
    shuffle: bool = True
    """Take conversations in a seeded random order."""
    think_time_s: float = 0.0
    """`conversation`: mean wait between an answer and the next question."""
    think_time: Literal["fixed", "exponential"] = "exponential"
    ignore_eos: bool = True


class _Exchange(msgspec.Struct):
    """A question (what came since the last answer) and the lengths of it and of its recorded answer."""

    messages: list[Message]
    prompt_len: int
    output_len: int


def build_sharegpt(spec: dict[str, Any], *, seed: int, tokenizer: TokenizerLike | None) -> Workload:
    """Build from a specification (without `name`); `tokenizer` is needed, since the filter counts tokens.

    Raises:
        UserError: bad parameter, unreadable or malformed file, or nothing left after the filter.
    """
    parameters: ShareGptParameters = convert(ShareGptParameters, spec, where="workload sharegpt")
    if tokenizer is None:
        raise UserError(f"workload sharegpt: its filter counts tokens; {HOW_TO_GIVE}")
    check_num_requests(parameters.num_requests, where="workload sharegpt")
    if not (math.isfinite(parameters.think_time_s) and parameters.think_time_s >= 0):
        raise UserError(f"workload sharegpt: think_time_s {parameters.think_time_s} must not be negative")
    source = ConversationFile(open_data(parameters.path, where="workload sharegpt"))
    if len(source) == 0:
        raise UserError(f"workload sharegpt: {parameters.path} holds no conversation")
    order = np.arange(len(source))
    if parameters.shuffle:
        order = generator(seed, "sharegpt.order").permutation(len(source))
    think = generator(seed, "sharegpt.think_time")
    requests: list[WorkloadRequest] = []
    dropped: dict[str, int] = {}
    wanted = math.inf if parameters.num_requests is None else parameters.num_requests
    for position in order.tolist():
        if len(requests) >= wanted:
            break
        exchanges = _kept(_exchanges(source.turns(position), parameters.mode, tokenizer), parameters, dropped)
        for turn, exchange in enumerate(exchanges):
            if len(requests) < wanted:
                requests.append(_request(len(requests), position, turn, exchange, exchanges, parameters, think))
    if not requests:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in dropped.items())
        raise UserError(f"workload sharegpt: all conversations of {parameters.path} were dropped ({reasons})")
    notes = []
    if parameters.num_requests is not None and len(requests) < parameters.num_requests:
        notes.append(f"the file gives {len(requests)} requests, not the {parameters.num_requests} asked for")
    if parameters.mode == "conversation":
        notes.append("prompt_tokens counts message contents, recorded answers as history, without the chat template")
    elif parameters.request_format == "messages":
        notes.append("prompt_tokens counts message contents without the chat template")
    return Workload(
        name="sharegpt",
        parameters=with_defaults(parameters),
        seed=seed,
        requests=requests,
        dropped=dropped,
        tokenizer=tokenizer.name,
        notes=notes,
    )


def _exchanges(turns: list[Message], mode: str, tokenizer: TokenizerLike) -> list[_Exchange]:
    """The questions of a conversation that an answer follows at once; in `single` mode the first only."""
    exchanges: list[_Exchange] = []
    system: list[Message] = []
    for turn, following in itertools.pairwise(turns):
        if turn.role == "system" and not exchanges:
            system.append(turn)
        if turn.role != "user" or following.role != "assistant":
            continue
        messages = [*system, turn] if mode == "conversation" else [turn]
        system = []
        exchanges.append(
            _Exchange(
                messages=messages,
                prompt_len=sum(tokenizer.count(message.content) for message in messages),
                output_len=tokenizer.count(following.content, add_special_tokens=False),
            )
        )
        if mode == "single":
            break
    return exchanges


def _kept(exchanges: list[_Exchange], filter_: LengthFilter, dropped: dict[str, int]) -> list[_Exchange]:
    """The exchanges up to the first that the filter drops: what follows a missing turn makes no sense."""
    if not exchanges:
        reason = "no user turn with an answer"
        dropped[reason] = dropped.get(reason, 0) + 1
        return []
    history = 0
    for turn, exchange in enumerate(exchanges):
        reason_or_none = filter_.reason_to_drop(exchange.prompt_len, exchange.output_len)
        if reason_or_none is None and history + exchange.prompt_len + exchange.output_len > filter_.max_total_len:
            reason_or_none = f"history, prompt and output longer than {filter_.max_total_len} tokens"
        if reason_or_none is not None:
            dropped[reason_or_none] = dropped.get(reason_or_none, 0) + 1
            rest = len(exchanges) - turn - 1
            if rest:
                dropped["after a dropped turn"] = dropped.get("after a dropped turn", 0) + rest
            return exchanges[:turn]
        history += exchange.prompt_len + exchange.output_len
    return exchanges


def _request(
    index: int,
    conversation: int,
    turn: int,
    exchange: _Exchange,
    exchanges: list[_Exchange],
    parameters: ShareGptParameters,
    think: np.random.Generator,
) -> WorkloadRequest:
    if parameters.mode == "single":
        plain = parameters.request_format == "prompt"
        return WorkloadRequest(
            index=index,
            prompt=exchange.messages[0].content if plain else None,
            messages=None if plain else exchange.messages,
            prompt_tokens=exchange.prompt_len,
            max_tokens=exchange.output_len,
            ignore_eos=parameters.ignore_eos,
        )
    wait = parameters.think_time_s
    if wait > 0 and parameters.think_time == "exponential":
        wait = float(think.exponential(wait))
    history = sum(before.prompt_len + before.output_len for before in exchanges[:turn])
    return WorkloadRequest(
        index=index,
        messages=exchange.messages,
        prompt_tokens=history + exchange.prompt_len,
        max_tokens=exchange.output_len,
        ignore_eos=parameters.ignore_eos,
        conversation=conversation,
        turn=turn,
        think_time_s=wait if turn else 0.0,
        append_reply=True,
    )
