"""`trace`: public request traces replayed with prompts of the recorded lengths, in recorded time.

Rules, each also recorded in the workload's notes when it changed anything:

- `start_s`/`end_s` cut in the trace's own time, the first arrival at 0; what is left starts at 0 again.
- `length_scale` multiplies prompt and output lengths, and the block of tokens that one hash id stands for, so that the
  shared share of a prompt stays what it was.
- `max_input_len`/`max_output_len` clip (a prompt loses its end, shared prefixes survive) or, with `too_long = "drop"`,
  drop the row.
- `loop` repeats what is left; a repetition starts one mean gap after the last arrival, and has prompts of its own: a
  prefix cache must not see the same trace twice.
- `speedup` divides all times at the end.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from server.errors import UserError
from workloads.base import Workload, WorkloadRequest
from workloads.export import replay_export
from workloads.files import open_data
from workloads.parameters import check_num_requests, convert, with_defaults
from workloads.rng import generator, stream_key, subkeys
from workloads.text import TextGenerator
from workloads.token_ids import GeneratedRequests, TokenIdTable
from workloads.tokenizer import HOW_TO_GIVE, TokenizerLike
from workloads.trace_rows import TraceRows, detect_format, read_rows


class TraceParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `trace`."""

    path: str
    format: Literal["auto", "azure", "mooncake", "burstgpt", "jsonl"] = "auto"
    num_requests: int | None = None
    """Most requests, counted after looping; None: all."""
    start_s: float = 0.0
    end_s: float | None = None
    speedup: float = 1.0
    loop: int = 1
    length_scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    too_long: Literal["clip", "drop"] = "clip"
    block_size: int = 512
    """Tokens that one of Mooncake's hash ids stands for, before scaling."""
    prompt_format: Literal["ids", "text"] = "ids"
    vocab_size: int | None = None
    ignore_eos: bool = True


class _MakeIds:
    """Request i as token ids. With block hashes each block is keyed by its hash, else the prompt by i."""

    def __init__(self, rows: TraceRows, parameters: TraceParameters, table: TokenIdTable, seed: int) -> None:
        self._rows, self._table, self._parameters = rows, table, parameters
        self._per_loop = len(rows)
        self._block = max(1, round(parameters.block_size * parameters.length_scale))
        self._prompt_key, self._block_key = stream_key(seed, "trace.prompt"), stream_key(seed, "trace.block")
        span_s = float(rows.times_s[-1])
        self._period_s = span_s + (span_s / (len(rows) - 1) if len(rows) > 1 else 1.0)

    def __call__(self, index: int) -> WorkloadRequest:
        repetition, row = divmod(index, self._per_loop)
        length = int(self._rows.input_lens[row])
        return WorkloadRequest(
            index=index,
            prompt_token_ids=self._table.draw(*self._keys(index, repetition, row, length)),
            prompt_tokens=length,
            max_tokens=int(self._rows.output_lens[row]),
            ignore_eos=self._parameters.ignore_eos,
            timestamp_s=self.timestamp_s(index),
        )

    def timestamp_s(self, index: int) -> float:
        """Seconds from the start of the run."""
        repetition, row = divmod(index, self._per_loop)
        return (repetition * self._period_s + float(self._rows.times_s[row])) / self._parameters.speedup

    def _keys(
        self, index: int, repetition: int, row: int, length: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        positions = np.arange(length, dtype=np.uint64)
        own = subkeys(self._prompt_key, np.array([index]))
        if self._rows.hash_ids is None or self._rows.hash_starts is None:
            return own, positions
        start, end = self._rows.hash_starts[row]
        base = int(subkeys(self._block_key, np.array([repetition]))[0])
        blocks = subkeys(base, self._rows.hash_ids[start:end])
        keys = np.repeat(blocks, self._block)[:length]
        # Within a block the position counts from the block's start, whatever stands before it.
        positions[: len(keys)] %= np.uint64(self._block)
        if len(keys) < length:  # more tokens than hashes stand for: the rest is this request's alone
            keys = np.concatenate([keys, np.repeat(own, length - len(keys))])
        return keys, positions


def build_trace(spec: dict[str, Any], *, seed: int, tokenizer: TokenizerLike | None) -> Workload:
    """Build from a specification (without `name`).

    Raises:
        UserError: bad parameter, unreadable or malformed file, or no row left.
    """
    parameters: TraceParameters = convert(TraceParameters, spec, where="workload trace")
    _check(parameters)
    path = open_data(parameters.path, where="workload trace")
    format_ = detect_format(path) if parameters.format == "auto" else parameters.format
    if format_ == "jsonl":
        _refuse_for_export(parameters)
        return replay_export(
            path,
            with_defaults(parameters),
            seed=seed,
            start_s=parameters.start_s,
            end_s=parameters.end_s,
            speedup=parameters.speedup,
            num_requests=parameters.num_requests,
        )
    if parameters.prompt_format == "text" and tokenizer is None:
        raise UserError(f"workload trace: prompt_format=text counts tokens; {HOW_TO_GIVE}")
    rows = read_rows(path, format_)
    if parameters.prompt_format == "text" and rows.hash_ids is not None:
        raise UserError("workload trace: prompts with hash_ids share blocks of token ids; prompt_format=text cannot")
    rows, dropped, notes = _shaped(rows, parameters)
    count = len(rows) * parameters.loop
    if parameters.num_requests is not None:
        count = min(count, parameters.num_requests)
    check_num_requests(count, where="workload trace")
    if rows.hash_ids is not None and parameters.loop > 1:
        notes.append("each repetition of the trace has blocks of its own: nothing is shared between repetitions")
    make = _MakeIds(rows, parameters, TokenIdTable(tokenizer, parameters.vocab_size), seed)
    requests: GeneratedRequests | list[WorkloadRequest] = GeneratedRequests(make, range(count))
    if parameters.prompt_format == "text" and tokenizer is not None:
        requests = [_as_text(request, seed, tokenizer) for request in requests]
    return Workload(
        name="trace",
        parameters={**with_defaults(parameters), "format": format_},
        seed=seed,
        requests=requests,
        dropped=dropped,
        tokenizer=tokenizer.name if tokenizer else None,
        notes=notes,
    )


def is_export(spec: dict[str, Any]) -> bool:
    """Whether a specification names an exported workload, whose requests are in the file as they are sent.

    Raises UserError for a file that cannot be read or is no trace.
    """
    format_, path = spec.get("format", "auto"), spec.get("path")
    if format_ != "auto" or not isinstance(path, str):
        return format_ == "jsonl"
    return detect_format(open_data(path, where="workload trace")) == "jsonl"


def _check(parameters: TraceParameters) -> None:
    for name in ("speedup", "length_scale"):
        value = getattr(parameters, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"workload trace: {name} must be a number above 0, not {value}")
    check_num_requests(parameters.num_requests, where="workload trace")
    for name in ("loop", "max_input_len", "max_output_len", "block_size"):
        value = getattr(parameters, name)
        if value is not None and value < 1:
            raise UserError(f"workload trace: {name} must be at least 1, not {value}")
    end_s = math.inf if parameters.end_s is None else parameters.end_s
    if not 0 <= parameters.start_s < end_s:
        raise UserError(f"workload trace: nothing lies between start_s {parameters.start_s} and end_s {end_s}")


def _refuse_for_export(parameters: TraceParameters) -> None:
    """An export holds finished requests: what would change them is refused, not ignored."""
    defaults = TraceParameters(path="")
    for name in ("loop", "length_scale", "max_input_len", "max_output_len", "prompt_format", "vocab_size"):
        if getattr(parameters, name) != getattr(defaults, name):
            raise UserError(f"workload trace: {name} does not apply to an exported workload, whose requests are fixed")


def _shaped(rows: TraceRows, parameters: TraceParameters) -> tuple[TraceRows, dict[str, int], list[str]]:
    """Rows sliced, scaled and clipped, with drops and notes."""
    dropped, notes = dict(rows.dropped), list(rows.notes)
    end_s = math.inf if parameters.end_s is None else parameters.end_s
    inside = (rows.times_s >= parameters.start_s) & (rows.times_s < end_s)
    if outside := int((~inside).sum()):
        dropped["outside start_s to end_s"] = outside
    rows = rows.select(np.flatnonzero(inside))
    if parameters.length_scale != 1.0:
        rows.input_lens = np.maximum(1, np.rint(rows.input_lens * parameters.length_scale)).astype(np.int64)
        rows.output_lens = np.maximum(1, np.rint(rows.output_lens * parameters.length_scale)).astype(np.int64)
        notes.append(f"lengths scaled by {parameters.length_scale:g}, at least 1 token")
    rows = _cut_to_wanted(rows, parameters)
    bounds = (
        ("input", rows.input_lens, parameters.max_input_len),
        ("output", rows.output_lens, parameters.max_output_len),
    )
    keep = np.ones(len(rows), dtype=bool)
    for what, lengths, bound in bounds:
        if bound is None or not (long := lengths > bound).any():
            continue
        if parameters.too_long == "drop":
            reason = f"{what} longer than {bound} tokens"
            dropped[reason] = int((long & keep).sum())
            keep &= ~long
        else:
            notes.append(f"{what} lengths clipped to {bound} tokens in {int(long.sum())} of {len(rows)} rows")
            lengths[long] = bound
    rows = rows.select(np.flatnonzero(keep))
    if len(rows) == 0:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in dropped.items())
        raise UserError(f"workload trace: no row of {parameters.path} is left (dropped: {reasons})")
    rows.times_s = rows.times_s - rows.times_s[0]
    return rows, dropped, notes


def _cut_to_wanted(rows: TraceRows, parameters: TraceParameters) -> TraceRows:
    """The rows up to the last that `num_requests` sends, so that nothing is told of those beyond it."""
    wanted, keep = parameters.num_requests, np.ones(len(rows), dtype=bool)
    if wanted is None:
        return rows
    if parameters.too_long == "drop":
        for lengths, bound in (
            (rows.input_lens, parameters.max_input_len),
            (rows.output_lens, parameters.max_output_len),
        ):
            if bound is not None:
                keep &= lengths <= bound
    sent = np.flatnonzero(keep)
    return rows if len(sent) <= wanted else rows.select(np.arange(sent[wanted - 1] + 1))


def _as_text(request: WorkloadRequest, seed: int, tokenizer: TokenizerLike) -> WorkloadRequest:
    source = TextGenerator(generator(seed, f"trace.text.{request.index}"))
    length = request.prompt_tokens or 0
    return msgspec.structs.replace(request, prompt_token_ids=None, prompt=source.exact(length, tokenizer))
