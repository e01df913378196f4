"""Device, precision and threads of a worker."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch

from server.config import DtypeName, SchedulerOptions
from server.errors import UserError, device_out_of_memory
from server.models.config import ModelConfig

logger = logging.getLogger(__name__)

GIB = 1024**3
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(wanted: str, rank: int = 0) -> torch.device:
    """`auto` takes CUDA when there is a usable device. UserError if CUDA is asked for and there is none."""
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() > rank:
        return torch.device("cuda", rank)
    if wanted == "cuda":
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise UserError(f"--device cuda: {why}")
    return torch.device("cpu")


def resolve_dtype(wanted: DtypeName, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Precision of weights, activations and KV cache: under `auto` float32 on CPU, the checkpoint's own on CUDA.

    UserError when the device cannot compute in the precision that was asked for.
    """
    if wanted == "auto":
        if device.type == "cpu":
            return torch.float32
        dtype = _DTYPES[config.dtype]
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            logger.warning("the GPU has no bfloat16 arithmetic: running in float16")
            return torch.float16
        return dtype
    if wanted == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            "--dtype bfloat16: the GPU has no bfloat16 arithmetic (needs compute capability 8.0); use float16"
        )
    return _DTYPES[wanted]


def init_device(device: torch.device) -> None:
    """Make `device` current; on CPU use the cores that this process may run on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device)
        # float32 models: TF32 would change greedy tokens.
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def memory_for(what: str, cure: str, device: torch.device) -> Iterator[None]:
    """Raise UserError when `what` finds no memory on `device`, with what is free there and the `cure`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        full = device_out_of_memory(error)
        if full is None and not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        # The allocations that failed live on in the traceback, which the new error does not keep.
        raise UserError(f"no memory for {what}: {full or error or 'MemoryError'}{_free_on(device)}; {cure}") from None


def _free_on(device: torch.device) -> str:
    """What is free on a GPU, for a message; empty where that cannot be told."""
    if device.type != "cuda":
        return ""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # not even a context fits
        return ""
    return f" ({free / GIB:.2f} of {total / GIB:.2f} GiB of {device} are free)"


def token_budget(options: SchedulerOptions, device: torch.device) -> int:
    """Most tokens of one step."""
    budget = options.max_num_batched_tokens
    if budget is None:
        return 8192 if device.type == "cuda" else 512
    if budget < 1:
        raise UserError(f"--max-num-batched-tokens {budget}: must be at least 1")
    return budget
