"""From logits to tokens, on the device and for the whole batch at once.

The order is vLLM's: log-probabilities of the raw logits; `min_tokens` mask and logit bias; penalties; greedy rows take
the argmax; the others go through temperature, min_p, top_k, top_p and Gumbel-max with counter-based noise. A feature
that no row uses is None in the metadata and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.worker.noise import gumbel_noise

# Rows of up to this many candidates are cut out with `topk`; beyond, or where their mass falls short of top_p, the
# whole vocabulary is sorted. Sorting 49k logits takes milliseconds per row on a CPU.
_CANDIDATES = 1024


@dataclass(slots=True)
class RandomRows:
    """Rows that sample, R of S."""

    rows: torch.Tensor | None
    """int64 (R,); None when all rows do."""
    temperature: torch.Tensor
    """float32 (R,), > 0."""
    seeds: torch.Tensor
    """int64 (R,)."""
    top_k: torch.Tensor | None
    """int64 (R,), vocabulary size where off."""
    top_p: torch.Tensor | None
    """float32 (R,), 2 where off: a running sum of shares may round to 1 before its end."""
    min_p: torch.Tensor | None
    """float32 (R,)."""
    max_top_k: int
    """Largest `top_k`."""


@dataclass(slots=True)
class PenaltyRows:
    """Rows with penalties, P of S."""

    rows: torch.Tensor
    """int64 (P,)."""
    slots: torch.Tensor
    """int64 (P,): where `output_counts` and `prompt_mask` hold each row's tokens."""
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    """float32 (P, 1)."""
    output_counts: torch.Tensor
    """int32 (slots, vocab): how often each token was generated."""
    prompt_mask: torch.Tensor
    """bool (slots, vocab): tokens of the prompt."""


@dataclass(slots=True)
class SparseLogits:
    """Single logits of the (S, vocab) matrix."""

    index: torch.Tensor
    """int64 (n,): `row * vocab + token`."""
    values: torch.Tensor
    """float32 (n,): added; -inf masks."""


@dataclass(slots=True)
class SamplingMetadata:
    """What the S sampling rows of a step ask for."""

    random: RandomRows | None = None
    """None: all rows are greedy."""
    penalties: PenaltyRows | None = None
    bias: SparseLogits | None = None
    masked: SparseLogits | None = None
    """End tokens of rows that are below `min_tokens`."""

    @property
    def is_greedy(self) -> bool:
        """Every row takes the argmax of its raw logits."""
        return self.random is None and self.penalties is None and self.bias is None and self.masked is None


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row of logits (S, vocab), int64 (S,); the first of equal ones."""
    if logits.is_cuda:
        # One row takes ATen 38 us, as long as the whole projection of a layer. Imported late: Triton is for CUDA.
        from server.kernels.sampling import argmax

        return argmax(logits)
    return logits.argmax(dim=-1)


def sample(logits: torch.Tensor, metadata: SamplingMetadata, positions: torch.Tensor) -> torch.Tensor:
    """Token ids, int64 (S,), for logits (S, vocab); `logits` may be overwritten.

    `positions` (S,) counts each row's tokens so far: the position that the sampled token will take.
    """
    if metadata.bias is not None or metadata.masked is not None or metadata.penalties is not None:
        logits = logits.float()
        for sparse in (metadata.bias, metadata.masked):
            if sparse is not None:
                logits.view(-1).index_add_(0, sparse.index, sparse.values)
        if metadata.penalties is not None:
            apply_penalties(logits, metadata.penalties)
    random = metadata.random
    if random is None:
        token_ids = greedy(logits)
    elif random.rows is None:
        token_ids = _sample_random(logits, random, positions)
    else:
        token_ids = greedy(logits)
        chosen = _sample_random(logits.index_select(0, random.rows), random, positions.index_select(0, random.rows))
        token_ids.index_copy_(0, random.rows, chosen)
    if metadata.penalties is not None:
        penalties = metadata.penalties
        vocab = penalties.output_counts.shape[1]
        index = penalties.slots * vocab + token_ids.index_select(0, penalties.rows)
        penalties.output_counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
    return token_ids


def apply_penalties(logits: torch.Tensor, penalties: PenaltyRows) -> None:
    """Penalise tokens in place: repetition over prompt and output, frequency and presence over the output (OpenAI)."""
    own = logits.index_select(0, penalties.rows)
    counts = penalties.output_counts.index_select(0, penalties.slots)
    generated = counts > 0
    seen = generated | penalties.prompt_mask.index_select(0, penalties.slots)
    repetition = torch.where(seen, penalties.repetition, 1.0)
    own = torch.where(own > 0, own / repetition, own * repetition)
    own -= penalties.frequency * counts
    own -= penalties.presence * generated
    logits.index_copy_(0, penalties.rows, own)


def _sample_random(logits: torch.Tensor, random: RandomRows, positions: torch.Tensor) -> torch.Tensor:
    if logits.is_cuda and random.min_p is None:
        # One pass instead of thirty over (R, vocab), and no sort; the same noise. Imported late: Triton is for CUDA.
        from server.kernels import sampling as kernels

        return kernels.sample(logits, random.temperature, random.seeds, positions, random.top_k, random.top_p)
    scaled = logits.float() / random.temperature[:, None]
    if random.min_p is not None:
        floor = scaled.amax(dim=-1, keepdim=True) + random.min_p.log()[:, None]
        scaled = scaled.masked_fill_(scaled < floor, -torch.inf)
    if random.top_k is None and random.top_p is None:
        every = torch.arange(scaled.shape[1], device=scaled.device)
        return scaled.add_(gumbel_noise(random.seeds, positions, every)).argmax(dim=-1)
    values, token_ids = top_candidates(scaled, random)
    winner = (values + gumbel_noise(random.seeds, positions, token_ids)).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, winner).squeeze(1)


def top_candidates(scaled: torch.Tensor, random: RandomRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of each row in descending order: logits, -inf where top_k or top_p excludes them, and token ids.

    top_k comes first; top_p then keeps the smallest set of likeliest tokens whose share of what top_k left reaches p,
    at least one. Ties at the border are broken by position.
    """
    vocab = scaled.shape[1]
    if random.top_k is not None and random.max_top_k <= min(_CANDIDATES, vocab):
        count = random.max_top_k
    elif scaled.device.type == "cpu":
        count = min(_CANDIDATES, vocab)
    else:
        # Whether a short list is enough is known on the device only; asking would stall the host.
        count = vocab
    while True:
        if count < vocab:
            values, token_ids = scaled.topk(count, dim=-1)
        else:
            values, token_ids = scaled.sort(dim=-1, descending=True)
        rank = torch.arange(count, device=scaled.device)
        total = scaled.logsumexp(dim=-1, keepdim=True)
        if random.top_k is not None:
            cut = values.masked_fill(rank >= random.top_k[:, None], -torch.inf)
            total = torch.where(random.top_k[:, None] >= vocab, total, cut.logsumexp(dim=-1, keepdim=True))
            values = cut
        if random.top_p is None:
            enough = random.max_top_k <= count
        else:
            shares = (values - total).exp()
            before = shares.cumsum(dim=-1) - shares
            complete = before[:, -1] + shares[:, -1] >= random.top_p
            if random.top_k is not None:
                # Between the list's length and the vocabulary, a top_k leaves the total unknown.
                complete = (random.top_k <= count) | (complete & (random.top_k >= vocab))
            enough = count == vocab or bool(complete.all())
            values = values.masked_fill((before >= random.top_p[:, None]) & (rank > 0), -torch.inf)
        if enough:
            return values, token_ids
        count = vocab
