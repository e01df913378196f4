"""Attention cases: ragged and poisoned batches to check, regular ones to time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchctl.kernelbench import reference
from benchctl.kernelbench.case import Case, Instance, Tensors
from server.attention.base import AttentionBackend, AttentionSpec
from server.attention.warm_up import SyntheticBatch, synthetic_batch


@dataclass(frozen=True, slots=True)
class Layout:
    """Heads of a model and the page size of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int

    def spec(self, device: torch.device, dtype: torch.dtype, max_num_seqs: int) -> AttentionSpec:
        return AttentionSpec(
            device, dtype, self.num_heads, self.num_kv_heads, self.head_dim, self.page, max_num_seqs=max_num_seqs
        )

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim} page {self.page}"


LLAMA_8B = (32, 8, 128)

CHECK_LAYOUTS = [
    Layout(8, 8, 64, 16),
    Layout(8, 2, 80, 32),
    Layout(6, 2, 96, 64),
    Layout(32, 8, 128, 16),
    Layout(32, 4, 128, 128),
    Layout(8, 1, 128, 64),
    Layout(8, 4, 256, 16),
]

SMALL_CHECK_LAYOUTS = [Layout(4, 4, 64, 16), Layout(4, 2, 80, 32), Layout(6, 2, 96, 64), Layout(8, 1, 128, 16)]


def poison(batch: SyntheticBatch, page: int, value: float) -> None:
    """Fill every cache slot that holds no token of the batch with `value`, and spoil the table past each sequence."""
    used = torch.zeros(batch.kv_cache.shape[1] * page, dtype=torch.bool)
    table = batch.metadata.block_table.cpu()
    for row, length in enumerate(batch.metadata.seq_lens_cpu.tolist()):
        positions = torch.arange(length)
        used[table[row].long()[positions // page] * page + positions % page] = True
        table[row, -(-length // page) :] = 2**30
    batch.metadata.block_table.copy_(table)
    batch.kv_cache[:, (~used).view(-1, page).to(batch.kv_cache.device)] = value


def check_batches(layout: Layout, *, small: bool) -> Iterator[tuple[str, list[int], list[int]]]:
    """Name, query lengths and sequence lengths of batches that meet every edge of a page and of a tile."""
    page = layout.page
    edges = sorted({1, 2, page - 1, page, page + 1, 3 * page, 130 if small else 257})
    yield "decode ragged", [1] * len(edges), edges
    yield "prefill ragged", edges, edges
    yield "chunked", [1, min(page, 7), 3, 1], [page + 1, 2 * page + 3, 40, 1]
    yield "mixed with padding", [1, 5, 1, 0, 0], [page, 2 * page + 1, 3, 0, 0]
    yield "decode with padding", [1, 1, 0, 0], [page, 70, 0, 0]
    if small:
        return
    yield "one long decode", [1], [8200]
    yield "long among short", [1] * 8, [9000, *([17] * 7)]
    yield "long prefill", [1500], [1500]
    yield "chunk of a long prefill", [513, 1, 1], [8705, 4097, 3]
    yield "decode 512", [1] * 512, [1 + (37 * i) % 300 for i in range(512)]


def check_cases(
    name: str,
    backend_class: type[AttentionBackend],
    device: torch.device,
    dtype: torch.dtype,
    *,
    small: bool,
    layouts: Sequence[Layout] | None = None,
) -> Iterator[Case]:
    """Cases for correctness; those that `backend_class` does not support are left out."""
    if layouts is None:
        layouts = SMALL_CHECK_LAYOUTS if small else CHECK_LAYOUTS
    for layout in layouts:
        backend = make_backend(backend_class, layout.spec(device, dtype, 512))
        if backend is None:
            continue
        for label, query_lens, seq_lens in check_batches(layout, small=small):
            yield _case(name, backend, layout, label, query_lens, seq_lens, poisoned=True)


TIMED_BATCHES: list[tuple[str, list[int], list[int]]] = [
    ("decode 1 x 512", [1], [512]),
    ("decode 1 x 4096", [1], [4096]),
    ("decode 8 x 1024", [1] * 8, [1024] * 8),
    ("decode 64 x 1024", [1] * 64, [1024] * 64),
    ("decode 256 x 512", [1] * 256, [512] * 256),
    ("decode 16 x 8192", [1] * 16, [8192] * 16),
    ("prefill 1 x 512", [512], [512]),
    ("prefill 4 x 2048", [2048] * 4, [2048] * 4),
    ("32 decodes x 1024 + 512 chunk", [*([1] * 32), 512], [*([1024] * 32), 1024]),
]


def timed_cases(
    name: str,
    backend_class: type[AttentionBackend],
    device: torch.device,
    dtype: torch.dtype,
    pages: list[int],
    *,
    heads_first: bool = False,
) -> Iterator[Case]:
    """Cases for timing; `heads_first` as for `synthetic_batch`."""
    for page in pages:
        layout = Layout(*LLAMA_8B, page)
        backend = make_backend(backend_class, layout.spec(device, dtype, 512))
        if backend is None:
            continue
        for label, query_lens, seq_lens in TIMED_BATCHES:
            yield _case(name, backend, layout, label, query_lens, seq_lens, poisoned=False, heads_first=heads_first)


def make_backend(backend_class: type[AttentionBackend], spec: AttentionSpec) -> AttentionBackend | None:
    """The backend, or None if it does not support `spec` (on the CPU: if the interpreter could not run it)."""
    reason = backend_class.why_unavailable(spec)
    if reason is not None and spec.device.type == "cuda":
        return None
    return backend_class(spec)


def _case(
    name: str,
    backend: AttentionBackend,
    layout: Layout,
    label: str,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    poisoned: bool,
    heads_first: bool = False,
) -> Case:
    scale = layout.head_dim**-0.5
    itemsize = backend.spec.dtype.itemsize

    def build(seed: int) -> Instance:
        batch = synthetic_batch(backend.spec, query_lens, seq_lens, seed=seed, heads_first=heads_first)
        if poisoned:
            poison(batch, layout.page, unused_slot_value(backend))

        def run() -> Tensors:
            backend.forward(batch.query, batch.kv_cache, batch.metadata, scale, batch.output)
            return (batch.output,)

        return Instance(run, lambda: (reference.attention(batch.query, batch.kv_cache, batch.metadata, scale),))

    heads, dim = layout.num_heads, layout.head_dim
    moved = itemsize * dim * (2 * layout.num_kv_heads * sum(seq_lens) + 2 * heads * sum(query_lens))
    pairs = sum(q * length - q * (q - 1) // 2 for q, length in zip(query_lens, seq_lens, strict=True))
    return Case(f"attention/{name}", f"{label} ({layout})", backend.spec.dtype, moved, 4 * heads * dim * pairs, build)


def unused_slot_value(backend: AttentionBackend) -> float:
    """What an unused slot may hold: anything, except that flash-attn-4 multiplies the rest of a sequence's last page
    by zero when it loads whole pages, which a NaN would survive. The server's caches start as zeros."""
    return 1e4 if backend.name == "FLASH_ATTN" else float("nan")
