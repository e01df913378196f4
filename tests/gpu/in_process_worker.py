"""Whole workers inside the test process: the real start and real steps, without pipes, sockets and an engine."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any, Literal

import torch

from server.config import (
    AttentionOptions,
    BackendName,
    CacheOptions,
    CompilationOptions,
    CudaGraphMode,
    DtypeName,
    Mode,
    ModelOptions,
    SchedulerOptions,
    ServerConfig,
)
from server.ipc.engine_to_worker import ScheduleStep
from server.sampling_params import SamplingParams
from server.timeline import Timeline
from server.worker.worker import Worker
from tests.unit.worker.harness import Driver

VOCAB = 512
MAX_NUM_SEQS = 20
TOKEN_BUDGET = 160

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
}


def model_folder(directory: Path, family: str) -> Path:
    """A folder with the `config.json` of a small model of `family`; its weights are dummies."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_COMMON | FAMILIES[family]))
    return directory


class _Child:
    """What a worker asks of its link to the supervisor."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.process = "worker-0"
        self.timeline = Timeline(self.process)

    def flush_spans(self) -> None:
        """Nobody reads them while starting."""

    def progress(self, *_: Any) -> None:
        """No bar is shown."""

    def send(self, message: Any) -> None:
        """Only a failure is ever sent."""
        raise AssertionError(f"unexpected message {message}")


def start_worker(
    directory: Path,
    model: str | Path = "tiny",
    *,
    mode: Mode = "compile",
    cudagraph_mode: CudaGraphMode = "full_and_piecewise",
    backend: BackendName = "TRITON_ATTN",
    custom_ops: Literal["auto", "on", "off"] = "auto",
    dtype: DtypeName = "auto",
    load_format: Literal["auto", "safetensors", "dummy"] = "dummy",
    max_model_len: int | None = 1024,
    sizes: tuple[int, ...] | None = None,
    num_blocks: int | None = 256,
    gpu_memory_utilization: float = 0.5,
    max_num_seqs: int = MAX_NUM_SEQS,
    token_budget: int = TOKEN_BUDGET,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Worker:
    """A started worker with its caches below `directory`: compiled, captured, warm.

    `sizes`: numbers of tokens for which CUDA Graphs are recorded; None: the server's own. `num_blocks`: of the KV
    cache; None: as many as fit into `gpu_memory_utilization`. `token_budget`: most tokens of a step.
    """
    runtime_dir = directory / f"run-{random.getrandbits(48):x}"
    runtime_dir.mkdir(parents=True)
    config = ServerConfig(
        model=ModelOptions(model=str(model), load_format=load_format, dtype=dtype, max_model_len=max_model_len),
        cache=CacheOptions(num_gpu_blocks_override=num_blocks, gpu_memory_utilization=gpu_memory_utilization),
        scheduler=SchedulerOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget),
        compilation=CompilationOptions(
            mode=mode,
            cudagraph_mode=cudagraph_mode,
            cudagraph_capture_sizes=sizes,
            custom_ops=custom_ops,
            cache_dir=str(directory / "cache"),
        ),
        attention=AttentionOptions(backend=backend),
        device=device,
        runtime_dir=str(runtime_dir),
    )
    worker = Worker(_Child(config))  # type: ignore[arg-type]
    worker.start()
    return worker


def free(worker: Worker) -> None:
    """Give the worker's device memory back; it is unusable afterwards."""
    gc.unfreeze()
    for layer in worker.runner.attention_layers.values():
        layer.kv_cache = None
    worker.__dict__.clear()
    gc.collect()
    torch.cuda.empty_cache()


def forced_logprobs(worker: Worker, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Log-probabilities (len - 1, vocab) of every next token of each prompt, computed `chunk` tokens at a time.

    With `chunk` 1 all steps are decode batches, which shrink as the shorter prompts end.
    """
    driver = Driver(worker.runner)
    # Blocks from earlier calls hold other requests' keys and values: every caller starts from the same cache.
    everything = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
    names = [f"r{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        driver.add(name, prompt, everything)
    while True:
        wanted: dict[str, int] = {}
        budget = worker.runner.max_num_tokens
        for name, prompt in zip(names, prompts, strict=True):
            count = min(chunk, len(prompt) - driver.computed[name], budget - sum(wanted.values()))
            if count > 0:
                wanted[name] = count
        if not wanted:
            break
        driver.step(wanted)
    results = []
    for name in names:
        entries = [e for r in driver.results for e in r.prompt_logprobs.get(name, [])][1:]
        rows = torch.empty(len(entries), VOCAB)
        for row, entry in enumerate(entries):
            assert entry is not None
            rows[row, torch.tensor(entry.token_ids[1:])] = torch.tensor(entry.logprobs[1:])
        results.append(rows)
    forget(driver)
    return results


def forget(driver: Driver) -> None:
    """Let the worker forget all requests of the driver, so that another can start from an empty batch."""
    for name in list(driver.tokens):
        driver.drop(name)
    driver.runner.execute(ScheduleStep(10**6, [], {}, {}, list(driver._dropped)))
    driver._dropped = []


def some_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
