"""`custom`: prompts, messages or several turns from a JSONL file of one's own, with limits per request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from server.errors import UserError
from workloads.base import Message, Workload, WorkloadRequest
from workloads.files import iter_jsonl, open_data
from workloads.parameters import check_num_requests, convert, near_matches, with_defaults
from workloads.rng import generator
from workloads.tokenizer import TokenizerLike


class CustomParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `custom`."""

    path: str
    max_tokens: int = 128
    """For rows that bring no limit of their own."""
    ignore_eos: bool = False
    """For rows that do not say: False lets the model end its answer early."""
    num_requests: int | None = None
    shuffle: bool = False
    think_time_s: float = 0.0
    """Wait before each later turn of a row with `turns`."""


class CustomRow(msgspec.Struct, kw_only=True):
    """One line: exactly one of `prompt`, `messages`, `prompt_token_ids` and `turns`; other keys are noted, not used."""

    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    turns: list[str] | None = None
    """Questions of one conversation; each is sent after the answer to the one before."""
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    timestamp_s: float | None = None
    extra_body: dict[str, Any] = {}


_BODIES = ("prompt", "messages", "prompt_token_ids", "turns")


def build_custom(spec: dict[str, Any], *, seed: int, tokenizer: TokenizerLike | None) -> Workload:
    """Build from a specification (without `name`); a tokenizer, when given, counts prompts and messages.

    Of later `turns` nothing is known: they hold the answers before.

    Raises:
        UserError: bad parameter, unreadable or malformed file (line named), or no row at all.
    """
    parameters: CustomParameters = convert(CustomParameters, spec, where="workload custom")
    check_num_requests(parameters.num_requests, where="workload custom")
    if parameters.max_tokens < 1:
        raise UserError(f"workload custom: max_tokens {parameters.max_tokens} must be at least 1")
    if not (math.isfinite(parameters.think_time_s) and parameters.think_time_s >= 0):
        raise UserError(f"workload custom: think_time_s {parameters.think_time_s} must not be negative")
    path = open_data(parameters.path, where="workload custom")
    rows, ignored = _read(path)
    if not rows:
        raise UserError(f"workload custom: {path} holds no row")
    order = np.arange(len(rows))
    if parameters.shuffle:
        order = generator(seed, "custom.order").permutation(len(rows))
    requests: list[WorkloadRequest] = []
    for conversation, position in enumerate(order.tolist()):
        requests.extend(_requests(rows[position], len(requests), conversation, parameters, tokenizer))
        if parameters.num_requests is not None and len(requests) >= parameters.num_requests:
            requests = requests[: parameters.num_requests]
            break
    notes = []
    if parameters.num_requests is not None and len(requests) < parameters.num_requests:
        notes.append(f"the file gives {len(requests)} requests, not the {parameters.num_requests} asked for")
    if tokenizer is not None and any(request.messages is not None for request in requests):
        later = "; of later turns it is not known" if any(request.turn for request in requests) else ""
        notes.append(f"prompt_tokens counts message contents without the chat template{later}")
    if ignored:
        notes.append("keys not used: " + ", ".join(f"{key} ({count} rows)" for key, count in sorted(ignored.items())))
    return Workload(
        name="custom",
        parameters=with_defaults(parameters),
        seed=seed,
        requests=requests,
        tokenizer=tokenizer.name if tokenizer else None,
        notes=notes,
    )


def _read(path: Path) -> tuple[list[CustomRow], dict[str, int]]:
    rows: list[CustomRow] = []
    ignored: dict[str, int] = {}
    for line, raw in iter_jsonl(path):
        try:
            row = msgspec.convert(raw, CustomRow)
        except msgspec.ValidationError as error:
            raise UserError(f"{path}: line {line}: {error}") from None
        if problem := _problem(row, raw):
            raise UserError(f"{path}: line {line}: {problem}")
        for key in raw.keys() - set(CustomRow.__struct_fields__):
            ignored[key] = ignored.get(key, 0) + 1
        rows.append(row)
    return rows, ignored


def _problem(row: CustomRow, raw: dict[str, Any]) -> str | None:
    given = [name for name in _BODIES if getattr(row, name) is not None]
    if len(given) > 1:
        return f"holds {' and '.join(given)}; want one of them"
    if not given:
        guess = near_matches(next(iter(raw), ""), _BODIES)
        return f"holds none of {', '.join(_BODIES)} (its keys: {', '.join(list(raw)[:8])[:120] or 'none'}; {guess})"
    if not getattr(row, given[0]):
        return f"{given[0]} is empty"
    if row.max_tokens is not None and row.max_tokens < 1:
        return f"max_tokens {row.max_tokens} is below 1"
    if row.prompt_token_ids is not None and min(row.prompt_token_ids) < 0:
        return "a token id is negative"
    if row.timestamp_s is not None and not 0 <= row.timestamp_s < math.inf:
        return f"timestamp_s {row.timestamp_s} must be a number from 0 on"
    return None


def _requests(
    row: CustomRow, first_index: int, conversation: int, parameters: CustomParameters, tokenizer: TokenizerLike | None
) -> list[WorkloadRequest]:
    max_tokens = parameters.max_tokens if row.max_tokens is None else row.max_tokens
    ignore_eos = parameters.ignore_eos if row.ignore_eos is None else row.ignore_eos
    if row.turns is not None:
        return [
            WorkloadRequest(
                index=first_index + turn,
                messages=[Message(role="user", content=text)],
                prompt_tokens=tokenizer.count(text) if turn == 0 and tokenizer is not None else None,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                timestamp_s=row.timestamp_s if turn == 0 else None,
                conversation=conversation,
                turn=turn,
                think_time_s=parameters.think_time_s if turn else 0.0,
                append_reply=True,
                extra_body=row.extra_body,
            )
            for turn, text in enumerate(row.turns)
        ]
    counted = None
    if row.prompt_token_ids is not None:
        counted = len(row.prompt_token_ids)
    elif row.prompt is not None and tokenizer is not None:
        counted = tokenizer.count(row.prompt)
    elif row.messages is not None and tokenizer is not None:
        counted = sum(tokenizer.count(message.content) for message in row.messages)
    return [
        WorkloadRequest(
            index=first_index,
            prompt_token_ids=row.prompt_token_ids,
            prompt=row.prompt,
            messages=row.messages,
            prompt_tokens=counted,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            timestamp_s=row.timestamp_s,
            extra_body=row.extra_body,
        )
    ]
