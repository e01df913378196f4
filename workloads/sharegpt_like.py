"""`sharegpt-like`: ShareGPT's lengths without ShareGPT, from a fit; the text is our own.

The fit. Prompt and output lengths are independent lognormals, rounded, then put through vLLM's filter. Published logs
of vLLM's serving benchmark on ShareGPT_V3 (1,000 prompts, Qwen2 and Qwen3 tokenizers) report 217,393 prompt tokens
and about 200,500 generated ones: means of 217.4 and 200.5 after the filter. The medians below were solved so that the
filtered means are those. The spreads (sigma) are our choice within the heavy tails that published histograms show (for
example figure 11 of "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023):
one mean does not determine them. After the filter: prompt p50 about 129, p90 about 569; output p50 about 109, p90
about 486 tokens. It is a fit, not the data set: the correlation between prompt and answer is not modelled.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from server.errors import UserError
from workloads.base import Workload, WorkloadRequest
from workloads.length_filter import LengthFilter
from workloads.parameters import check_num_requests, convert, with_defaults
from workloads.rng import generator, stream_key, subkeys
from workloads.text import TextGenerator
from workloads.token_ids import GeneratedRequests, TokenIdTable
from workloads.tokenizer import TokenizerLike

PROMPT_MEDIAN, PROMPT_SIGMA = 156.6, 1.5
OUTPUT_MEDIAN, OUTPUT_SIGMA = 111.1, 1.2

_FIT_NOTE = (
    "lengths from a lognormal fit to published ShareGPT means (217.4 prompt, 200.5 output tokens after vLLM's filter), "
    "not from the data set"
)
_FEWEST_KEPT = 1e-3
"""Smallest share of draws that a filter may keep before it is called impossible."""


class ShareGptLikeParameters(LengthFilter, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `sharegpt-like`."""

    num_requests: int = 100
    prompt_format: Literal["text", "ids"] = "text"
    """`text`: exact with a tokenizer, about right (and not counted) without one. `ids`: always exact."""
    length_scale: float = 1.0
    """Multiplies the lengths after the filter; at least 1 token stays beside what the tokenizer adds to a text."""
    vocab_size: int | None = None
    ignore_eos: bool = True


class _MakeIds:
    def __init__(
        self, table: TokenIdTable, lengths: list[tuple[int, int]], parameters: ShareGptLikeParameters, seed: int
    ) -> None:
        self._table, self._lengths, self._ignore_eos = table, lengths, parameters.ignore_eos
        self._keys = subkeys(stream_key(seed, "sharegpt-like.prompt"), np.arange(len(lengths)))

    def __call__(self, index: int) -> WorkloadRequest:
        prompt_len, output_len = self._lengths[index]
        positions = np.arange(prompt_len, dtype=np.uint64)
        return WorkloadRequest(
            index=index,
            prompt_token_ids=self._table.draw(self._keys[index : index + 1], positions),
            prompt_tokens=prompt_len,
            max_tokens=output_len,
            ignore_eos=self._ignore_eos,
        )

    def timestamp_s(self, index: int) -> None:
        """None: an arrival process decides."""


def build_sharegpt_like(spec: dict[str, Any], *, seed: int, tokenizer: TokenizerLike | None) -> Workload:
    """Build from a specification (without `name`). Raises UserError for parameters that cannot be met."""
    parameters: ShareGptLikeParameters = convert(ShareGptLikeParameters, spec, where="workload sharegpt-like")
    check_num_requests(parameters.num_requests, where="workload sharegpt-like")
    if not (np.isfinite(parameters.length_scale) and parameters.length_scale > 0):
        raise UserError(f"workload sharegpt-like: length_scale {parameters.length_scale} must be a number above 0")
    lengths, dropped = _draw_pairs(parameters, seed)
    notes = [_FIT_NOTE]
    as_text = parameters.prompt_format == "text"
    if parameters.length_scale != 1.0:
        scale, least = parameters.length_scale, 1
        if as_text and tokenizer is not None:
            least += tokenizer.count("")
        lengths = [(max(least, round(prompt * scale)), max(1, round(output * scale))) for prompt, output in lengths]
        notes.append(f"lengths scaled by {parameters.length_scale} after the filter")
    requests: GeneratedRequests | list[WorkloadRequest]
    if not as_text:
        table = TokenIdTable(tokenizer, parameters.vocab_size)
        requests = GeneratedRequests(_MakeIds(table, lengths, parameters, seed), range(len(lengths)))
    else:
        if tokenizer is None:
            notes.append("prompt lengths are approximate: no tokenizer was given to count with")
        requests = [
            _text_request(index, prompt_len, output_len, parameters, seed, tokenizer)
            for index, (prompt_len, output_len) in enumerate(lengths)
        ]
    return Workload(
        name="sharegpt-like",
        parameters=with_defaults(parameters),
        seed=seed,
        requests=requests,
        dropped=dropped,
        tokenizer=tokenizer.name if tokenizer else None,
        notes=notes,
    )


def _draw_pairs(parameters: ShareGptLikeParameters, seed: int) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Pairs that pass the filter, and the drops on the way by reason."""
    rng = generator(seed, "sharegpt-like.lengths")
    kept: list[tuple[int, int]] = []
    dropped: dict[str, int] = {}
    drawn = 0
    while True:
        # Portions of one size, so that a longer workload begins with the shorter one.
        normal = rng.standard_normal((256, 2))
        prompts = np.rint(PROMPT_MEDIAN * np.exp(PROMPT_SIGMA * normal[:, 0])).astype(np.int64)
        outputs = np.rint(OUTPUT_MEDIAN * np.exp(OUTPUT_SIGMA * normal[:, 1])).astype(np.int64)
        for prompt_len, output_len in zip(prompts.tolist(), outputs.tolist(), strict=True):
            reason = parameters.reason_to_drop(prompt_len, output_len)
            if reason is not None:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            kept.append((prompt_len, output_len))
            if len(kept) == parameters.num_requests:
                return kept, dropped
        drawn += len(normal)
        if drawn >= 10_000 and len(kept) < drawn * _FEWEST_KEPT:
            raise UserError("workload sharegpt-like: the filter drops next to everything; widen its bounds")


def _text_request(
    index: int,
    prompt_len: int,
    output_len: int,
    parameters: ShareGptLikeParameters,
    seed: int,
    tokenizer: TokenizerLike | None,
) -> WorkloadRequest:
    source = TextGenerator(generator(seed, f"sharegpt-like.text.{index}"))
    return WorkloadRequest(
        index=index,
        prompt=source.about(prompt_len) if tokenizer is None else source.exact(prompt_len, tokenizer),
        prompt_tokens=None if tokenizer is None else prompt_len,
        max_tokens=output_len,
        ignore_eos=parameters.ignore_eos,
    )
