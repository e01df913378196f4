"""Brings the results of steps to the host and sends them to the engine.

On CUDA a side stream copies them into pinned memory while the next step is already queued, and a thread waits for the
copy, so that the thread that launches steps never does. On CPU results are there at once and sent inline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from server.compilation.counters import CompileCounters
from server.ipc.engine_to_api import TokenLogprobs
from server.ipc.sockets import Sender
from server.ipc.worker_to_engine import FromWorker, StepResult
from server.worker.logprobs import to_messages
from server.worker.model_runner import StepOutput


@dataclass(slots=True)
class HostOutput:
    """A step's results in host memory, valid once `ready` has passed."""

    output: StepOutput
    token_ids: torch.Tensor
    logprobs: tuple[torch.Tensor, ...] | None
    prompt: list[list[tuple[torch.Tensor, ...]]]
    ready: torch.cuda.Event | None = None


def to_host(output: StepOutput, stream: torch.cuda.Stream | None = None) -> HostOutput:
    """Start copying a step's results on side stream `stream`; on CPU (None) they are in host memory already."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if stream is None or not tensor.is_cuda:
            return tensor
        # Keeps the allocator from handing the memory to the next step while this stream still reads it.
        tensor.record_stream(stream)
        return tensor.to("cpu", non_blocking=True)

    with torch.cuda.stream(stream):
        host = HostOutput(
            output,
            copy(output.token_ids),
            tuple(map(copy, output.logprobs.tensors())) if output.logprobs is not None else None,
            [[tuple(map(copy, piece.tensors())) for piece in part.pieces] for part in output.prompt_parts],
        )
    if stream is not None:
        host.ready = torch.cuda.Event()
        host.ready.record(stream)
    return host


def step_result(host: HostOutput, counters: CompileCounters | None = None) -> StepResult:
    """The message, with what `counters` have counted since readiness; waits for the copy."""
    started = time.perf_counter()
    if host.ready is not None:
        host.ready.synchronize()
    output = host.output
    logprobs = {}
    if host.logprobs is not None:
        messages = to_messages(host.logprobs, output.num_top)
        logprobs = {output.request_ids[i]: m for i, m in zip(output.logprob_rows, messages, strict=True)}
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
    for part, pieces in zip(output.prompt_parts, host.prompt, strict=True):
        entries = [m for piece in pieces for m in to_messages(piece, [part.num_top] * len(piece[0]))]
        prompt_logprobs[part.request_id] = [None, *entries] if part.first else [*entries]
    seconds = {**output.seconds, "copy": time.perf_counter() - started}
    return StepResult(
        step_id=output.step_id,
        request_ids=output.request_ids,
        token_ids=host.token_ids.tolist(),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        step_seconds=seconds,
        num_compilations=counters.num_compilations if counters is not None else 0,
        num_jit_events=counters.num_jit_events if counters is not None else 0,
    )


class ResultSender:
    """The only user of the worker's socket to the engine once steps run."""

    def __init__(
        self,
        sender: Sender[FromWorker],
        device: torch.device,
        on_error: Callable[[BaseException], None],
        counters: CompileCounters | None = None,
    ) -> None:
        self._sender = sender
        self._counters = counters
        self._on_error = on_error
        self._stream: torch.cuda.Stream | None = None
        self._queue: queue.SimpleQueue[HostOutput] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()

    def submit(self, output: StepOutput) -> None:
        """Send the results of a step as soon as they are computed; returns at once on CUDA."""
        host = to_host(output, self._stream)
        if self._thread is None:
            self._sender.send(step_result(host, self._counters))
        else:
            self._queue.put(host)

    def _run(self) -> None:
        try:
            while True:
                self._sender.send(step_result(self._queue.get(), self._counters))
        except BaseException as error:
            self._on_error(error)
