"""Recording and replaying CUDA Graphs of a compiled model.

All graphs draw their memory from one pool and are recorded from the largest to the smallest, so that the small ones
reuse what the large ones took. They can share it because one runs at a time, on one stream, and nothing of a graph's
memory is read after the next graph has started: results are kept as tensors that do not own their memory (`alias`),
and whoever needs one for longer copies it.

A graph reads its inputs from where they were at recording. They must be the persistent input buffers.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from server.compilation.executor import PlanExecutor
from server.forward_context import get_forward_context

Tail = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Hidden states (S, hidden) to logits (S, vocab) and their argmax, int64 (S,)."""


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it allocated."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (extent if tensor.numel() else 0) * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes)
    result = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return result.set_(storage, 0, tensor.shape, tensor.stride())


class GraphRecorder:
    """Records graphs into one memory pool, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around a series of recordings and the warm-up runs before them, all on the recording stream.

        `torch.cuda.graph` collects garbage and empties the allocator's cache at every recording, which takes longer
        than recording a small graph; here it is once per session.
        """
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                yield
            torch.cuda.current_stream().wait_stream(self.stream)
        finally:
            if was_enabled:
                gc.enable()

    @contextlib.contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Record what the block launches instead of running it. Within `session`."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads (telemetry, result copies) ask of CUDA meanwhile is none of this graph's.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            # Leaves the stream usable; the broken recording is reported by the error under way.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            # A pool without graphs is gone with its last recording; graphs that there are keep theirs.
            self.pool = torch.cuda.graph_pool_handle()
            raise
        graph.capture_end()


@dataclass(slots=True)
class FullGraph:
    """A decode step: forward pass, logits and greedy sampling."""

    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    logits: torch.Tensor
    token_ids: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.hidden


@dataclass(slots=True)
class PiecewiseGraph:
    """A forward pass whose pieces are graphs, with attention called between them."""

    steps: list[torch.cuda.CUDAGraph | tuple[Any, ...]]
    """A graph, or the arguments of an attention call."""
    hidden: torch.Tensor
    attention: Callable[..., None]

    def replay(self) -> torch.Tensor:
        attention = self.attention
        for step in self.steps:
            if isinstance(step, tuple):
                attention(*step)
            else:
                step.replay()
        return self.hidden


class CudaGraphForward:
    """A compiled forward pass that runs under the kind of graph that the forward context names.

    Callable like the model. With a graph, the result and everything that `full` holds are valid until the next call.
    """

    def __init__(self, executor: PlanExecutor, tail: Tail, device: torch.device) -> None:
        self.executor = executor
        self.tail = tail
        self.device = device
        self.full: dict[int, FullGraph] = {}
        self.piecewise: dict[int, PiecewiseGraph] = {}
        self.recorder = GraphRecorder(device)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        if context.cudagraph_mode == "full":
            return self.full[context.num_tokens_padded].replay()
        if context.cudagraph_mode == "piecewise":
            return self.piecewise[context.num_tokens_padded].replay()
        return self.executor(input_ids, positions)

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self.full.clear()
        self.piecewise.clear()
        self.recorder.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def record_full(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Record a decode step of `input_ids.shape[0]` sequences. The forward context must hold metadata whose tensors
        are the persistent buffers. Within `recorder.session`."""
        # First without recording: libraries load kernels and allocate workspaces at the first call of a shape.
        self.tail(self.executor.touch(input_ids, positions))
        with self.recorder.record() as graph:
            hidden = self.executor(input_ids, positions)
            logits, token_ids = self.tail(hidden)
        self.full[input_ids.shape[0]] = FullGraph(graph, alias(hidden), alias(logits), alias(token_ids))

    def record_piecewise(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Record the pieces for `input_ids.shape[0]` tokens; attention is not run. Within `recorder.session`."""
        executor = self.executor
        executor.touch(input_ids, positions)
        steps: list[torch.cuda.CUDAGraph | tuple[Any, ...]] = []
        slots = executor.start(input_ids, positions)
        for step in executor.steps:
            if step.piece is None:
                steps.append((*(alias(tensor) for tensor in executor.operands(step, slots)), step.layer))
                executor.drop(step, slots)
                continue
            with self.recorder.record() as graph:
                executor.run_step(step, slots)
            steps.append(graph)
        hidden = alias(slots[executor.output_slot])
        self.piecewise[input_ids.shape[0]] = PiecewiseGraph(steps, hidden, executor.attention)
