"""TORCH_SDPA against attention written out token by token, with garbage wherever nobody may look."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.attention import BACKENDS, select_backend
from server.attention.base import AttentionMetadata, AttentionSpec
from server.attention.torch_sdpa import TorchSdpaBackend
from server.errors import UserError

CPU = torch.device("cpu")


def spec(heads: int = 4, kv_heads: int = 2, block_size: int = 4) -> AttentionSpec:
    return AttentionSpec(
        device=CPU, dtype=torch.float32, num_heads=heads, num_kv_heads=kv_heads, head_dim=8, block_size=block_size
    )


def naive(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], query_lens: list[int], scale: float
) -> torch.Tensor:
    """One query token and one head at a time, float64."""
    output, row = torch.zeros_like(q, dtype=torch.float64), 0
    for key, value, count in zip(keys, values, query_lens, strict=True):
        group = q.shape[1] // key.shape[1]
        for i in range(count):
            visible = len(key) - count + i + 1
            for head in range(q.shape[1]):
                k, v = key[:visible, head // group].double(), value[:visible, head // group].double()
                output[row, head] = torch.softmax(k @ q[row, head].double() * scale, 0) @ v
            row += 1
    return output


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1)]),
    decode_only=st.booleans(),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_equals_naive_attention(
    sequences: list[tuple[int, int]], heads: tuple[int, int], decode_only: bool, padding: int, seed: int
) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    own = spec(*heads)
    size = own.block_size
    query_lens = [1 if decode_only else new for new, _ in sequences]
    seq_lens = [new + before for new, (_, before) in zip(query_lens, sequences, strict=True)]
    backend = TorchSdpaBackend(own)
    blocks_each = [-(-length // size) for length in seq_lens]
    num_blocks = sum(blocks_each) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    cache = torch.full(backend.kv_cache_shape(num_blocks, own), torch.nan)
    table = torch.full((len(seq_lens), max(blocks_each) + 2), -7, dtype=torch.int32)
    keys, values, slots, old_slots, new_kv, old_kv = [], [], [], [], [], []
    for b, length in enumerate(seq_lens):
        mine = [order.pop() for _ in range(blocks_each[b])]
        table[b, : len(mine)] = torch.tensor(mine)
        key, value = torch.randn((2, length, own.num_kv_heads, own.head_dim), generator=generator)
        keys.append(key)
        values.append(value)
        slot = [mine[p // size] * size + p % size for p in range(length)]
        cut = length - query_lens[b]
        slots += slot[cut:]
        old_slots += slot[:cut]
        new_kv.append((key[cut:], value[cut:]))
        old_kv.append((key[:cut], value[:cut]))
    pad = torch.full((padding, own.num_kv_heads, own.head_dim), torch.nan)
    backend.write_kv(*(torch.cat(x) for x in zip(*old_kv, strict=True)), cache, torch.tensor([*old_slots, -1])[:-1])
    backend.write_kv(
        *(torch.cat((*x, pad)) for x in zip(*new_kv, strict=True)), cache, torch.tensor(slots + [-1] * padding)
    )
    starts = torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32))
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    total = int(starts[-1])
    metadata = AttentionMetadata(
        num_tokens=total,
        num_seqs=len(seq_lens),
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lengths,
    )
    query = torch.randn((total + padding, own.num_heads, own.head_dim), generator=generator)
    output = torch.full_like(query, torch.nan)
    for _ in range(2):  # the second time with the plan of the first
        backend.forward(query, cache, metadata, 0.3, output)
        expected = naive(query[:total], keys, values, query_lens, 0.3)
        torch.testing.assert_close(output[:total].double(), expected, atol=2e-5, rtol=1e-4)
        assert bool(output.isfinite().all())


def test_write_skips_padding_everywhere() -> None:
    backend = TorchSdpaBackend(spec())
    cache = torch.zeros(backend.kv_cache_shape(2, backend.spec))
    key = torch.arange(3.0)[:, None, None].expand(3, 2, 8) + 1
    backend.write_kv(key, -key, cache, torch.tensor([-1, 5, -1]))
    assert cache.flatten(1, 2)[0, 5].unique().tolist() == [2.0]
    assert cache.flatten(1, 2)[1, 5].unique().tolist() == [-2.0]
    assert int(cache.count_nonzero()) == 2 * 2 * 8
    backend.write_kv(key, key, cache, torch.full((3,), -1))
    assert int(cache.count_nonzero()) == 2 * 2 * 8


def test_auto_on_cpu_says_why_not_the_others() -> None:
    backend, reasons = select_backend("auto", spec(block_size=0))
    assert backend.name == "TORCH_SDPA"
    assert backend.spec.block_size == TorchSdpaBackend.preferred_block_size
    assert [reason.split(":")[0] for reason in reasons] == ["FLASH_ATTN", "TRITON_ATTN"]
    assert all("needs a CUDA device" in reason for reason in reasons)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "TORCH_SDPA"])
def test_explicit_backend_never_falls_back(name: str) -> None:
    with pytest.raises(UserError, match=f"--attention-backend {name} cannot run here: needs a CUDA device"):
        select_backend(name, spec())  # type: ignore[arg-type]
