"""Warm-up meets every specialisation that a batch can select, so that nothing compiles while requests wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from server.attention.base import AttentionSpec
from server.attention.triton_attn import LONG_DECODE, TritonAttentionBackend
from server.attention.warm_up import synthetic_batch
from server.kernels import decode_plan, launch, paged_decode, paged_prefill

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("max_num_seqs", [1, 6, 40])
def test_no_batch_selects_a_kernel_that_warm_up_has_not(
    dtype: torch.dtype, heads: tuple[int, int], max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.Prebound, "__call__", lambda *arguments: None)
    bound: Any = (decode_plan._bound, paged_decode._bound, paged_prefill._bound)
    for function in bound:
        function.cache_clear()
    spec = AttentionSpec(CPU, dtype, *heads, 8, 16, max_num_seqs=max_num_seqs)
    backend = TritonAttentionBackend(spec)
    backend.warm_up([1, max_num_seqs])
    warm = [function.cache_info().misses for function in bound]
    for others in {0, 1, 2, min(7, max_num_seqs - 1), min(8, max_num_seqs - 1), max_num_seqs - 1}:
        for query_len in (1, 2, 3, 5, 8, 9, 16, 17, 64, 65, 300):
            if others >= max_num_seqs:
                continue
            lens = [*[1] * others, query_len]
            batch = synthetic_batch(spec, lens, lens)
            for longest in (query_len, LONG_DECODE, 10**6):
                metadata = replace(batch.metadata, max_seq_len=longest)
                backend.forward(batch.query, batch.kv_cache, metadata, 1.0, batch.output)
    assert [function.cache_info().misses for function in bound] == warm
    for function in bound:
        function.cache_clear()
