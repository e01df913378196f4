"""All cases, in the order of the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchctl.kernelbench.attention_cases import Layout, check_cases, make_backend, timed_cases
from benchctl.kernelbench.block_cases import block_cases
from benchctl.kernelbench.case import Case, Instance
from benchctl.kernelbench.layer_cases import layer_cases
from benchctl.kernelbench.linear_cases import linear_cases
from benchctl.kernelbench.sampling_cases import sampling_cases
from server.attention.base import AttentionBackend, AttentionSpec
from server.attention.flash_attn import FlashAttentionBackend
from server.attention.triton_attn import TritonAttentionBackend
from server.attention.warm_up import synthetic_batch


class NativeFlashAttention(FlashAttentionBackend):
    """FLASH_ATTN as `--flash-decode native` runs it."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(replace(spec, flash_decode="native"))


BACKENDS: dict[str, type[AttentionBackend]] = {
    "TRITON_ATTN": TritonAttentionBackend,
    "FLASH_ATTN": FlashAttentionBackend,
    "FLASH_ATTN native": NativeFlashAttention,
}


def all_check_cases(device: torch.device, dtypes: list[torch.dtype], *, small: bool) -> Iterator[Case]:
    """Cases for correctness. `small` fits the interpreter; the others need a GPU to end in good time."""
    for dtype in dtypes:
        for name, backend_class in BACKENDS.items():
            if device.type == "cuda" or backend_class is TritonAttentionBackend:
                yield from check_cases(name, backend_class, device, dtype, small=small)
        yield from layer_cases(device, dtype, [1, 5] if small else [1, 7, 300], small=small)
        if dtype is not torch.float32:
            yield from linear_cases(device, dtype, [1, 2, 3, 8], small=small)
            yield from block_cases(device, dtype, small=small)
    yield from sampling_cases(device, [1, 3] if small else [1, 64], small=small)


def all_timed_cases(device: torch.device, dtypes: list[torch.dtype], pages: list[int]) -> Iterator[Case]:
    for dtype in dtypes:
        for name, backend_class in BACKENDS.items():
            yield from timed_cases(name, backend_class, device, dtype, pages)
            if backend_class is not FlashAttentionBackend:
                yield from timed_cases(f"{name} heads first", backend_class, device, dtype, pages, heads_first=True)
        yield from layer_cases(device, dtype, [1, 64, 8192], small=False)
        if dtype is not torch.float32:
            yield from linear_cases(device, dtype, [1, 2, 4, 8], small=False, with_cublas=True)
            yield from block_cases(device, dtype, small=False)
    yield from sampling_cases(device, [1, 64, 256], small=False)


def launch_cases(device: torch.device) -> Iterator[Case]:
    """One small launch of each kernel, for its host cost."""
    dtype = torch.bfloat16
    yield from layer_cases(device, dtype, [1], small=True)
    yield from linear_cases(device, dtype, [1], small=True)
    for name, backend_class in BACKENDS.items():
        layout = Layout(8, 2, 64, 64)
        backend = make_backend(backend_class, layout.spec(device, dtype, 8))
        if backend is not None:
            for label, query_lens in (("decode", [1]), ("prefill", [16])):
                yield _launch(name, backend, label, query_lens)


def _launch(name: str, backend: AttentionBackend, label: str, query_lens: list[int]) -> Case:
    def build(seed: int) -> Instance:
        batch = synthetic_batch(backend.spec, query_lens, [64], seed=seed)

        def run() -> tuple[torch.Tensor, ...]:
            backend.forward(batch.query, batch.kv_cache, batch.metadata, 0.125, batch.output)
            return (batch.output,)

        return Instance(run, lambda: (batch.output.float(),))

    return Case(f"attention/{name}", label, backend.spec.dtype, 0, 0, build)
