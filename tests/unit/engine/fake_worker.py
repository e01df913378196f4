"""A worker without a model that checks what it is told as strictly as a model would suffer from it.

The "key and value" of a token is a hash over all tokens up to it, as a real one depends on all of them. The next token
is computed from what is *found* in the blocks, so that a wrong block, a stale one or a missing one changes the output
even where no check sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from server.ipc.engine_to_api import TokenLogprobs
from server.ipc.engine_to_worker import NewRequest, ScheduleStep
from server.ipc.worker_to_engine import StepResult
from server.sampling_params import SamplingParams

VOCABULARY = 61
_MASK = (1 << 61) - 1


def chain(parent: int, token: int) -> int:
    """State after `token`, given the state before it."""
    return (parent * 6364136223846793005 + token * 1442695040888963407 + 12345) & _MASK


def next_token(states: list[int], seed: int | None) -> int:
    """The token that follows a sequence, from the states of all its tokens; equal sequences part with their seeds."""
    return (sum(state >> 17 for state in states) + (seed or 0)) % VOCABULARY


def states_of(tokens: list[int]) -> list[int]:
    states, state = [], 0
    for token in tokens:
        state = chain(state, token)
        states.append(state)
    return states


def quiet_run(prompt: list[int], sampling: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that has the machine to itself."""
    states = states_of(prompt)
    output: list[int] = []
    while True:
        token = next_token(states, sampling.seed)
        states.append(chain(states[-1], token))
        output.append(token)
        if token in (*sampling.stop_token_ids, *sampling.eos_token_ids) and len(output) > sampling.min_tokens:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= max_model_len:
            return output, "length"


@dataclass
class Row:
    """What the worker holds of a request."""

    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    blocks: list[int]
    computed: int
    states: list[int] = field(default_factory=list)


class FakeWorker:
    """Takes encoded `ScheduleStep`s in order, answers with encoded `StepResult`s."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, token_budget: int) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[str, Row] = {}
        self.num_computed = 0
        """Tokens computed, again after preemptions too."""

    def execute(self, data: bytes) -> bytes:
        """Run a step; AssertionError when it makes no sense."""
        step = msgspec.msgpack.decode(data, type=ScheduleStep)
        self._apply(step)
        assert step.scheduled, "an empty step"
        assert sum(step.scheduled.values()) <= self.token_budget
        result = StepResult(step.step_id, [], [], {}, {})
        for request_id, count in step.scheduled.items():
            self._run(request_id, count, result)
        return msgspec.msgpack.encode(result)

    def _apply(self, step: ScheduleStep) -> None:
        for request_id in step.dropped_request_ids:
            del self.rows[request_id]
        for new in step.new_requests:
            self._add(new)
            assert new.request_id in step.scheduled, "a new request must run at once"
        for request_id, blocks in step.new_block_ids.items():
            assert blocks
            assert request_id in step.scheduled
            self.rows[request_id].blocks += blocks
        assert len(self.rows) <= self.max_num_seqs

    def _add(self, new: NewRequest) -> None:
        assert new.request_id not in self.rows, "added twice"
        assert 0 <= new.num_computed_tokens < len(new.token_ids)
        assert len(set(new.block_ids)) == len(new.block_ids)
        row = Row(new.token_ids, new.num_prompt_tokens, new.sampling, new.block_ids, new.num_computed_tokens)
        row.states = states_of(row.tokens)
        self.rows[new.request_id] = row

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _run(self, request_id: str, count: int, result: StepResult) -> None:
        row = self.rows[request_id]
        end = row.computed + count
        assert count >= 1
        assert end <= len(row.tokens), "asked to compute a token that does not exist"
        assert end <= len(row.blocks) * self.block_size, "no block for a token"
        self._check_alone(request_id, row, end)
        for position in range(row.computed, end):
            self.slots[self._slot(row, position)] = row.states[position]
        found = [self.slots[self._slot(row, position)] for position in range(end)]
        assert found == row.states[:end], f"{request_id} reads what is not its own"
        self._prompt_logprobs(request_id, row, end, result)
        row.computed = end
        self.num_computed += count
        if end == len(row.tokens):
            token = next_token([state for state in found if state is not None], row.sampling.seed)
            result.request_ids.append(request_id)
            result.token_ids.append(token)
            row.tokens.append(token)
            row.states.append(chain(row.states[-1], token))

    def _check_alone(self, request_id: str, row: Row, end: int) -> None:
        """Nobody else may hold a block that is written."""
        written = set(row.blocks[row.computed // self.block_size : -(-end // self.block_size)])
        for other_id, other in self.rows.items():
            assert other_id == request_id or written.isdisjoint(other.blocks), f"{request_id} writes to {other_id}"

    def _prompt_logprobs(self, request_id: str, row: Row, end: int, result: StepResult) -> None:
        """As the real worker: the state of token p predicts p + 1; None goes before the first."""
        if row.sampling.prompt_logprobs is None or row.computed >= row.num_prompt:
            return
        part: list[TokenLogprobs | None] = [None] if row.computed == 0 else []
        part += [
            TokenLogprobs([row.tokens[p]], [-float(p)], 1)
            for p in range(row.computed + 1, min(end + 1, row.num_prompt))
        ]
        if part:
            result.prompt_logprobs[request_id] = part
