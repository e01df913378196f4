"""Launch Triton kernels with little host time.

`kernel[grid](...)` binds, specialises and hashes its arguments on every call: 15-30 us of Python for a kernel with
ten arguments, several times what a decode step's small kernels run. A `Prebound` kernel does this once. It holds the
compiled binary of one specialisation and hands raw pointers straight to the launcher that Triton built in C.

What makes that sound: integer arguments must be declared `do_not_specialize` (their values never select a binary),
everything else that a binary depends on is a constant of the `Prebound`, and pointers are checked for the 16-byte
alignment that the binary assumes. Arguments that are not aligned go the ordinary way, which compiles for them.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests, on CPU tensors, thousands of times slower."""

WARM_UP_THREADS = 8
"""Kernels that are compiled at once while the server starts."""

_ALIGNMENT_MASK = 15

F = TypeVar("F", bound=Any)


class Prebound:
    """One specialisation of a Triton kernel whose parameters are: pointers, then scalars, then constexprs.

    `constants` are the values of the constexpr parameters in order. The element types of the tensors must be the same
    at every call: make one `Prebound` per dtype. Instances are cheap; the kernel is compiled at the first call.
    """

    __slots__ = ("_bound", "_constants", "_kernel", "_options")

    def __init__(self, kernel: Any, constants: tuple[Any, ...], *, num_warps: int = 4, num_stages: int = 2) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._bound: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], scalars: tuple[int | float, ...] = ()
    ) -> None:
        """Launch on the current stream of the tensors' device."""
        device = tensors[0].get_device()
        bound = self._bound.get(device)
        if bound is None:
            self._launch_by_triton(grid, tensors, scalars)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        union = 0
        for pointer in pointers:
            union |= pointer
        if union & _ALIGNMENT_MASK:
            self._launch_by_triton(grid, tensors, scalars)
            return
        run, function, metadata = bound
        run(
            *grid,
            torch._C._cuda_getCurrentRawStream(device),
            function,
            metadata,
            None,
            None,
            None,
            *pointers,
            *scalars,
            *self._constants,
        )

    def _launch_by_triton(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], scalars: tuple[int | float, ...]
    ) -> None:
        compiled = self._kernel[grid](*tensors, *scalars, *self._constants, **self._options)
        if INTERPRETED or any(tensor.data_ptr() & _ALIGNMENT_MASK for tensor in tensors):
            return
        self._bound[tensors[0].get_device()] = (compiled.run, compiled.function, compiled.packed_metadata)


def cached(function: F) -> F:
    """`functools.cache` for the functions that make a `Prebound` from the facts that select it."""
    return functools.cache(function)  # type: ignore[return-value]


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
