"""The seam between layers and hand-written kernels.

A layer's class implements `forward` in plain torch: what Dynamo traces and what runs without kernels. A kernel takes
its place on the *instance*, once, when the model is built, so a call pays for neither a branch nor a second method:

    kernels: dict[str, KernelFactory] = {"rms_norm": make_rms_norm, ...}   # keys: `KernelLayer.kernel_name`
    install_kernels(model, kernels)

A factory gets the layer (weights already on the device, not yet loaded) and returns a function with the signature
and result of that layer's `forward`, or None to leave this instance alone. It may bind the layer's parameters: they
are filled in place, never replaced.

| `kernel_name` | forward |
|---|---|
| `embedding` | `(input_ids (T,)) -> (T, hidden)` |
| `rms_norm` | `(x (T, n)) -> (T, n)` or `(x (T, n), residual (T, n)) -> (normed, new residual)`; may overwrite both |
| `rotary` | `(positions (T,), q (T, H * D), k (T, K * D)) -> (q, k)` |
| `silu_and_mul` | `(gate_up (T, 2 * n)) -> (T, n)` |
| `linear` | `(x (T, in)) -> (T, out)` |

A kernel that rotates queries and keys and also stores keys and values is set on the `Attention` layers, as
`rotate_and_store`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

KernelFactory = Callable[[Any], Callable[..., Any] | None]


class KernelLayer(nn.Module):
    """A layer whose `forward` a kernel may replace."""

    kernel_name: ClassVar[str]


def install_kernels(model: nn.Module, factories: Mapping[str, KernelFactory]) -> Counter[str]:
    """Replace `forward` of every layer of `model` that has a factory; returns how many instances of each kind."""
    installed: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, KernelLayer):
            continue
        factory = factories.get(module.kernel_name)
        kernel = factory(module) if factory is not None else None
        if kernel is not None:
            module.forward = kernel
            installed[module.kernel_name] += 1
    return installed
