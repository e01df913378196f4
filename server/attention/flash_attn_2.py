"""flash-attn 2.x for Ampere and Ada, written against its documented interface (2.8); untested on such a card."""

from __future__ import annotations

import importlib
import importlib.util

import torch

PAGE_MULTIPLE = 256
"""flash-attn 2.x reads paged caches in pages whose size is a multiple of this."""


def why_missing() -> str | None:
    """None if flash-attn 2.x is installed, else one line."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn_2_cuda") is None:
        return "FLASH_ATTN needs flash-attn 2.x on this GPU: pip install 'flash-attn>=2.6,<3'"
    return None


class Flash2Forward:
    """Causal paged attention through `flash_attn_with_kvcache` (decode) and `flash_attn_varlen_func` (all else)."""

    def __init__(self) -> None:
        package = importlib.import_module("flash_attn")
        self._with_kvcache = package.flash_attn_with_kvcache
        self._varlen = package.flash_attn_varlen_func

    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """One query row per sequence: query and output (B, H, D)."""
        result = self._with_kvcache(
            query.unsqueeze(1),
            key_cache,
            value_cache,
            cache_seqlens=seq_lens,
            block_table=block_table,
            softmax_scale=scale,
            causal=True,
        )
        output.copy_(result.squeeze(1))

    def varlen(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """query and output (T, H, D)."""
        key_start_loc = torch.zeros_like(query_start_loc)
        torch.cumsum(seq_lens, 0, out=key_start_loc[1:])
        result = self._varlen(
            query,
            key_cache,
            value_cache,
            query_start_loc,
            key_start_loc,
            max_query_len,
            max_seq_len,
            softmax_scale=scale,
            causal=True,
            block_table=block_table,
        )
        output.copy_(result)
