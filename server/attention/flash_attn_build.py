"""`python -m server.attention.flash_attn_build`: compile flash-attn-4's function in a process of its own.

A cold start would spend ten seconds on importing the package and compiling with it, in the one thread that also traces
the model; and its compiler crashes when Dynamo traces in another thread. This process needs no GPU: it compiles for the
GPU that it is told of (the package's own way of compiling without one) and leaves the library that `flash_attn_direct`
loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from server.attention import flash_attn_direct
from server.attention.base import AttentionSpec


def start(spec: AttentionSpec, path: Path) -> subprocess.Popen[bytes]:
    """Begin to make the library `path` for `spec`."""
    properties = torch.cuda.get_device_properties(spec.device)
    arch = f"sm_{properties.major}{properties.minor}"
    environment = os.environ | {
        "FLASH_ATTENTION_ARCH": arch,
        "CUTE_DSL_ARCH": f"{arch}a",
        "FLASH_ATTENTION_NUM_SMS": str(properties.multi_processor_count),
        "CUDA_VISIBLE_DEVICES": "",
    }
    shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
    dtype = str(spec.dtype).removeprefix("torch.")
    command = [sys.executable, "-P", "-m", "server.attention.flash_attn_build", str(path), dtype, *map(str, shape)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def build(path: Path, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int) -> None:
    """Compile, from tensors that have shapes and no memory, and link the outcome into `path`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from server.attention.flash_attn_cute import Recorder, load_interface

    forward = load_interface()._flash_attn_fwd
    recorder = forward.compile_cache = Recorder(forward.compile_cache)
    with FakeTensorMode():
        query = torch.empty(3, heads, head_dim, dtype=dtype, device="cuda")
        cache = torch.empty(2, 8, page, kv_heads, head_dim, dtype=dtype, device="cuda")
        numbers = torch.empty(3, dtype=torch.int32, device="cuda")
        forward(
            query,
            cache[0],
            cache[1],
            cu_seqlens_q=numbers,
            seqused_k=numbers[:2],
            page_table=torch.empty(2, 4, dtype=torch.int32, device="cuda"),
            softmax_scale=1.0,
            causal=True,
            out=torch.empty_like(query),
        )
    flash_attn_direct.store(path, recorder.cache, recorder.key)


def main() -> None:
    path, dtype, *shape = sys.argv[1:]
    heads, kv_heads, head_dim, page = map(int, shape)
    build(Path(path), getattr(torch, dtype), heads, kv_heads, head_dim, page)


if __name__ == "__main__":
    main()
