"""A real checkpoint: greedy tokens through the runner are transformers' own."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from server.models.pull import pull
from server.sampling_params import SamplingParams
from tests.unit.worker.harness import Driver, make_runner

PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who " * 3,
]
TOKENS = 20


@pytest.mark.model
@pytest.mark.parametrize("chunk", [16, 512])
def test_greedy_tokens_equal_transformers(chunk: int) -> None:
    folder = pull("smollm2-135m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    runner = make_runner(folder, num_blocks=64, max_model_len=1024)
    driver = Driver(runner)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    driver.generate(TOKENS, chunk=chunk)

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = reference(torch.tensor([driver.tokens[str(i)]])).logits[0]
        # Teacher-forced on our own tokens: the first disagreement would show at its position.
        assert driver.tokens[str(i)][len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
