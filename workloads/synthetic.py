"""`synthetic`: requests of stated lengths, with or without prefixes that groups of requests really share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from server.errors import UserError
from workloads.base import Workload, WorkloadRequest
from workloads.lengths import Lengths, draw_lengths
from workloads.parameters import check_num_requests, convert, with_defaults
from workloads.rng import generator, stream_key, subkeys
from workloads.text import TextGenerator
from workloads.token_ids import GeneratedRequests, TokenIdTable
from workloads.tokenizer import HOW_TO_GIVE, TokenizerLike


class SyntheticParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `synthetic`; lengths are token counts."""

    num_requests: int = 100
    input_len: Lengths = 512
    """Prompt length, the shared prefix included."""
    output_len: Lengths = 128
    prompt_format: Literal["ids", "text"] = "ids"
    """`text` needs a tokenizer; the count is checked by encoding the finished text."""
    num_prefixes: int = 0
    """Distinct shared prefixes; each request takes one at random. 0: nothing is shared."""
    prefix_len: int = 0
    vocab_size: int | None = None
    """Ids are drawn below this; None: the tokenizer's vocabulary, or 32000 without one."""
    ignore_eos: bool = True


class _MakeIds:
    """Request number i as token ids: prefix tokens keyed by the group, the rest by the request."""

    def __init__(
        self,
        table: TokenIdTable,
        inputs: npt.NDArray[np.int64],
        outputs: npt.NDArray[np.int64],
        groups: npt.NDArray[np.int64] | None,
        parameters: SyntheticParameters,
        seed: int,
    ) -> None:
        self._table, self._inputs, self._outputs, self._groups = table, inputs, outputs, groups
        self._prefix_len = parameters.prefix_len if groups is not None else 0
        self._ignore_eos = parameters.ignore_eos
        self._request_keys = subkeys(stream_key(seed, "synthetic.prompt"), np.arange(len(inputs)))
        self._group_keys = subkeys(stream_key(seed, "synthetic.prefix"), np.arange(max(1, parameters.num_prefixes)))

    def __call__(self, index: int) -> WorkloadRequest:
        length = int(self._inputs[index])
        keys = np.full(length, self._request_keys[index])
        if self._groups is not None:
            keys[: self._prefix_len] = self._group_keys[self._groups[index]]
        return WorkloadRequest(
            index=index,
            prompt_token_ids=self._table.draw(keys, np.arange(length, dtype=np.uint64)),
            prompt_tokens=length,
            max_tokens=int(self._outputs[index]),
            ignore_eos=self._ignore_eos,
        )

    def timestamp_s(self, index: int) -> None:
        """None: an arrival process decides."""


def build_synthetic(spec: dict[str, Any], *, seed: int, tokenizer: TokenizerLike | None) -> Workload:
    """Build from a specification (without `name`). Raises UserError for parameters that cannot be met."""
    parameters: SyntheticParameters = convert(SyntheticParameters, spec, where="workload synthetic")
    _check(parameters, tokenizer)
    n = parameters.num_requests
    inputs = draw_lengths(
        parameters.input_len, n, generator(seed, "synthetic.input_len"), where="workload synthetic: input_len"
    )
    outputs = draw_lengths(
        parameters.output_len, n, generator(seed, "synthetic.output_len"), where="workload synthetic: output_len"
    )
    groups = None
    if parameters.num_prefixes:
        if inputs.min() <= parameters.prefix_len:
            raise UserError(
                f"workload synthetic: prefix_len {parameters.prefix_len} leaves nothing of a prompt of {inputs.min()} "
                "tokens; raise the least input_len above it"
            )
        groups = generator(seed, "synthetic.group").integers(0, parameters.num_prefixes, size=n, dtype=np.int64)
    notes = []
    requests: GeneratedRequests | list[WorkloadRequest]
    if parameters.prompt_format == "text" and tokenizer is not None:
        requests = _text_requests(parameters, inputs, outputs, groups, seed, tokenizer)
        if groups is not None:
            notes.append("text prompts share the prefix's text; the last shared token may merge with what follows")
    else:
        table = TokenIdTable(tokenizer, parameters.vocab_size)
        requests = GeneratedRequests(_MakeIds(table, inputs, outputs, groups, parameters, seed), range(n))
    return Workload(
        name="synthetic",
        parameters=with_defaults(parameters),
        seed=seed,
        requests=requests,
        tokenizer=tokenizer.name if tokenizer else None,
        notes=notes,
    )


def _check(parameters: SyntheticParameters, tokenizer: TokenizerLike | None) -> None:
    check_num_requests(parameters.num_requests, where="workload synthetic")
    if parameters.num_prefixes < 0 or parameters.prefix_len < 0:
        raise UserError("workload synthetic: num_prefixes and prefix_len must not be negative")
    if (parameters.num_prefixes > 0) != (parameters.prefix_len > 0):
        raise UserError("workload synthetic: num_prefixes and prefix_len go together; set both or neither")
    if parameters.prompt_format == "text" and tokenizer is None:
        raise UserError(f"workload synthetic: prompt_format=text counts tokens; {HOW_TO_GIVE}")


def _text_requests(
    parameters: SyntheticParameters,
    inputs: npt.NDArray[np.int64],
    outputs: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64] | None,
    seed: int,
    tokenizer: TokenizerLike,
) -> list[WorkloadRequest]:
    prefixes = [
        TextGenerator(generator(seed, f"synthetic.prefix_text.{group}")).exact(parameters.prefix_len, tokenizer)
        for group in range(parameters.num_prefixes)
    ]
    requests = []
    for index in range(parameters.num_requests):
        source = TextGenerator(generator(seed, f"synthetic.text.{index}"))
        prefix = "" if groups is None else prefixes[groups[index]] + "\n"
        requests.append(
            WorkloadRequest(
                index=index,
                prompt=source.exact(int(inputs[index]), tokenizer, prefix=prefix),
                prompt_tokens=int(inputs[index]),
                max_tokens=int(outputs[index]),
                ignore_eos=parameters.ignore_eos,
            )
        )
    return requests
