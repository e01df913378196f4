"""Backends against each other, and inside CUDA Graphs that serve lengths they were not recorded with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchctl.kernelbench import reference
from benchctl.kernelbench.attention_cases import Layout, poison, unused_slot_value
from benchctl.kernelbench.case import relative_error
from benchctl.kernelbench.suite import BACKENDS
from server.attention import select_backend
from server.attention.base import AttentionBackend
from server.attention.torch_sdpa import TorchSdpaBackend
from server.attention.warm_up import SyntheticBatch, synthetic_batch

LAYOUT = Layout(32, 8, 128, 64)
NAMES = [name for name in BACKENDS if BACKENDS[name].supports_full_cudagraph]


def make(name: str, device: torch.device, max_num_seqs: int = 64) -> AttentionBackend:
    spec = LAYOUT.spec(device, torch.bfloat16, max_num_seqs)
    reason = BACKENDS[name].why_unavailable(spec)
    if reason is not None:
        pytest.skip(reason)
    return BACKENDS[name](spec)


def attend(backend: AttentionBackend, batch: SyntheticBatch) -> torch.Tensor:
    output = torch.full_like(batch.output, float("nan"))
    backend.forward(batch.query, batch.kv_cache, batch.metadata, LAYOUT.head_dim**-0.5, output)
    return output


@pytest.mark.parametrize("name", BACKENDS)
def test_agrees_with_torch_sdpa(name: str, device: torch.device) -> None:
    backend = make(name, device)
    plain = TorchSdpaBackend(backend.spec)
    for query_lens, seq_lens in (
        ([1] * 5, [1, 63, 64, 65, 3000]),
        ([70, 1, 200, 1], [70, 900, 777, 2]),
        ([128] * 3, [128, 129, 1024]),
        # Decodes at the front: enough of them, and few with a long one.
        ([1] * 13 + [70, 1, 200], [*range(60, 73), 90, 5, 200]),
        ([1, 1, 1, 128, 7], [2500, 1, 64, 128, 71]),
    ):
        batch = synthetic_batch(backend.spec, query_lens, seq_lens, seed=5)
        wanted, got = attend(plain, batch), attend(backend, batch)
        assert relative_error((got,), (wanted,)) < 7e-3, (query_lens, seq_lens)


@pytest.mark.parametrize("name", BACKENDS)
def test_same_input_gives_the_same_bits(name: str, device: torch.device) -> None:
    backend = make(name, device)
    batch = synthetic_batch(backend.spec, [1] * 7, [5000, 1, 3, 700, 64, 65, 2049])
    first = attend(backend, batch)
    assert all(torch.equal(first, attend(backend, batch)) for _ in range(50))


@pytest.mark.parametrize("name", BACKENDS)
def test_writes_only_where_slots_say(name: str, device: torch.device) -> None:
    backend = make(name, device)
    batch = synthetic_batch(backend.spec, [1, 40, 0], [65, 40, 0])
    before = batch.kv_cache.clone()
    backend.write_kv(batch.key, batch.value, batch.kv_cache, batch.metadata.slot_mapping)
    slots = batch.metadata.slot_mapping[batch.metadata.slot_mapping >= 0]
    flat, old = batch.kv_cache.flatten(1, 2), before.flatten(1, 2)
    assert torch.equal(flat[0, slots], batch.key[: len(slots)])
    assert torch.equal(flat[1, slots], batch.value[: len(slots)])
    old[:, slots] = flat[:, slots]
    assert torch.equal(flat, old)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_serves_any_lengths_and_padding(name: str, device: torch.device) -> None:
    """Recorded over empty sequences with the model's length as the bound, replayed with real ones."""
    backend = make(name, device)
    size, longest = 16, 2200
    batches = []
    for seed, lengths in enumerate(([1] * 16, [7, 2200, 64, 65, 1, 128] + [0] * 10, [300 + 37 * i for i in range(16)])):
        batch = synthetic_batch(backend.spec, [min(1, n) for n in lengths], lengths, seed=seed)
        poison(batch, LAYOUT.page, unused_slot_value(backend))
        batches.append(batch)
    columns = max(batch.metadata.block_table.shape[1] for batch in batches)
    pages = max(batch.kv_cache.shape[1] for batch in batches)
    fixed = synthetic_batch(backend.spec, [1] * size, [1] * size)
    fixed.kv_cache = torch.zeros(backend.kv_cache_shape(pages, backend.spec), dtype=torch.bfloat16, device=device)
    fixed.metadata = replace(
        fixed.metadata,
        max_seq_len=longest,
        block_table=torch.zeros(size, columns, dtype=torch.int32, device=device),
        seq_lens=torch.ones(size, dtype=torch.int32, device=device),
    )
    scale = LAYOUT.head_dim**-0.5
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.forward(fixed.query, fixed.kv_cache, fixed.metadata, scale, fixed.output)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(fixed.query, fixed.kv_cache, fixed.metadata, scale, fixed.output)
    for batch in (*batches, *reversed(batches)):
        meta = batch.metadata
        fixed.kv_cache[:, : batch.kv_cache.shape[1]].copy_(batch.kv_cache)
        fixed.metadata.block_table[:, : meta.block_table.shape[1]].copy_(meta.block_table)
        fixed.metadata.seq_lens.copy_(meta.seq_lens)
        fixed.metadata.query_start_loc.copy_(meta.query_start_loc)
        fixed.query.copy_(batch.query)
        fixed.output.fill_(float("nan"))
        graph.replay()
        wanted = reference.attention(batch.query, batch.kv_cache, meta, scale)
        assert fixed.output.isfinite().all()
        real = meta.num_tokens
        assert relative_error((fixed.output[:real],), (wanted[:real],)) < 5e-3


def test_explicit_backends_run_here_and_auto_takes_the_first(device: torch.device) -> None:
    spec = LAYOUT.spec(device, torch.bfloat16, 8)
    for name in ("TRITON_ATTN", "TORCH_SDPA"):
        assert select_backend(name, spec)[0].name == name  # type: ignore[arg-type]
    chosen, reasons = select_backend("auto", replace(spec, block_size=0))
    assert chosen.spec.block_size == type(chosen).preferred_block_size
    assert [reason.split(":")[0] for reason in reasons] == ["FLASH_ATTN", "TRITON_ATTN"][: len(reasons)]
