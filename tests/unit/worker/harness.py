"""A model runner without an engine: block tables and schedules are made here, by hand."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from server.attention import select_backend
from server.attention.base import AttentionSpec
from server.config import ModelOptions, SchedulerOptions, ServerConfig
from server.ipc.engine_to_worker import NewRequest, ScheduleStep
from server.ipc.worker_to_engine import StepResult
from server.models.decoder import build_model
from server.models.loading import fill_dummy_weights, load_weights
from server.models.registry import resolve_model
from server.sampling_params import SamplingParams
from server.worker import kv_cache
from server.worker.model_runner import ModelRunner
from server.worker.results import step_result, to_host

CPU = torch.device("cpu")


def make_runner(
    model: str | Path = "tiny",
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_tokens: int = 512,
    max_model_len: int | None = None,
) -> ModelRunner:
    torch.set_num_threads(1)
    config = ServerConfig(
        model=ModelOptions(model=str(model), max_model_len=max_model_len),
        scheduler=SchedulerOptions(max_num_seqs=max_num_seqs),
    )
    resolved = resolve_model(config.model)
    spec = AttentionSpec(
        device=CPU,
        dtype=torch.float32,
        num_heads=resolved.config.num_heads,
        num_kv_heads=resolved.config.num_kv_heads,
        head_dim=resolved.config.head_dim,
        block_size=block_size,
    )
    backend, _ = select_backend("TORCH_SDPA", spec)
    network = build_model(resolved.config, device=CPU, dtype=torch.float32, max_positions=resolved.max_model_len)
    if resolved.path is None:
        fill_dummy_weights(network, 0)
    else:
        load_weights(network, resolved.path)
    runner = ModelRunner(config, network, CPU, torch.float32, max_num_tokens)
    kv_cache.allocate(runner.attention_layers, backend, num_blocks)
    runner.bind_cache(backend, resolved.max_model_len)
    return runner


class Driver:
    """Schedules requests on a runner: blocks in random order, chunks as asked."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.backend.spec.block_size
        layer = next(iter(runner.attention_layers.values()))
        assert layer.kv_cache is not None
        self.free = list(range(layer.kv_cache.shape[1]))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.results: list[StepResult] = []
        self._new: list[NewRequest] = []
        self._dropped: list[str] = []
        self._steps = 0

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.tokens[request_id] = list(prompt)
        self.computed[request_id] = 0
        self.blocks[request_id] = []
        self._new.append(NewRequest(request_id, list(prompt), len(prompt), sampling, [], 0))

    def drop(self, request_id: str) -> None:
        self.free.extend(self.blocks.pop(request_id))
        del self.tokens[request_id], self.computed[request_id]
        self._dropped.append(request_id)

    def step(self, scheduled: dict[str, int]) -> StepResult:
        """Run `scheduled` tokens of each request; sampled tokens are appended to `tokens`."""
        new = {r.request_id: r for r in self._new if r.request_id in scheduled}
        self._new = [r for r in self._new if r.request_id not in scheduled]
        new_blocks: dict[str, list[int]] = {}
        for request_id, count in scheduled.items():
            table = self.blocks[request_id]
            needed = -(-(self.computed[request_id] + count) // self.block_size) - len(table)
            added = [self.free.pop() for _ in range(needed)]
            table.extend(added)
            if request_id in new:
                new[request_id].block_ids = list(table)
            elif added:
                new_blocks[request_id] = added
            self.computed[request_id] += count
        message = ScheduleStep(self._steps, list(new.values()), scheduled, new_blocks, self._dropped)
        self._dropped = []
        self._steps += 1
        result = step_result(to_host(self.runner.execute(message)))
        for request_id, token in zip(result.request_ids, result.token_ids, strict=True):
            self.tokens[request_id].append(token)
        self.results.append(result)
        return result

    def remaining(self, request_id: str) -> int:
        return len(self.tokens[request_id]) - self.computed[request_id]

    def generate(self, count: int, chunk: int = 10**9) -> None:
        """Until every request has `count` more tokens than it had prompt; prompts go in chunks."""
        goal = {r: len(t) + count for r, t in self.tokens.items()}
        while pending := [r for r in self.tokens if len(self.tokens[r]) < goal[r]]:
            self.step({r: min(self.remaining(r), chunk) for r in pending})
