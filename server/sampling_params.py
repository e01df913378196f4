"""Sampling parameters of one request, as they travel from the API process to the worker."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when it ends.

    Values are validated by the API process (`server.api.protocol`); the engine and the worker trust them.
    Stop *strings* are not here: they need text, so the API process applies them and aborts the request.
    """

    max_tokens: int
    """Upper bound on generated tokens, already clipped to the room that the context leaves; >= 1."""
    min_tokens: int = 0
    """Until this many tokens are generated, EOS and `stop_token_ids` are masked out."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, without EOS (see `eos_token_ids`)."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end tokens; empty when the request says `ignore_eos`."""
    logprobs: int | None = None
    """None: no log-probabilities. k >= 0: that of the sampled token and the k likeliest, per generated token."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens (`echo` with `logprobs`); switches prefix-cache reads off for the request."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
