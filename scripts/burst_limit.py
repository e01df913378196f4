"""The most output tokens per second that a GPU can give when the requests of a workload all arrive at once.

    benchctl workload export sharegpt-like:num_requests=512,prompt_format=ids -o burst.jsonl
    python scripts/burst_limit.py burst.jsonl llama-3.1-8b

Prompts cost their FLOPs once. Then every step gives one token to each request that is not through, and takes as long
as the larger of reading the weights and multiplying by them, and as reading the keys and values of all contexts. No
kernel, launch or scheduler is as fast, and nothing is left out that could be: an upper bound (the roofline model of
Williams, Waterman and Patterson, 2009). With few long answers it is far below that of equal ones, as the last steps
read all weights for the few that are left.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from server.models.config import ModelConfig
from server.models.registry import PRESETS

BYTES = 2  # of an element: bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="JSON lines of `benchctl workload export`")
    parser.add_argument("model", choices=sorted(PRESETS))
    parser.add_argument("--tbps", type=float, default=4.35, help="memory, TB/s (an H200)")
    parser.add_argument("--tflops", type=float, default=670.0, help="matrix products, TFLOP/s (an H200)")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.workload.read_text().splitlines()]
    requests = [line for line in lines if "max_tokens" in line]
    prompts = np.array([request["prompt_tokens"] for request in requests])
    outputs = np.array([request["max_tokens"] for request in requests])
    seconds, first = limit(PRESETS[arguments.model], prompts, outputs, arguments.tbps * 1e12, arguments.tflops * 1e12)
    print(f"{len(requests)} requests, {prompts.sum():,} prompt tokens, {outputs.sum():,} output tokens")
    print(f"longest output {outputs.max():,}, median {int(np.median(outputs)):,}")
    print(f"prompts {first:.2f} s, all {seconds:.2f} s: at most {outputs.sum() / seconds:,.0f} output tokens/s")


def limit(
    config: ModelConfig, prompts: np.ndarray, outputs: np.ndarray, bandwidth: float, flops: float
) -> tuple[float, float]:
    """Seconds until the last token, and those of them that the prompts take. `prompts` and `outputs` are tokens per
    request, `bandwidth` bytes/s, `flops` FLOP/s."""
    embedding = config.vocab_size * config.hidden_size
    weights = config.num_parameters - (0 if config.tie_word_embeddings else embedding)
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * BYTES
    first = 2 * float(prompts.sum()) * (weights - embedding) / flops
    seconds = first
    for step in range(1, int(outputs.max())):
        running = outputs > step
        products = max(weights * BYTES / bandwidth, 2 * int(running.sum()) * weights / flops)
        seconds += products + float((prompts[running] + step).sum()) * per_token / bandwidth
    return seconds, first


if __name__ == "__main__":
    main()
