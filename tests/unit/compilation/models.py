"""Small models of every family in compiled form, for tests on CPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from server.attention import select_backend
from server.attention.base import AttentionSpec
from server.compilation.compiler import ModelCompiler
from server.compilation.factors import collect
from server.compilation.store import CompileCache
from server.config import SchedulerOptions, ServerConfig
from server.ipc.engine_to_worker import ScheduleStep
from server.models.config import ModelConfig
from server.models.decoder import CausalLM, build_model
from server.sampling_params import SamplingParams
from server.timeline import Timeline
from server.worker import kv_cache
from server.worker.model_runner import ModelRunner
from tests.unit.worker.harness import Driver

CPU = torch.device("cpu")
MAX_POSITIONS = 64
TOKEN_BUDGET = 24
VOCAB = 96

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=MAX_POSITIONS,
    rms_norm_eps=1e-5,
)
_REPLACE = msgspec.structs.replace
FAMILIES = {
    "llama": LLAMA,
    "mistral": _REPLACE(LLAMA, architecture="MistralForCausalLM", head_dim=16),
    "qwen2": _REPLACE(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": _REPLACE(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True),
}


def make_model(config: ModelConfig = LLAMA) -> CausalLM:
    """The model with random weights that give logits of some size."""
    model = build_model(config, device=CPU, dtype=torch.float32, max_positions=MAX_POSITIONS)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return model


def make_compiler(model: CausalLM, cache: Path, work_dir: Path) -> ModelCompiler:
    factors = collect(
        model.config,
        device_type="cpu",
        dtype=torch.float32,
        max_positions=MAX_POSITIONS,
        token_budget=TOKEN_BUDGET,
        custom_ops="auto",
    )
    return ModelCompiler(
        model.model,
        factors,
        CompileCache(cache),
        work_dir,
        Timeline("worker-0"),
        device=CPU,
        token_budget=TOKEN_BUDGET,
    )


def make_runner(model: CausalLM) -> ModelRunner:
    """A runner over a KV cache of 64 blocks of 4 tokens; its forward pass is the model's own."""
    config = model.config
    spec = AttentionSpec(
        device=CPU,
        dtype=torch.float32,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=4,
    )
    backend, _ = select_backend("TORCH_SDPA", spec)
    options = ServerConfig(scheduler=SchedulerOptions(max_num_seqs=8))
    runner = ModelRunner(options, model, CPU, torch.float32, TOKEN_BUDGET)
    kv_cache.allocate(runner.attention_layers, backend, 64)
    runner.bind_cache(backend, MAX_POSITIONS)
    return runner


def logprobs(runner: ModelRunner, prompts: list[list[int]], chunk: int) -> torch.Tensor:
    """Log-probabilities of every next token of all prompts, computed `chunk` tokens of each at a time."""
    driver = Driver(runner)
    for number, prompt in enumerate(prompts):
        driver.add(f"r{number}", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB))
    lengths = {f"r{number}": len(prompt) for number, prompt in enumerate(prompts)}
    while step := {n: min(chunk, lengths[n] - c) for n, c in driver.computed.items() if c < lengths[n]}:
        driver.step(step)
    rows = []
    for name in driver.tokens:
        for entry in [e for r in driver.results for e in r.prompt_logprobs.get(name, [])][1:]:
            assert entry is not None
            row = torch.empty(VOCAB)
            row[torch.tensor(entry.token_ids[1:])] = torch.tensor(entry.logprobs[1:])
            rows.append(row)
    for name in list(driver.tokens):
        driver.drop(name)
    runner.execute(ScheduleStep(-1, [], {}, {}, driver._dropped))
    return torch.stack(rows)
