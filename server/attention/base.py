"""The interface that every attention backend implements.

Shapes use T = tokens of the batch, B = sequences, H = query heads, K = key/value heads, D = head size,
N = blocks of the KV cache, P = tokens per block ("page size").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch


@dataclass(slots=True)
class AttentionSpec:
    """What a model and a device ask of a backend."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """0 while the backend may still choose its preferred size."""
    max_num_seqs: int = 256
    max_model_len: int = 8192
    flash_decode: Literal["native", "split"] = "split"
    """FLASH_ATTN only: `--flash-decode`."""


@dataclass(slots=True)
class AttentionMetadata:
    """One batch, as every backend sees it. Tensors live on the device unless the name ends in `_cpu`.

    Sequences are ordered as in the worker's batch. Tokens of sequence b are rows
    `query_start_loc[b]:query_start_loc[b + 1]` of q/k/v and are the *last* tokens of its `seq_lens[b]` positions;
    attention is causal. Under a CUDA Graph the tensors are persistent buffers of the captured size: padded sequences
    have `seq_lens` 0 and no query rows (their `query_start_loc` repeats), padded tokens have slot -1.
    """

    num_tokens: int
    """Rows of q/k/v that are real; rows above are padding and must not change any result."""
    num_seqs: int
    query_start_loc: torch.Tensor
    """int32 (B + 1,)"""
    seq_lens: torch.Tensor
    """int32 (B,): computed tokens plus this step's tokens."""
    block_table: torch.Tensor
    """int32 (B, max_blocks_per_seq); entries past a sequence's last block are arbitrary valid-or-not integers."""
    slot_mapping: torch.Tensor
    """int64 (T,): `block_id * P + offset` at which a token's key and value are written; -1: nowhere (padding)."""
    max_query_len: int
    """1: a pure decode batch."""
    max_seq_len: int
    """Upper bound of `seq_lens`; for a captured graph the bound is the model length."""
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    num_decodes: int = 0
    """So many sequences at the front bring one token each. Of a mixed batch: the scheduler puts them there."""
    decode_plan: tuple[bool, torch.Tensor] | None = field(default=None, init=False)
    """What the first layer has worked out for all of them, and whether that was under capture: a backend's own."""
    _parts: tuple[AttentionMetadata, AttentionMetadata] | None = field(default=None, init=False)

    def split(self) -> tuple[AttentionMetadata, AttentionMetadata]:
        """The decodes at the front, and the other sequences; both count rows as the whole batch does, so that the
        others' `query_start_loc` begins with `num_decodes`. Made once for all layers."""
        if self._parts is None:
            count = self.num_decodes
            decodes = replace(
                self,
                num_tokens=count,
                num_seqs=count,
                query_start_loc=self.query_start_loc[: count + 1],
                seq_lens=self.seq_lens[:count],
                block_table=self.block_table[:count],
                max_query_len=1,
                query_start_loc_cpu=self.query_start_loc_cpu[: count + 1],
                seq_lens_cpu=self.seq_lens_cpu[:count],
            )
            others = replace(
                self,
                num_seqs=self.num_seqs - count,
                query_start_loc=self.query_start_loc[count:],
                seq_lens=self.seq_lens[count:],
                block_table=self.block_table[count:],
                query_start_loc_cpu=self.query_start_loc_cpu[count:],
                seq_lens_cpu=self.seq_lens_cpu[count:],
                num_decodes=0,
            )
            self._parts = decodes, others
        return self._parts


class AttentionBackend(ABC):
    """A way to attend over the paged KV cache. Stateless but for scratch buffers; one instance serves all layers."""

    name: ClassVar[str]
    preferred_block_size: ClassVar[int]
    supports_full_cudagraph: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def why_unavailable(cls, spec: AttentionSpec) -> str | None:
        """None if the backend can run `spec` on this machine, else one line that says what is missing."""

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: AttentionSpec) -> tuple[int, ...]:
        """Shape of one layer's cache: (2, N, P, K, D); `cache[0]` holds keys, `cache[1]` values."""
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)

    @abstractmethod
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store key and value (T, K, D) at `slot_mapping` (T,); rows with slot -1 are skipped."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Attend: query and output are (T, H, D); this step's keys and values are already in `kv_cache`.

        Writes rows `[:metadata.num_tokens]` of `output`; the content of padded rows is free but must be finite.
        """

    def warm_up(self, metadata_sizes: list[int]) -> None:  # noqa: B027 - optional hook
        """Compile whatever the backend will need for the given batch sizes; called before readiness."""
