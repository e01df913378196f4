"""Sampling parameters of the rows of the batch, and the metadata of a step made from them.

The metadata of one step serves the next one as long as the same rows sample and nobody joined or left, which is the
common case while decoding; then nothing is built or copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from server.ipc.engine_to_worker import NewRequest
from server.sampling_params import SamplingParams
from server.worker.sampler import PenaltyRows, RandomRows, SamplingMetadata, SparseLogits

_SEED_RANGE = 2**63
# Requests may ask for any positive number. These are as good as infinity and 0 to a sampler of float32, and a logit
# divided or multiplied by both stays finite, so that -inf still masks (-inf / inf is no number). A GPU's fast division
# needs divisors below 2**126.
_LARGEST, _SMALLEST = 1e30, 1e-30


class SamplingState:
    """Per-row parameters, by the rows of `InputBatch`."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, seed: int) -> None:
        self._vocab = vocab_size
        self._device = device
        self._random = np.random.default_rng(seed)
        self._params: list[SamplingParams | None] = [None] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self._top_p = np.full(max_num_seqs, 2.0, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self._biased: set[int] = set()
        self._penalised = _TokenCounts(vocab_size, device)
        self._cached_rows: np.ndarray | None = None
        self._cached = SamplingMetadata()

    def add(self, row: int, request: NewRequest) -> None:
        params = request.sampling
        self._params[row] = params
        self._temperature[row] = min(params.temperature, _LARGEST)
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab else self._vocab
        self._top_p[row] = params.top_p if params.top_p < 1.0 else 2.0
        self._min_p[row] = params.min_p
        seed = self._random.integers(_SEED_RANGE) if params.seed is None else params.seed % _SEED_RANGE
        self._seeds[row] = seed
        self._min_tokens[row] = params.min_tokens if params.stop_token_ids or params.eos_token_ids else 0
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        if params.logit_bias:
            self._biased.add(row)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            prompt = request.token_ids[: request.num_prompt_tokens]
            self._penalised.add(row, prompt, request.token_ids[request.num_prompt_tokens :])
        self._cached_rows = None

    def drop(self, row: int) -> None:
        self._params[row] = None
        self._temperature[row] = 0.0
        self._min_tokens[row] = 0
        self._num_logprobs[row] = -1
        self._biased.discard(row)
        self._penalised.drop(row)
        self._cached_rows = None

    def num_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """How many likeliest tokens each row wants log-probabilities of; -1: none at all."""
        return self._num_logprobs[rows]

    def metadata(self, rows: np.ndarray, num_generated: np.ndarray) -> SamplingMetadata:
        """Metadata for the rows (S,) that sample; `num_generated` (S,) counts their output tokens so far."""
        if self._cached_rows is None or not np.array_equal(rows, self._cached_rows):
            self._cached = SamplingMetadata(
                random=self._random_rows(rows), penalties=self._penalty_rows(rows), bias=self._bias(rows)
            )
            self._cached_rows = rows
        self._cached.masked = self._masked(rows, num_generated)
        return self._cached

    def _to_device(self, array: np.ndarray | Sequence[int] | Sequence[float]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _random_rows(self, rows: np.ndarray) -> RandomRows | None:
        chosen = np.flatnonzero(self._temperature[rows] > 0)
        if not chosen.size:
            return None
        own = rows[chosen]
        top_k, top_p, min_p = self._top_k[own], self._top_p[own], self._min_p[own]
        max_top_k = int(top_k.max())
        return RandomRows(
            rows=None if chosen.size == rows.size else self._to_device(chosen),
            temperature=self._to_device(self._temperature[own]),
            seeds=self._to_device(self._seeds[own]),
            top_k=self._to_device(top_k) if (top_k < self._vocab).any() else None,
            top_p=self._to_device(top_p) if (top_p < 1.0).any() else None,
            min_p=self._to_device(min_p) if (min_p > 0.0).any() else None,
            max_top_k=max_top_k,
        )

    def _penalty_rows(self, rows: np.ndarray) -> PenaltyRows | None:
        slots = self._penalised.slots
        chosen = [i for i, row in enumerate(rows.tolist()) if row in slots] if slots else []
        if not chosen:
            return None
        params = [p for i in chosen if (p := self._params[rows[i]]) is not None]
        columns = np.array(
            [
                (p.presence_penalty, p.frequency_penalty, min(max(p.repetition_penalty, _SMALLEST), _LARGEST))
                for p in params
            ],
            np.float32,
        )
        presence, frequency, repetition = (self._to_device(columns[:, i : i + 1]) for i in range(3))
        return PenaltyRows(
            rows=self._to_device(np.array(chosen, np.int64)),
            slots=self._to_device(np.array([slots[int(rows[i])] for i in chosen], np.int64)),
            presence=presence,
            frequency=frequency,
            repetition=repetition,
            output_counts=self._penalised.output_counts,
            prompt_mask=self._penalised.prompt_mask,
        )

    def _bias(self, rows: np.ndarray) -> SparseLogits | None:
        if not self._biased:
            return None
        index: list[int] = []
        values: list[float] = []
        for i, row in enumerate(rows.tolist()):
            params = self._params[row] if row in self._biased else None
            if params is not None and params.logit_bias:
                index.extend(i * self._vocab + token for token in params.logit_bias)
                values.extend(params.logit_bias.values())
        return self._sparse(index, values)

    def _masked(self, rows: np.ndarray, num_generated: np.ndarray) -> SparseLogits | None:
        below = np.flatnonzero(num_generated < self._min_tokens[rows])
        index: list[int] = []
        for i in below.tolist():
            params = self._params[rows[i]]
            if params is not None:
                # A set: a token masked twice would be -inf twice, but one id may be in both lists.
                ends = {*params.eos_token_ids, *params.stop_token_ids}
                index.extend(i * self._vocab + token for token in ends if token < self._vocab)
        return self._sparse(index, [-np.inf] * len(index))

    def _sparse(self, index: list[int], values: list[float]) -> SparseLogits | None:
        if not index:
            return None
        return SparseLogits(self._to_device(np.array(index, np.int64)), self._to_device(np.array(values, np.float32)))


class _TokenCounts:
    """Which tokens penalised requests have seen, on the device; grows with the number of such requests."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.slots: dict[int, int] = {}
        """Row -> slot."""
        self.output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []

    def add(self, row: int, prompt: list[int], output: list[int]) -> None:
        if not self._free:
            self._grow()
        slot = self.slots[row] = self._free.pop()
        vocab, device = self.output_counts.shape[1], self.output_counts.device
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab)
        self.output_counts[slot] = counts.to(torch.int32).to(device)
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[torch.tensor(prompt, dtype=torch.int64)] = True
        self.prompt_mask[slot] = mask.to(device)

    def drop(self, row: int) -> None:
        slot = self.slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def _grow(self) -> None:
        old = self.output_counts.shape[0]
        new = max(4, old)
        self.output_counts = torch.cat(
            (self.output_counts, self.output_counts.new_zeros(new, self.output_counts.shape[1]))
        )
        self.prompt_mask = torch.cat((self.prompt_mask, self.prompt_mask.new_zeros(new, self.prompt_mask.shape[1])))
        self._free.extend(range(old + new - 1, old - 1, -1))
