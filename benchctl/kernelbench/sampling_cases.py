"""Cases of the sampler. Drawn tokens are checked for membership in the set that top-k and top-p leave."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchctl.kernelbench import reference
from benchctl.kernelbench.case import Case, Instance, Tensors

_TOP_K, _TOP_P, _TEMPERATURE = 50, 0.9, 0.8


def sampling_cases(device: torch.device, row_counts: list[int], *, small: bool) -> Iterator[Case]:
    vocab = 9001 if small else 128256
    for rows in row_counts:
        for kind in ("greedy", "gumbel", "top_k_top_p"):
            yield _case(device, kind, rows, vocab)


def _case(device: torch.device, kind: str, rows: int, vocab: int) -> Case:
    def build(seed: int) -> Instance:
        from server.kernels.sampling import argmax, sample

        generator = torch.Generator(device=device).manual_seed(seed)
        logits = torch.empty(rows, vocab, device=device).normal_(generator=generator) * 3
        if kind == "greedy":
            return Instance(lambda: (argmax(logits),), lambda: (logits.argmax(-1),))
        temperature = torch.full((rows,), _TEMPERATURE, device=device)
        seeds, positions = torch.arange(rows, device=device) + seed, torch.arange(rows, device=device)
        limited = kind == "top_k_top_p"
        top_k = torch.full((rows,), _TOP_K, dtype=torch.int32, device=device) if limited else None
        top_p = torch.full((rows,), _TOP_P, device=device) if limited else None
        kept = torch.stack(
            [reference.kept_tokens(row, _TEMPERATURE, _TOP_K if limited else 0, _TOP_P if limited else 1.0)
             for row in logits[: min(rows, 16)]]
        )  # fmt: skip

        def run() -> Tensors:
            tokens = sample(logits, temperature, seeds, positions, top_k, top_p)
            return (tokens, kept.gather(1, tokens[: kept.shape[0], None]))

        def expected() -> Tensors:
            # The token itself is random: only that it is one of those kept.
            tokens = sample(logits, temperature, seeds, positions, top_k, top_p)
            return (tokens, torch.ones(kept.shape[0], 1, dtype=torch.bool, device=device))

        return Instance(run, expected)

    return Case(f"sample/{kind}", f"{rows} x {vocab}", torch.float32, 4 * rows * vocab, 2 * rows * vocab, build)
