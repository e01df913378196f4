"""Opens the GPU before torch is there to do it."""

from __future__ import annotations

import ctypes
import threading

from server.timeline import Timeline


def open_cuda(timeline: Timeline) -> None:
    """Create the CUDA context of the first visible device in a thread, while the caller imports torch, which then
    finds it. Does nothing where there is no driver or no device: torch will say what is wrong."""

    def run() -> None:
        with timeline.span("cuda-context", thread="cuda-context"):
            try:
                driver = ctypes.CDLL("libcuda.so.1")
            except OSError:
                return
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
                # The primary context is the one that the runtime API, and so torch, uses. It is never released: it
                # lives as long as the process.
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    threading.Thread(target=run, name="cuda-context", daemon=True).start()
