"""Whole models on the card: every mode and backend computes the log-probabilities of fp32.

Prompts are fed in ways that reach each path: whole, in chunks beside decodes, and token by token, which runs the
decode path over tokens that are known, so that rounding cannot send two runs down different texts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from server.config import BackendName, CudaGraphMode, DtypeName, Mode
from server.models import registry
from server.sampling_params import SamplingParams
from server.worker.worker import Worker
from tests.gpu.in_process_worker import forget, start_worker
from tests.unit.worker.harness import Driver

MODELS = {
    "tiny": registry.PRESETS["tiny"],
    "tiny-qwen3": msgspec.structs.replace(
        registry.PRESETS["tiny"],
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        head_dim=128,
        num_heads=8,
        num_kv_heads=1,
        tie_word_embeddings=False,
    ),
}
# The kinds of graph are compared with each other in test_cudagraphs.py; here everything is compared with fp32.
RUNS: list[tuple[BackendName, Mode, CudaGraphMode]] = [
    ("FLASH_ATTN", "eager", "none"),
    ("TRITON_ATTN", "eager", "none"),
    ("TORCH_SDPA", "eager", "none"),
    ("FLASH_ATTN", "compile", "full_and_piecewise"),
    ("TRITON_ATTN", "compile", "full_and_piecewise"),
]
PROMPTS = {
    f"r{i}": random.Random(i).choices(range(256), k=length) for i, length in enumerate((3, 17, 130, 64, 65, 300))
}
ECHO = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0)


@pytest.fixture(autouse=True)
def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in MODELS.items():
        monkeypatch.setitem(registry.PRESETS, name, config)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def start(
    cache: Path,
    model: str,
    mode: Mode,
    backend: BackendName,
    dtype: DtypeName = "bfloat16",
    graphs: CudaGraphMode = "full_and_piecewise",
    custom_ops: Literal["auto", "off"] = "auto",
) -> Worker:
    return start_worker(
        cache,
        model,
        mode=mode,
        backend=backend,
        dtype=dtype,
        cudagraph_mode=graphs,
        custom_ops=custom_ops,
        max_model_len=None,
        sizes=(1, 4, 16, 64),
        num_blocks=96,
        max_num_seqs=16,
        token_budget=512,
    )


def prompt_logprobs(worker: Worker, steps: str) -> torch.Tensor:
    """Of every prompt's tokens but the first, one after another."""
    driver = Driver(worker.runner, seed=3)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, ECHO)
    limit = {"whole": 512, "chunks": 41, "tokens": 1}[steps]
    while pending := [name for name, prompt in PROMPTS.items() if driver.computed[name] < len(prompt)]:
        budget, scheduled = 512, {}
        for name in pending:
            count = min(len(PROMPTS[name]) - driver.computed[name], limit, budget)
            if count:
                scheduled[name] = count
                budget -= count
        driver.step(scheduled)
    values = [
        entry.logprobs[0]
        for name in PROMPTS
        for result in driver.results
        for entry in result.prompt_logprobs.get(name, [])
        if entry is not None
    ]
    forget(driver)
    return torch.tensor(values)


@pytest.fixture(scope="module", params=list(MODELS))
def wanted(request: pytest.FixtureRequest, cache: Path) -> tuple[str, torch.Tensor]:
    """The model's name and its log-probabilities in fp32, by plain torch on the card."""
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.PRESETS, name, MODELS[name])
        worker = start(cache, name, "eager", "TORCH_SDPA", "float32", custom_ops="off")
        values = prompt_logprobs(worker, "whole")
    assert len(values) == sum(len(prompt) - 1 for prompt in PROMPTS.values())
    return name, values


@pytest.mark.parametrize(("backend", "mode", "graphs"), RUNS, ids="-".join)
def test_log_probabilities(
    backend: BackendName, mode: Mode, graphs: CudaGraphMode, wanted: tuple[str, torch.Tensor], cache: Path
) -> None:
    name, expected = wanted
    if backend == "FLASH_ATTN":
        pytest.importorskip("flash_attn.cute")
    worker = start(cache, name, mode, backend, graphs=graphs)
    for steps in ("whole", "chunks", "tokens"):
        got = prompt_logprobs(worker, steps)
        assert got.isfinite().all()
        distance = (got - expected).norm() / expected.norm()
        assert distance < 5e-3, (steps, distance)
        assert (got - expected).abs().max() < 0.15, steps


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_generates_the_same_in_any_batch(mode: Mode, cache: Path) -> None:
    """Requests that come and go, greedy and seeded: each gets the tokens that it gets alone, in fp32."""
    worker = start(cache, "tiny", mode, "TRITON_ATTN", "float32")
    sampling = {
        name: SamplingParams(max_tokens=12, temperature=temperature, seed=5, top_k=top_k, top_p=top_p, logprobs=2)
        for name, (temperature, top_k, top_p) in zip(
            PROMPTS,
            [(0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.8), (0.0, 0, 1.0), (0.7, 50, 0.9)],
            strict=True,
        )
    }
    alone = {}
    for name, prompt in PROMPTS.items():
        driver = Driver(worker.runner)
        driver.add(name, prompt, sampling[name])
        driver.generate(12)
        alone[name] = driver.tokens[name]
        forget(driver)
    together = Driver(worker.runner, seed=9)
    for name, prompt in PROMPTS.items():
        together.add(name, prompt, sampling[name])
    together.generate(12, chunk=50)
    assert together.tokens == alone
