"""A whole model's decode step of our own kernels: what they and their launches add up to, eager and in a CUDA Graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from server.attention import BACKENDS, select_backend
from server.attention.base import AttentionBackend, AttentionSpec
from server.attention.warm_up import synthetic_batch
from server.compilation.cudagraph import GraphRecorder
from server.config import ModelOptions
from server.errors import UserError
from server.forward_context import ForwardContext, set_forward_context
from server.kernels.install import install_eager_kernels
from server.models.decoder import CausalLM, build_model
from server.models.loading import fill_dummy_weights
from server.models.registry import resolve_model
from server.worker.kv_cache import allocate
from server.worker.sampler import greedy

_STEPS = 60


@dataclass(frozen=True, slots=True)
class StepTime:
    """One decode step: forward pass, logits and argmax of every sequence."""

    model: str
    backend: str
    sequences: int
    length: int
    step_ms: float
    """Median from the first launch to the last result."""
    host_ms: float
    """Median until the last launch has returned."""
    graph_ms: float | None
    """Median of the same launches replayed as one CUDA Graph; None: the backend cannot be captured."""


def eager_steps(model: str, device: torch.device, sequences: list[int], length: int) -> Iterator[StepTime]:
    """Steps of `model` with dummy weights in bfloat16, for each backend that can run here."""
    resolved = resolve_model(ModelOptions(model=model, max_model_len=length + 1))
    config, dtype = resolved.config, torch.bfloat16
    network = build_model(config, device=device, dtype=dtype, max_positions=length + 1)
    fill_dummy_weights(network, 0)
    install_eager_kernels(network)
    for name in BACKENDS:
        spec = AttentionSpec(
            device, dtype, config.num_heads, config.num_kv_heads, config.head_dim, 0, max_num_seqs=max(sequences)
        )
        try:
            backend, _ = select_backend(name, spec)  # type: ignore[arg-type]
        except UserError:
            continue
        for count in sequences:
            yield StepTime(model, name, count, length, *_time(network, backend, count, length, device))


def _time(
    network: CausalLM, backend: AttentionBackend, count: int, length: int, device: torch.device
) -> tuple[float, float, float | None]:
    """Median milliseconds of the step, of its launches, and of its replay."""
    metadata = synthetic_batch(backend.spec, [1] * count, [length] * count).metadata
    layers = network.attention_layers()
    allocate(layers, backend, int(metadata.block_table.max()) + 1)
    ids = torch.zeros(count, dtype=torch.int64, device=device)
    positions = torch.full((count,), length - 1, dtype=torch.int64, device=device)

    def step() -> torch.Tensor:
        return greedy(network.compute_logits(network.model(ids, positions)))

    graph_ms = None
    with torch.inference_mode(), set_forward_context(ForwardContext(metadata, layers)):
        step_ms, host_ms = _medians(step, device)
        if backend.supports_full_cudagraph:
            recorder = GraphRecorder(device)
            with recorder.session():
                step()
                with recorder.record() as graph:
                    tokens = step()

            def replay() -> torch.Tensor:
                graph.replay()
                return tokens

            graph_ms, _ = _medians(replay, device)
    for layer in layers.values():
        layer.kv_cache = None
    return step_ms, host_ms, graph_ms


def _medians(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Milliseconds until the result of `run` is on the host, and until `run` has returned."""
    steps, hosts = [], []
    for _ in range(_STEPS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        tokens = run()
        launched = time.perf_counter()
        tokens.tolist()
        steps.append(time.perf_counter() - start)
        hosts.append(launched - start)
    return statistics.median(steps[_STEPS // 3 :]) * 1e3, statistics.median(hosts[_STEPS // 3 :]) * 1e3
