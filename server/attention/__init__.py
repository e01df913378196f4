"""Attention backends and the one place where one is chosen.

`FLASH_ATTN` and `TRITON_ATTN` need CUDA; their modules are imported only when asked for.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace

from server.attention.base import AttentionBackend, AttentionSpec
from server.config import BackendName
from server.errors import UserError

logger = logging.getLogger(__name__)

# In the order that `auto` tries them: name -> module and class.
BACKENDS: dict[str, tuple[str, str]] = {
    "FLASH_ATTN": ("server.attention.flash_attn", "FlashAttentionBackend"),
    "TRITON_ATTN": ("server.attention.triton_attn", "TritonAttentionBackend"),
    "TORCH_SDPA": ("server.attention.torch_sdpa", "TorchSdpaBackend"),
}


def select_backend(name: BackendName, spec: AttentionSpec) -> tuple[AttentionBackend, list[str]]:
    """The backend `name`, or under `auto` the first that can run `spec`, and why the ones before it were passed over.

    A `spec.block_size` of 0 becomes the backend's preferred one (`backend.spec` has it). Raises UserError when an
    explicitly named backend cannot run.
    """
    reasons: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        backend_class, reason = _load(candidate, spec)
        if backend_class is not None and reason is None:
            block_size = spec.block_size or backend_class.preferred_block_size
            return backend_class(replace(spec, block_size=block_size)), reasons
        if name != "auto":
            raise UserError(f"--attention-backend {candidate} cannot run here: {reason}")
        reasons.append(f"{candidate}: {reason}")
        logger.info("attention backend %s passed over: %s", candidate, reason)
    raise UserError("no attention backend can run here: " + "; ".join(reasons))


def _load(name: str, spec: AttentionSpec) -> tuple[type[AttentionBackend] | None, str | None]:
    """The backend's class and why it cannot run `spec` (None if it can)."""
    module_name, class_name = BACKENDS[name]
    if name != "TORCH_SDPA" and spec.device.type != "cuda":
        # Before the import, which would load Triton or flash-attn for nothing.
        return None, f"needs a CUDA device, and the server runs on {spec.device.type}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return None, f"cannot be imported ({error})"
    backend_class: type[AttentionBackend] = getattr(module, class_name)
    return backend_class, backend_class.why_unavailable(spec)
