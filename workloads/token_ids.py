"""Prompts as token ids, generated without state: any request can be made on its own, in any order, at any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from server.errors import UserError
from workloads.base import WorkloadRequest
from workloads.rng import mix
from workloads.tokenizer import TokenizerLike

DEFAULT_VOCAB_SIZE = 32_000
MAX_VOCAB_SIZE = 10_000_000
FIRST_TOKEN_ID = 256
"""Without a tokenizer ids start here: control tokens and byte fallbacks sit below in the common vocabularies."""


class TokenIdTable:
    """The ids that prompts are made of.

    With a tokenizer: every id below `vocab_size` except special and added tokens. Without one: from `FIRST_TOKEN_ID`
    (or an eighth of the vocabulary, if less) up to `vocab_size`.
    """

    def __init__(self, tokenizer: TokenizerLike | None, vocab_size: int | None) -> None:
        if vocab_size is not None and not 16 <= vocab_size <= MAX_VOCAB_SIZE:
            raise UserError(f"vocab_size {vocab_size}: must be from 16 to {MAX_VOCAB_SIZE}")
        if tokenizer is None:
            size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
            self.ids = np.arange(min(FIRST_TOKEN_ID, size // 8), size, dtype=np.int64)
        else:
            size = tokenizer.vocab_size if vocab_size is None else min(vocab_size, tokenizer.vocab_size)
            usable = np.ones(size, dtype=bool)
            usable[[special for special in tokenizer.special_ids if special < size]] = False
            self.ids = np.flatnonzero(usable).astype(np.int64)
            if len(self.ids) == 0:
                raise UserError(f"tokenizer {tokenizer.name}: no ordinary token below vocab_size {size}")

    def draw(self, keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> list[int]:
        """The tokens at `positions` of the streams `keys` (broadcast to one dimension)."""
        picks = mix(keys, positions) % np.uint64(len(self.ids))
        tokens: list[int] = self.ids[picks.astype(np.int64)].tolist()
        return tokens


class RequestMaker(Protocol):
    """Makes request number `index` of a workload; must be picklable, and must always make the same."""

    def __call__(self, index: int) -> WorkloadRequest:
        """The whole request."""

    def timestamp_s(self, index: int) -> float | None:
        """Its `timestamp_s` without making the prompt."""


class GeneratedRequests(Sequence[WorkloadRequest]):
    """Requests made when they are looked at: a million prompts of a thousand tokens need no memory until sent."""

    def __init__(self, make: RequestMaker, indices: range) -> None:
        self._make = make
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def timestamps_s(self) -> list[float | None]:
        """`timestamp_s` of every request, without making prompts."""
        return [self._make.timestamp_s(index) for index in self._indices]

    @overload
    def __getitem__(self, position: int) -> WorkloadRequest: ...

    @overload
    def __getitem__(self, position: slice) -> GeneratedRequests: ...

    def __getitem__(self, position: int | slice) -> WorkloadRequest | GeneratedRequests:
        if isinstance(position, slice):
            return GeneratedRequests(self._make, self._indices[position])
        return self._make(self._indices[position])


def request_timestamps(requests: Sequence[WorkloadRequest]) -> list[float | None]:
    """`timestamp_s` of every request, the cheapest way there is."""
    if isinstance(requests, GeneratedRequests):
        return requests.timestamps_s
    return [request.timestamp_s for request in requests]
