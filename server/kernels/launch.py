"""Launch Triton kernels with little host time.

`kernel[grid](...)` binds, specialises and hashes its arguments on every call: 15-30 us of Python for a kernel with
ten arguments, several times what a decode step's small kernels run. A `Prebound` kernel does this once. It holds the
compiled binary of one specialisation and hands raw pointers straight to the launcher that Triton built in C.

What makes that sound: integer arguments must be declared `do_not_specialize` (their values never select a binary),
everything else that a binary depends on is a constant of the `Prebound`, and pointers are checked for the 16-byte
alignment that the binary assumes. Arguments that are not aligned go the ordinary way, which compiles for them.

Programmatic dependent launch
-----------------------------
From compute capability 9.0 on, a kernel of a `Prebound(pdl=True)` in a CUDA Graph may start while the kernel before it
still runs: its programs take the room that ended ones leave, and read ahead what does not depend on their predecessors.
(One that is launched by itself may not: the host is what it waits for, and the host would take longer to launch it.)
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
`griddepcontrol`.) The rules for such a kernel:

1. Every program, on every path to its end, calls `wait_for_earlier` before it first writes memory, and before it reads
   what an earlier kernel of the same step writes. The wait lasts until the whole grid before has ended and its writes
   can be seen. As every program of that grid has waited likewise, all grids before it have ended too: order is
   transitive, and an output may lie where an earlier kernel's input lay, as the allocator arranges.
2. Before the wait it may read what no kernel of the step writes: weights, the rotary table, and the step's inputs
   (positions, lengths, block tables, slots). It may fetch anything into L2, which is where all writes become visible.
3. The first kernel of a step is launched without PDL, hence after everything before the step, which makes the inputs
   of rule 2 complete. It is the embedding, ours or Inductor's.
4. `start_dependents` lets the next grid start and orders nothing, so it may come before the wait. The next grid starts
   when all programs of this one have called it or ended, thus takes no room that one of this grid waits for: so it
   comes first.
5. After a kernel that starts dependents before it has waited, none may follow that counts on the opposite order.
   Inductor's own PDL kernels do, and are switched off (`server.compilation.pieces`). What is launched without PDL
   (torch, cuBLAS, flash-attn) waits for the end of the grid before it, as ever.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
import triton.runtime.build as triton_build

from server.kernels import builders

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests, on CPU tensors, thousands of times slower."""

WARM_UP_THREADS = 8
"""Kernels that are compiled at once while the server starts."""

_ALIGNMENT_MASK = 15

_PDL_SWITCH = "BENCHCTL_PDL"
_PDL_CAPABILITY = (9, 0)

F = TypeVar("F", bound=Any)


def keep_extensions_apart(build: Any) -> None:
    """Make `build`, Triton's module that compiles launchers, safe for threads.

    Triton 3.6 loads every launcher as an extension module of the same name. Loaded a second time, such a module is the
    one of that name that came last, filled with its own contents: a thread that has not yet taken its launcher out of
    there gets another kernel's. So modules are loaded one at a time, and what is handed out is a copy. Newer versions
    have one launcher for all kernels, and need nothing.
    """
    load = getattr(build, "_load_module_from_path", None)
    if load is None or hasattr(load, "__wrapped__"):
        return
    lock = threading.Lock()

    @functools.wraps(load)
    def load_alone(*arguments: Any, **options: Any) -> ModuleType | SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(*arguments, **options)))

    build._load_module_from_path = load_alone


keep_extensions_apart(triton_build)


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """Let the next kernel's programs start, once all programs of this one have come here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended and their writes can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def uses_pdl(device: int) -> bool:
    """Whether kernels that can are recorded as programmatic dependents on a CUDA device: from compute capability 9.0
    on, unless the environment variable BENCHCTL_PDL is 0. Fixed for the life of the process."""
    if INTERPRETED or torch.version.cuda is None or os.environ.get(_PDL_SWITCH) == "0":
        return False
    return torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY


class Prebound:
    """One specialisation of a Triton kernel whose parameters are: pointers, then scalars, then constexprs.

    `constants` are the values of the constexpr parameters in order. A kernel with `pdl` keeps the rules above and has
    one more parameter, PDL, at the end. The element types of the tensors must be the same at every call: make one
    `Prebound` per dtype. Instances are cheap; the kernel is compiled at the first call.
    """

    __slots__ = ("_bound", "_constants", "_kernel", "_options", "_pdl")

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        *,
        num_warps: int = 4,
        num_stages: int = 2,
        max_registers: int | None = None,
        pdl: bool = False,
    ) -> None:
        """`max_registers`: most registers of a thread; None: as many as the compiler likes."""
        self._kernel = kernel
        self._constants = constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        self._pdl = pdl
        self._bound: dict[int, tuple[Any, Any, Any, Any, tuple[Any, ...]]] = {}

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
        run, run_dependent, function, metadata, constants = bound
        if run_dependent is not None and torch._C._cuda_isCurrentStreamCapturing():
            run = run_dependent
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
            *constants,
        )

    def _launch_by_triton(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], scalars: tuple[int | float, ...]
    ) -> None:
        device = tensors[0].get_device()
        constants, options = self._constants, self._options
        if self._pdl:
            dependent = uses_pdl(device)
            constants = (*constants, dependent)
            if dependent:
                options = {**options, "launch_pdl": True}
        aligned = not any(tensor.data_ptr() & _ALIGNMENT_MASK for tensor in tensors)
        if aligned and (pool := builders.current()) is not None:
            pool.build(self._job(tensors, scalars, constants, options))
        compiled = self._kernel[grid](*tensors, *scalars, *constants, **options)
        if INTERPRETED or not aligned:
            return
        run, run_dependent = compiled.run, None
        if options is not self._options:
            # One binary serves both: without the attribute of the launch, its waits are over at once.
            run, run_dependent = copy.copy(run), run
            run.launch_pdl = False
        self._bound[device] = (run, run_dependent, compiled.function, compiled.packed_metadata, constants)

    def _job(
        self,
        tensors: tuple[torch.Tensor, ...],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> builders.Job:
        target = triton.runtime.driver.active.get_current_target()
        return builders.Job(
            module=self._kernel.fn.__module__,
            kernel=self._kernel.fn.__name__,
            tensors=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            scalars=list(scalars),
            constants=list(constants),
            options=options,
            target=(target.backend, target.arch, target.warp_size),
        )


def cached(function: F) -> F:
    """`functools.cache` for the functions that make a `Prebound` from the facts that select it."""
    return functools.cache(function)  # type: ignore[return-value]


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
