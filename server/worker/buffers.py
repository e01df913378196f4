"""Host arrays with a fixed twin on the device.

On CUDA the host side is pinned and there are two of it, used in turn, so that step N+1 can be prepared while the copies
of step N are still queued. The device side never moves: CUDA Graphs read it by address. On CPU both are one memory.
"""

from __future__ import annotations

import numpy as np
import torch

_HOST_COPIES = 2


class StagedBuffer:
    """A one-dimensional device tensor that is filled from numpy."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device_tensor = torch.zeros(size, dtype=dtype, device=device)
        if device.type == "cpu":
            self._host = [self.device_tensor]
        else:
            self._host = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(_HOST_COPIES)]
        self._arrays = [t.numpy() for t in self._host]
        self._turn = 0

    def select(self, turn: int) -> None:
        """Use the host side of step `turn` from now on."""
        self._turn = turn % len(self._host)

    @property
    def array(self) -> np.ndarray:
        """Host side as numpy."""
        return self._arrays[self._turn]

    @property
    def host(self) -> torch.Tensor:
        """Host side as a tensor."""
        return self._host[self._turn]

    def upload(self, count: int) -> torch.Tensor:
        """Copy the first `count` entries to the device (queued on the current stream); returns that device view."""
        view = self.device_tensor[:count]
        host = self._host[self._turn]
        if host is not self.device_tensor:
            view.copy_(host[:count], non_blocking=True)
        return view


class StagingTurns:
    """Switches all buffers to the next host side, once the copies out of it have run."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event | None] = [None] * _HOST_COPIES
        self._device = device
        self._turn = 0
        self._buffers: list[StagedBuffer] = []

    def add(self, size: int, dtype: torch.dtype) -> StagedBuffer:
        """A new buffer whose host side this switches."""
        buffer = StagedBuffer(size, dtype, self._device)
        self._buffers.append(buffer)
        return buffer

    def begin(self) -> None:
        """Before a step writes to the host sides."""
        if self._device.type != "cuda":
            return
        self._turn = (self._turn + 1) % _HOST_COPIES
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        for buffer in self._buffers:
            buffer.select(self._turn)

    def end(self) -> None:
        """After the step's last upload was queued."""
        if self._device.type != "cuda":
            return
        event = self._events[self._turn]
        if event is None:
            event = self._events[self._turn] = torch.cuda.Event()
        event.record()
