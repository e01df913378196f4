"""Captures a server's CUDA Graphs at start: how much memory they will take, then all of them.

The KV cache takes what is left of the GPU, and graphs of decode steps read it by address, so it must be sized before
they exist. `estimate_bytes` records the two largest graphs of each kind over a cache of a few blocks: the largest shows
what the shared pool needs, the second what every further graph adds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from server.attention.base import AttentionBackend
from server.compilation.cudagraph import CudaGraphForward
from server.compilation.dispatch import BatchDescriptor, CaptureSizes, Dispatcher, capture_sizes
from server.compilation.executor import PlanExecutor
from server.config import ServerConfig
from server.timeline import Timeline
from server.worker import kv_cache
from server.worker.model_runner import ModelRunner
from server.worker.sampler import greedy

logger = logging.getLogger(__name__)

Progress = Callable[[str, float, float], None]
"""Called with the phase's name, graphs done and graphs in all."""

_MEASURED = 2
_BLOCKS_WHILE_MEASURING = 2
_SMALLEST_SHARE = 1 << 20
"""Bytes to reckon with for a further graph at least: the driver allocates in larger steps than one graph takes, so
that a single one may seem to be free."""


class GraphCapture:
    """The CUDA Graphs of one model runner."""

    def __init__(
        self,
        config: ServerConfig,
        runner: ModelRunner,
        executor: PlanExecutor,
        backend: AttentionBackend,
        timeline: Timeline,
        progress: Progress,
    ) -> None:
        self.runner = runner
        self.backend = backend
        self.timeline = timeline
        self.progress = progress
        self.sizes = capture_sizes(
            config.compilation.cudagraph_mode,
            config.compilation.cudagraph_capture_sizes,
            max_num_seqs=runner.max_num_seqs,
            token_budget=runner.max_num_tokens,
            full_supported=backend.supports_full_cudagraph,
            layer_parameters=sum(parameter.numel() for parameter in runner.model.model.layers[0].parameters()),
        )
        if config.compilation.cudagraph_mode in ("full", "full_and_piecewise") and not backend.supports_full_cudagraph:
            logger.warning("%s cannot be captured in a CUDA Graph: decode batches run without a full one", backend.name)
        self.forward = CudaGraphForward(executor, self._tail, runner.device)

    def _tail(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.runner.model.compute_logits(hidden)
        return logits, greedy(logits)

    def shapes(self, sizes: CaptureSizes) -> list[BatchDescriptor]:
        """What to record, largest first."""
        full = [BatchDescriptor(size, size, "full") for size in reversed(sizes.full)]
        piecewise = [BatchDescriptor(size, 0, "piecewise") for size in reversed(sizes.piecewise)]
        return sorted(full + piecewise, key=lambda shape: shape.num_tokens, reverse=True)

    def estimate_bytes(self, max_model_len: int) -> int:
        """Bytes of GPU memory that all graphs will take. Call after the weights are loaded and before the KV cache is
        allocated; leaves neither graphs nor a cache behind."""
        runner, device = self.runner, self.runner.device
        if not self.shapes(self.sizes):
            return 0
        runner.graphs = self.forward
        kv_cache.allocate(runner.attention_layers, self.backend, _BLOCKS_WHILE_MEASURING)
        runner.bind_cache(self.backend, max_model_len)
        total = 0
        for kind in ("full", "piecewise"):
            shapes = [shape for shape in self.shapes(self.sizes) if shape.cudagraph_mode == kind]
            taken = []
            for shape in shapes[:_MEASURED]:
                before = _free_bytes(device)
                with self.forward.recorder.session():
                    runner.record_graph(shape)
                taken.append(max(0, before - _free_bytes(device)))
            if taken:
                total += taken[0] + (len(shapes) - 1) * max(_SMALLEST_SHARE, *taken[1:], 0)
        self.forward.clear()
        for layer in runner.attention_layers.values():
            layer.kv_cache = None
        torch.cuda.empty_cache()
        return total

    def capture(self) -> None:
        """Record all graphs and let the runner use them. The KV cache must be in place."""
        shapes = self.shapes(self.sizes)
        if not shapes:
            return
        self.runner.graphs = self.forward
        before = _free_bytes(self.runner.device)
        with self.timeline.span("capture", graphs=len(shapes)) as attributes:
            with self.forward.recorder.session():
                for number, shape in enumerate(shapes):
                    self.progress("cuda-graphs", number, len(shapes))
                    with self.timeline.span(f"capture/{shape.cudagraph_mode}-{shape.num_tokens}"):
                        self.runner.record_graph(shape)
            self.progress("cuda-graphs", len(shapes), len(shapes))
            attributes["bytes"] = before - _free_bytes(self.runner.device)
        self.runner.dispatcher = Dispatcher(self.sizes)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
