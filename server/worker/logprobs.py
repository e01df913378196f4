"""Log-probabilities of sampled and of prompt tokens, from raw logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.ipc.engine_to_api import TokenLogprobs


@dataclass(slots=True)
class LogprobTensors:
    """Of N positions; `top_*` hold the K likeliest tokens in descending order."""

    token_ids: torch.Tensor
    """int64 (N,)."""
    logprobs: torch.Tensor
    """float32 (N,)."""
    ranks: torch.Tensor
    """int64 (N,), 1 for the likeliest; equal tokens share the better rank."""
    top_ids: torch.Tensor
    """int64 (N, K)."""
    top_logprobs: torch.Tensor
    """float32 (N, K)."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """logits (N, vocab), token_ids (N,) -> log-probabilities of those tokens and of the `num_top` likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return LogprobTensors(token_ids, own.squeeze(1), ranks, top.indices, top.values)


def to_messages(tensors: tuple[torch.Tensor, ...], num_top: list[int]) -> list[TokenLogprobs]:
    """Messages from `LogprobTensors.tensors()` on the host; position i shows its `num_top[i]` likeliest tokens."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = (t.tolist() for t in tensors)
    return [
        TokenLogprobs([token_ids[i], *top_ids[i][:n]], [logprobs[i], *top_logprobs[i][:n]], ranks[i])
        for i, n in enumerate(num_top)
    ]
