"""A real checkpoint on the card: every backend and mode speaks like plain torch in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from server.config import BackendName, DtypeName, Mode
from server.models.registry import models_dir
from server.sampling_params import SamplingParams
from server.worker.worker import Worker
from tests.gpu.in_process_worker import forget, start_worker
from tests.unit.worker.harness import Driver

FOLDER = models_dir() / "smollm2-135m"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who " * 4,
]
TOKENS = 48

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason="needs `benchctl models pull smollm2-135m`"),
]


def start(backend: BackendName, mode: Mode, dtype: DtypeName, cache: Path) -> Worker:
    return start_worker(
        cache,
        FOLDER,
        mode=mode,
        backend=backend,
        dtype=dtype,
        load_format="safetensors",
        max_model_len=None,
        sizes=(1, 4, 16, 64),
        num_blocks=96,
        max_num_seqs=16,
        token_budget=512,
    )


def generate(worker: Worker) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    driver = Driver(worker.runner)
    for i, text in enumerate(PROMPTS):
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        driver.add(str(i), prompt, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    driver.generate(TOKENS, chunk=50)
    texts = [driver.tokens[str(i)] for i in range(len(PROMPTS))]
    forget(driver)
    return texts


def likeliest(worker: Worker, texts: list[list[int]]) -> list[int]:
    """The likeliest token after each but the last token of the texts, fed one token at a time: the decode path."""
    driver = Driver(worker.runner)
    for i, text in enumerate(texts):
        driver.add(str(i), text, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1))
    for position in range(max(map(len, texts))):
        driver.step({str(i): 1 for i, text in enumerate(texts) if position < len(text)})
    tokens = [
        entry.token_ids[1]
        for i in range(len(texts))
        for result in driver.results
        for entry in result.prompt_logprobs.get(str(i), [])
        if entry is not None
    ]
    forget(driver)
    return tokens


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], list[int]]:
    worker = start("TORCH_SDPA", "eager", "float32", tmp_path_factory.mktemp("plain"))
    generated = generate(worker)
    return generated, likeliest(worker, generated)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_greedy_texts_are_equal_in_fp32(mode: Mode, texts: tuple[list[list[int]], list[int]], tmp_path: Path) -> None:
    assert generate(start("TRITON_ATTN", mode, "float32", tmp_path)) == texts[0]


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"])
def test_likeliest_tokens_in_bfloat16(
    backend: BackendName, mode: Mode, texts: tuple[list[list[int]], list[int]], tmp_path: Path
) -> None:
    """Rounding to 8 bits turns near ties; on tokens that are given, a turn does not send the text elsewhere."""
    if backend == "FLASH_ATTN":
        pytest.importorskip("flash_attn.cute")
    got = torch.tensor(likeliest(start(backend, mode, "bfloat16", tmp_path), texts[0]))
    agreement = (got == torch.tensor(texts[1])).float().mean().item()
    assert agreement > 0.96, agreement
