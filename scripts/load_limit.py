"""What a GPU can give at most for the requests of a workload: tokens per second of a burst, or TTFT of random arrivals.

    benchctl workload export sharegpt-like:num_requests=512,prompt_format=ids -o burst.jsonl
    python scripts/load_limit.py burst.jsonl llama-3.1-8b
    python scripts/load_limit.py burst.jsonl llama-3.1-8b --rate 16

Prompts cost their FLOPs once. A step gives one token to each request that is not through, and takes as long as the
larger of reading the weights and multiplying by them, and as reading the keys and values of all contexts (the roofline
model of Williams, Waterman and Patterson, 2009). No kernel, launch, scheduler or network is as fast.

Burst: an upper bound. With few long answers it is far below that of equal ones, as the last steps read all weights for
the few that are left.

Poisson arrivals (--rate): TTFT of a server without any cost of its own, which takes all prompts that wait into its next
step; a step that runs is not broken off.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.models.config import ModelConfig
from server.models.registry import PRESETS
from workloads.arrivals import build_schedule

BYTES = 2  # of an element: bfloat16


@dataclass(frozen=True)
class Card:
    """A model on a GPU that reaches `bandwidth` bytes/s and `flops` FLOP/s."""

    config: ModelConfig
    bandwidth: float
    flops: float

    @property
    def weights(self) -> int:
        """Parameters that a step reads: all but the embedding, of which it looks up rows."""
        config = self.config
        return config.num_parameters - (0 if config.tie_word_embeddings else self.head)

    @property
    def head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def step_s(self, contexts: np.ndarray, prompt_tokens: float) -> float:
        """Seconds of a step: a token for each of `contexts` (tokens of each running request), and prompts."""
        products = 2 * (len(contexts) * self.weights + prompt_tokens * (self.weights - self.head)) / self.flops
        per_token = self.config.num_layers * 2 * self.config.num_kv_heads * self.config.head_dim * BYTES
        return max(self.weights * BYTES / self.bandwidth, products) + float(contexts.sum()) * per_token / self.bandwidth

    def prompts_s(self, tokens: float) -> float:
        return 2 * tokens * (self.weights - self.head) / self.flops


def burst_s(card: Card, prompts: np.ndarray, outputs: np.ndarray) -> tuple[float, float]:
    """Seconds until the last token, and those of them that the prompts take. Tokens per request."""
    first = seconds = card.prompts_s(float(prompts.sum()))
    for step in range(1, int(outputs.max())):
        seconds += card.step_s(prompts[outputs > step] + step, 0)
    return seconds, first


def ttft_s(card: Card, prompts: np.ndarray, outputs: np.ndarray, arrivals_s: np.ndarray) -> np.ndarray:
    """TTFT of each request in seconds; tokens per request, `arrivals_s` not falling."""
    contexts, left = np.zeros(0), np.zeros(0)
    found = np.zeros(len(prompts))
    now, arrived = 0.0, 0
    while arrived < len(prompts) or len(left):
        if not len(left):
            now = max(now, arrivals_s[arrived])
        new = slice(arrived, int(np.searchsorted(arrivals_s, now, side="right")))
        arrived = new.stop
        now += card.step_s(contexts, float(prompts[new].sum()))
        found[new] = now - arrivals_s[new]
        contexts = np.concatenate((contexts, prompts[new])) + 1
        left = np.concatenate((left, outputs[new])) - 1
        contexts, left = contexts[left > 0], left[left > 0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="JSON lines of `benchctl workload export`")
    parser.add_argument("model", choices=sorted(PRESETS))
    parser.add_argument("--tbps", type=float, default=4.35, help="memory, TB/s (an H200)")
    parser.add_argument("--tflops", type=float, default=670.0, help="matrix products, TFLOP/s (an H200)")
    parser.add_argument("--rate", type=float, help="Poisson arrivals, requests/s, instead of a burst")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.workload.read_text().splitlines()]
    requests = [line for line in lines if "max_tokens" in line]
    prompts = np.array([request["prompt_tokens"] for request in requests])
    outputs = np.array([request["max_tokens"] for request in requests])
    card = Card(PRESETS[arguments.model], arguments.tbps * 1e12, arguments.tflops * 1e12)
    print(f"{len(requests)} requests, {prompts.sum():,} prompt tokens, {outputs.sum():,} output tokens")
    print(f"longest prompt {prompts.max():,} and output {outputs.max():,}, median {int(np.median(outputs)):,}")
    if arguments.rate is None:
        seconds, first = burst_s(card, prompts, outputs)
        print(f"prompts {first:.2f} s, all {seconds:.2f} s: at most {outputs.sum() / seconds:,.0f} output tokens/s")
        return
    schedule = build_schedule({"name": "poisson", "rate": arguments.rate}, len(requests), arguments.seed)
    found = ttft_s(card, prompts, outputs, np.asarray(schedule.times_s)) * 1e3
    p50, p99 = np.percentile(found, (50, 99))
    print(f"TTFT at {arguments.rate:g} requests/s: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {found.max():.1f} ms")


if __name__ == "__main__":
    main()
