"""Every model family computes what transformers computes, through chunked prefill and a scattered KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from server.sampling_params import SamplingParams
from tests.unit.worker.harness import Driver, make_runner

VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama-biases": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=None, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    reference.save_pretrained(tmp_path)
    runner = make_runner(tmp_path, num_blocks=40, block_size=4)
    driver = Driver(runner)
    prompts = {
        name: torch.randint(0, VOCAB, (length,)).tolist() for name, length in (("a", 37), ("b", 1), ("c", 22), ("d", 8))
    }
    greedy = SamplingParams(max_tokens=8, temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB)
    for name, prompt in prompts.items():
        driver.add(name, prompt, greedy)
    # One request ahead of the others, so that decodes and chunks of prompts mix.
    driver.step({"a": 37})
    driver.generate(6, chunk=5)

    for name, prompt in prompts.items():
        tokens = driver.tokens[name]
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        parts = [e for r in driver.results for e in r.prompt_logprobs.get(name, [])]
        assert parts[0] is None
        entries = parts[1:] + [r.logprobs[name] for r in driver.results if name in r.logprobs]
        assert len(parts) == len(prompt)
        assert len(entries) == len(tokens) - 1
        for position, entry in enumerate(entries):
            assert entry is not None
            assert entry.token_ids[0] == tokens[position + 1]
            got = torch.empty(VOCAB)
            got[torch.tensor(entry.token_ids[1:])] = torch.tensor(entry.logprobs[1:])
            torch.testing.assert_close(got, expected[position], atol=1e-4, rtol=0)
            assert entry.logprobs[0] == pytest.approx(float(expected[position, tokens[position + 1]]), abs=1e-4)
        for position in range(len(prompt) - 1, len(tokens) - 1):
            assert tokens[position + 1] == int(expected[position].argmax())
