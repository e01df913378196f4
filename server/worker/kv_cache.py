"""Size and allocation of the paged KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch

from server.attention.base import AttentionBackend, AttentionSpec
from server.config import CacheOptions
from server.errors import UserError
from server.layers.attention import Attention
from server.worker.device import GIB


def bytes_per_block(backend: AttentionBackend, num_layers: int) -> int:
    """Bytes of one block across all layers."""
    return num_layers * math.prod(backend.kv_cache_shape(1, backend.spec)) * backend.spec.dtype.itemsize


def num_blocks_for(options: CacheOptions, block_bytes: int, available_bytes: int) -> int:
    """Blocks of the cache: the override, else as many as fit into `available_bytes`. UserError when none does."""
    if options.num_gpu_blocks_override is not None:
        if options.num_gpu_blocks_override < 1:
            raise UserError(f"--num-gpu-blocks-override {options.num_gpu_blocks_override}: must be at least 1")
        return options.num_gpu_blocks_override
    blocks = available_bytes // block_bytes
    if blocks < 1:
        raise UserError(
            f"no memory is left for the KV cache: {max(0, available_bytes) / GIB:.2f} GiB available, one block takes "
            f"{block_bytes / GIB:.4f} GiB; raise --gpu-memory-utilization or lower --max-num-batched-tokens"
        )
    return blocks


def size_option(options: CacheOptions, device: torch.device) -> str:
    """The option that has determined the size of the cache, as the user would spell it."""
    if options.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {options.num_gpu_blocks_override}"
    if device.type == "cuda":
        return f"--gpu-memory-utilization {options.gpu_memory_utilization:g}"
    return f"--cpu-kv-cache-gib {options.cpu_kv_cache_gib:g}"


def cuda_available_bytes(device: torch.device, utilization: float, activation_peak: int, extra: int = 0) -> int:
    """Bytes of GPU memory that the cache may take, after the weights are loaded and a profile run is over.

    `activation_peak` is what the largest step needs on top of what is allocated now; `extra` is kept free as well
    (for CUDA Graphs). Memory held by other processes counts as used.
    """
    if not 0 < utilization <= 1:
        raise UserError(f"--gpu-memory-utilization {utilization}: must be above 0 and at most 1")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - activation_peak - extra


def fit_context(model_len: int, explicit: bool, num_blocks: int, block_size: int) -> int:
    """Context length that `num_blocks` can hold: `model_len`, or less when the user did not insist on it.

    UserError when an explicit `--max-model-len` does not fit: one such request could never finish.
    """
    capacity = num_blocks * block_size
    if capacity >= model_len:
        return model_len
    if explicit:
        raise UserError(
            f"--max-model-len {model_len}: the KV cache holds only {capacity} tokens ({num_blocks} blocks of "
            f"{block_size}); lower it, or give the cache more memory"
        )
    return capacity


def allocate(layers: dict[str, Attention], backend: AttentionBackend, num_blocks: int) -> None:
    """Give every attention layer its zero-filled cache and the backend.

    Zeros, not garbage: a backend may multiply a masked lane by 0, and 0 times NaN is NaN.
    """
    spec: AttentionSpec = backend.spec
    shape = backend.kv_cache_shape(num_blocks, spec)
    for layer in layers.values():
        layer.kv_cache = _zeros(shape, spec.dtype, spec.device)
        layer.backend = backend


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the kernel for zero pages, which take memory and time only once they are used; torch writes them all.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
