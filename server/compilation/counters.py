"""Counts what compiles while requests are served: it must be nothing, and `/metrics` shows that it is.

Read from modules that are loaded already: eager mode imports neither Dynamo nor Inductor for it.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

# Keys of Dynamo's timing records whose number of entries counts an event each: a graph compiled by Inductor, a kernel
# whose configurations were benchmarked.
_TIMED_EVENTS = ("compile_fx_inner", "CachingAutotuner.benchmark_all_configs")


class CompileCounters:
    """Events since `mark_ready`."""

    def __init__(self) -> None:
        self._jit_events = 0
        self._ready_compilations = 0
        self._ready_jit_events = 0
        self._listening = False

    def mark_ready(self) -> None:
        """Count from now on. Call when everything that compiles kernels has been imported."""
        self._listen_to_triton()
        self._ready_compilations = _total_compilations()
        self._ready_jit_events = self._jit_events

    @property
    def num_compilations(self) -> int:
        """Frames traced by Dynamo, graphs compiled by Inductor, kernels benchmarked by it."""
        return _total_compilations() - self._ready_compilations

    @property
    def num_jit_events(self) -> int:
        """Kernels that Triton compiled or loaded for a new specialisation: ours and Inductor's."""
        return self._jit_events - self._ready_jit_events

    def _listen_to_triton(self) -> None:
        if self._listening or "triton" not in sys.modules:
            return
        import triton

        before = triton.knobs.compilation.listener

        def listener(**event: Any) -> None:
            self._jit_events += 1
            # Nothing should be compiled by now, so whoever reads the log wants to know what was.
            logger.warning("kernel %s is compiled while serving", getattr(event.get("src"), "name", "of unknown name"))
            if before is not None:
                before(**event)

        triton.knobs.compilation.listener = listener
        self._listening = True


def _total_compilations() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    timed = utils.compilation_time_metrics
    return utils.counters["frames"]["total"] + sum(len(timed.get(key, ())) for key in _TIMED_EVENTS)
