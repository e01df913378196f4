"""Opens the GPU before torch is there to do it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from server.timeline import Timeline


def open_cuda(timeline: Timeline, on_device: Callable[[], object]) -> None:
    """Create the CUDA context of the first visible device in a thread, while the caller imports torch, which then
    finds it; `on_device` is called before. Does nothing where there is no driver or no device: torch will say what is
    wrong."""

    def run() -> None:
        with timeline.span("cuda-context", thread="cuda-context"):
            try:
                driver = ctypes.CDLL("libcuda.so.1")
            except OSError:
                return
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
                on_device()
                # The primary context is the one that the runtime API, and so torch, uses. It is never released: it
                # lives as long as the process.
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    threading.Thread(target=run, name="cuda-context", daemon=True).start()
