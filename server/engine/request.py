"""State of one request in the engine core."""

from __future__ import annotations

import enum

from server.ipc.api_to_engine import AddRequest
from server.ipc.engine_to_api import FinishReason, TokenLogprobs


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, with the tokens that it has generated as part of what must be computed."""
    FINISHED = "finished"


class Request:
    """A request from arrival to its last token.

    There is no prefill and no decode: `num_computed` runs after the number of tokens there are. With asynchronous
    scheduling a step may be scheduled while the one before is still sampling; `in_flight` counts such tokens, which
    exist (they have a position and a block) but are not known yet.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "cache_at",
        "capacity",
        "client_index",
        "finish_reason",
        "first_output_sent",
        "in_flight",
        "max_total_tokens",
        "num_cached",
        "num_cached_blocks",
        "num_computed",
        "num_prompt",
        "num_tokens",
        "priority",
        "prompt_logprobs",
        "queued_ns",
        "request_id",
        "sampling",
        "scheduled_ns",
        "status",
        "stop_set",
        "token_ids",
    )

    def __init__(self, message: AddRequest, queued_ns: int) -> None:
        self.request_id = message.request_id
        self.client_index = message.client_index
        self.priority = message.priority
        self.sampling = message.sampling
        self.token_ids = message.prompt_token_ids
        """Prompt and known output tokens."""
        self.num_prompt = len(message.prompt_token_ids)
        self.num_computed = 0
        """Tokens that are computed or scheduled to be."""
        self.in_flight = 0
        """Tokens that are being sampled."""
        self.num_tokens = self.num_prompt
        """All tokens that exist: `len(token_ids) + in_flight`."""
        self.max_total_tokens = self.num_prompt + self.sampling.max_tokens
        """Tokens at which the request ends; the scheduler lowers it to the context length."""
        self.block_ids: list[int] = []
        self.capacity = 0
        """Tokens that fit in `block_ids`."""
        self.cache_at = 0
        """Computed tokens from which on another block is full, and so worth indexing."""
        self.block_hashes: list[bytes] = []
        """Chained hashes of the full blocks of `token_ids`, as far as they were needed."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_cached = 0
        """Prompt tokens found in the prefix cache at the first admission."""
        self.num_cached_blocks = 0
        """Blocks of the table that are in the index of the prefix cache already."""
        self.queued_ns = queued_ns
        self.scheduled_ns = 0
        self.first_output_sent = False
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.stop_set = frozenset(self.sampling.stop_token_ids) | frozenset(self.sampling.eos_token_ids)

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt
