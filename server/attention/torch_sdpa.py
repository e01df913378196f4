"""`TORCH_SDPA`: PyTorch's `scaled_dot_product_attention` over keys and values gathered from their blocks.

Runs anywhere; the CPU default and the reference that tests hold other backends against. What depends on lengths and
block tables only (which slots to gather, which lanes to mask) is worked out once per step and shared by all layers.

- Sequences with one new token (decodes) are batched: lengths are padded up within groups of similar length, and the
  query heads that share a key/value head become the rows of one small query matrix, so nothing is repeated.
- Other sequences run one by one. Their key/value heads are expanded to the query heads as a view with stride 0.

Padding lanes gather the sequence's own first slot, never a foreign one, so that garbage in unused cache slots (NaN
times a weight of 0) cannot reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from server.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec


@dataclass(slots=True)
class _DecodeGroup:
    """Decodes that run as one padded batch of B sequences and L lanes."""

    rows: torch.Tensor | None
    """Query rows, int64 (B,); None when they are rows 0 to B - 1."""
    batch: int
    slots: torch.Tensor
    """Cache slots to gather, int64 (B * L,)."""
    mask: torch.Tensor | None
    """Additive, (B, 1, 1, L): 0 or -inf; None when all lengths are equal."""


@dataclass(slots=True)
class _Chunk:
    """One sequence with several new tokens, query rows start to end."""

    start: int
    end: int
    slots: torch.Tensor
    """int64 (L,)."""
    mask: torch.Tensor | None
    """Additive, (end - start, L); None when the chunk is the whole sequence and plain causal masking does."""


@dataclass(slots=True)
class _Plan:
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchSdpaBackend(AttentionBackend):
    name = "TORCH_SDPA"
    preferred_block_size = 16

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._planned: AttentionMetadata | None = None
        self._plan = _Plan([], [])

    @classmethod
    def why_unavailable(cls, spec: AttentionSpec) -> str | None:
        return None

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if slot_mapping.numel() == 0:
            return
        keys, values = kv_cache.flatten(1, 2)
        if int(slot_mapping.min()) < 0:
            keep = slot_mapping >= 0
            key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
        keys.index_copy_(0, slot_mapping, key)
        values.index_copy_(0, slot_mapping, value)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        if metadata is not self._planned:
            # The worker makes a new AttentionMetadata for each step; holding it keeps its identity unique.
            self._plan = self._make_plan(metadata)
            self._planned = metadata
        keys, values = kv_cache.flatten(1, 2)
        for group in self._plan.decodes:
            self._decode(group, query, keys, values, scale, output)
        for chunk in self._plan.chunks:
            self._chunk(chunk, query, keys, values, scale, output)
        if metadata.num_tokens < output.shape[0]:
            output[metadata.num_tokens :].zero_()

    def _decode(
        self,
        group: _DecodeGroup,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        kv_heads, head_dim = keys.shape[1:]
        rows = query[: group.batch] if group.rows is None else query.index_select(0, group.rows)
        attended = F.scaled_dot_product_attention(
            rows.unflatten(1, (kv_heads, -1)),
            keys.index_select(0, group.slots).view(group.batch, -1, kv_heads, head_dim).transpose(1, 2),
            values.index_select(0, group.slots).view(group.batch, -1, kv_heads, head_dim).transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
        ).flatten(1, 2)
        if group.rows is None:
            output[: group.batch].copy_(attended)
        else:
            output.index_copy_(0, group.rows, attended)

    def _chunk(
        self,
        chunk: _Chunk,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        kv_heads = keys.shape[1]
        # Key/value heads as the batch, the query heads that share one as its heads: (K, G, rows or lanes, D).
        q = query[chunk.start : chunk.end].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        k = keys.index_select(0, chunk.slots).transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        v = values.index_select(0, chunk.slots).transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale
        )
        output[chunk.start : chunk.end].unflatten(1, (kv_heads, -1)).copy_(attended.permute(2, 0, 1, 3))

    def _make_plan(self, metadata: AttentionMetadata) -> _Plan:
        starts = metadata.query_start_loc_cpu[: metadata.num_seqs + 1].numpy()
        lengths = metadata.seq_lens_cpu[: metadata.num_seqs].numpy()
        queries = np.diff(starts)
        decodes = np.flatnonzero(queries == 1)
        groups = []
        if decodes.size:
            whole = decodes.size == metadata.num_tokens
            for members in _similar_lengths(decodes, lengths):
                in_order = whole and members.size == decodes.size
                groups.append(self._decode_group(members, None if in_order else starts[members], lengths, metadata))
        chunks = [
            self._plan_chunk(int(b), int(starts[b]), int(starts[b + 1]), int(lengths[b]), metadata)
            for b in np.flatnonzero(queries > 1)
        ]
        return _Plan(groups, chunks)

    def _decode_group(
        self, members: np.ndarray, rows: np.ndarray | None, lengths: np.ndarray, metadata: AttentionMetadata
    ) -> _DecodeGroup:
        device = metadata.block_table.device
        own = lengths[members]
        longest = int(own.max())
        lane = torch.arange(longest, device=device)
        valid = lane < torch.from_numpy(own).to(device)[:, None]
        sequences = torch.from_numpy(members).to(device)
        slots = self._slots(metadata.block_table.index_select(0, sequences), torch.where(valid, lane, 0))
        mask = None
        if int(own.min()) != longest:
            mask = torch.zeros(valid.shape, dtype=self.spec.dtype, device=device).masked_fill_(~valid, -torch.inf)
            mask = mask[:, None, None, :]
        row_index = None if rows is None else torch.from_numpy(rows.astype(np.int64)).to(device)
        return _DecodeGroup(row_index, len(members), slots.flatten(), mask)

    def _plan_chunk(self, sequence: int, start: int, end: int, length: int, metadata: AttentionMetadata) -> _Chunk:
        device = metadata.block_table.device
        lane = torch.arange(length, device=device)
        slots = self._slots(metadata.block_table[sequence : sequence + 1], lane[None, :]).flatten()
        mask = None
        if end - start != length:
            position = torch.arange(length - (end - start), length, device=device)
            hidden = lane[None, :] > position[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.spec.dtype, device=device).masked_fill_(hidden, -torch.inf)
        return _Chunk(start, end, slots, mask)

    def _slots(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cache slots, int64, of positions (B, L) of sequences with `block_table` (B, max_blocks)."""
        size = self.spec.block_size
        return block_table.gather(1, positions // size).long() * size + positions % size


def _similar_lengths(sequences: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Split into groups, each padded to its longest member, that waste at most half of their lanes.

    One group in the given order when all of them together do not waste more than that.
    """
    own = lengths[sequences]
    if own.sum() * 2 >= own.max() * own.size:
        return [sequences]
    order = np.argsort(-own, kind="stable")
    groups = []
    start = 0
    for i in range(1, order.size + 1):
        if i == order.size or own[order[i]] * 2 < own[order[start]]:
            groups.append(sequences[order[start:i]])
            start = i
    return groups
