"""Log-probabilities of prompt tokens, part by part as chunks of the prompt are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from server.ipc.engine_to_worker import NewRequest
from server.worker.input_batch import InputBatch, StepRows
from server.worker.logprobs import LogprobTensors, gather_logprobs

# Tokens whose logits are held at once: a chunk of 8192 tokens over a vocabulary of 128k would take 4 GiB in float32.
_TOKENS_AT_ONCE = 256


@dataclass(slots=True)
class PromptPart:
    """The part of one request's prompt log-probabilities that one step computed."""

    request_id: str
    first: bool
    """The part begins with the first prompt token, which has no log-probability."""
    num_top: int
    pieces: list[LogprobTensors]
    """Of consecutive prompt tokens, on the device."""


class PromptLogprobs:
    """Remembers which rows want them."""

    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}

    def add(self, row: int, request: NewRequest) -> None:
        if request.sampling.prompt_logprobs is not None:
            self._num_top[row] = request.sampling.prompt_logprobs

    def drop(self, row: int) -> None:
        self._num_top.pop(row, None)

    def compute(
        self,
        batch: InputBatch,
        step: StepRows,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptPart]:
        """Parts of all requests that want them and have prompt tokens in this step; hidden is (T, hidden)."""
        if not self._num_top:
            return []
        parts = []
        for i, row in enumerate(step.rows.tolist()):
            num_top = self._num_top.get(row)
            computed = int(batch.num_computed[row])
            if num_top is None or computed >= batch.num_prompt[row]:
                continue
            # The hidden state of token p predicts token p + 1.
            end = min(int(step.seq_lens[i]), int(batch.num_prompt[row]) - 1)
            targets = torch.from_numpy(batch.token_ids[row, computed + 1 : end + 1].astype("int64")).to(hidden.device)
            own = hidden[int(step.query_start_loc[i]) :][: len(targets)]
            pieces = [
                gather_logprobs(compute_logits(states), tokens, num_top)
                for states, tokens in zip(own.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True)
                if len(tokens)
            ]
            if pieces or computed == 0:
                parts.append(PromptPart(step.request_ids[i], computed == 0, num_top, pieces))
        return parts
