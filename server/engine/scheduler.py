"""The token-budget scheduler.

Every step hands out a budget of tokens: first one token to each running request that generates, so that a long prompt
never stalls them; then prompt chunks of running requests; then waiting requests, in order of the policy. Out of blocks
=> the last running request in that order loses its blocks and is computed again later.

Asynchronous scheduling: `schedule` may be called while the result of the step before is still out. A token that is
being sampled exists (`Request.in_flight`) but is not known. What follows from that:

- a request whose known and in-flight tokens reach `max_tokens` or the context is not scheduled any more;
- one that turns out to have stopped may have one more step in flight: its result is dropped. Its blocks are freed at
  once all the same: the worker runs steps in order, so whoever gets a block next writes it later;
- a preempted request is admitted again only when all its tokens are known, since the worker must be told them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Literal

from server.engine.kv_cache_manager import KVCacheManager
from server.engine.queues import make_queue
from server.engine.request import Request, Status
from server.ipc.engine_to_api import EngineStats, FinishReason, RequestOutput
from server.ipc.engine_to_worker import NewRequest, ScheduleStep
from server.ipc.worker_to_engine import StepResult


class Scheduler:
    """Decides what the worker computes in each step, and what the results mean."""

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        long_prefill_token_threshold: int = 0,
        max_mixed_prefill_tokens: int | None = None,
    ) -> None:
        """`max_mixed_prefill_tokens`: most prompt tokens of a step in which somebody generates, so that a queue of
        long prompts cannot hold up the tokens of those who run; None: only the budget bounds them."""
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        # A request that had every block to itself could not go on beyond the pool.
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.policy = policy
        self.chunk_limit = long_prefill_token_threshold or token_budget
        self.mixed_prefill_limit = max_mixed_prefill_tokens or token_budget
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_queue(policy)
        self.num_preemptions = 0
        self.num_steps = 0
        self._dropped: list[str] = []
        """Requests that the worker holds and must forget with the next step."""
        self._in_flight: deque[int] = deque()
        self._has_parts = False
        """Whether the last step left a prompt in part."""

    @property
    def has_prompts(self) -> bool:
        """Whether there are prompt tokens for the next step."""
        return self._has_parts or len(self.waiting) > 0

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled whose results are still out."""
        return len(self._in_flight)

    def add(self, request: Request) -> RequestOutput | None:
        """Queue a request; returns its end if it can never run."""
        if not 0 < request.num_prompt < self.max_model_len:
            return RequestOutput(request.request_id, [], finish_reason="error")
        request.max_total_tokens = min(request.max_total_tokens, self.max_model_len)
        self.requests[request.request_id] = request
        self.waiting.push(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests at once, whatever they are doing; returns those that were there."""
        aborted = [r for r in map(self.requests.get, dict.fromkeys(request_ids)) if r is not None]
        for request in aborted:
            self._finish(request, "abort")
        if aborted:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        return aborted

    def schedule(self) -> ScheduleStep | None:
        """The next step; None when nothing can run now."""
        scheduled: dict[str, int] = {}
        grown: dict[str, list[int]] = {}
        preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled, grown)
        new_requests = [] if self.num_preemptions > preemptions else self._admit(budget, scheduled)
        if not scheduled:
            return None
        requests = self.requests
        self._has_parts = False
        for request_id, count in scheduled.items():
            request = requests[request_id]
            computed = request.num_computed = request.num_computed + count
            if computed == request.num_tokens:
                request.in_flight += 1
                request.num_tokens += 1
            else:
                self._has_parts = True
            if computed >= request.cache_at:
                self.kv.cache_blocks(request)
        self.num_steps += 1
        self._in_flight.append(self.num_steps)
        dropped, self._dropped = self._dropped, []
        return ScheduleStep(self.num_steps, new_requests, scheduled, grown, dropped)

    def _schedule_running(self, scheduled: dict[str, int], grown: dict[str, list[int]]) -> int:
        """Give each running request that generates its one token, then the others chunks; returns the budget left.

        The ones always fit the budget: nobody is admitted without a token of it, so no more run than it has.
        """
        others = []
        # Over a copy: whoever is preempted on the way leaves `running`.
        for request in tuple(self.running):
            if request.num_tokens >= request.max_total_tokens or request.status is not Status.RUNNING:
                continue
            end = request.num_computed + 1
            if end != request.num_tokens:
                others.append(request)
            elif end <= request.capacity or self._make_room(request, end, scheduled, grown):
                scheduled[request.request_id] = 1
        budget = self.token_budget - len(scheduled)
        if scheduled:
            budget = min(budget, self.mixed_prefill_limit)
        for request in others:
            if budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue
            count = self._chunk(request.num_tokens - request.num_computed, budget)
            if self._make_room(request, request.num_computed + count, scheduled, grown):
                scheduled[request.request_id] = count
                budget -= count
        return budget

    def _chunk(self, wanted: int, budget: int) -> int:
        """How many of the `wanted` tokens a request may have in this step."""
        return min(wanted, budget, self.chunk_limit if len(self.requests) > 1 else budget)

    def _make_room(
        self, request: Request, num_tokens: int, scheduled: dict[str, int], grown: dict[str, list[int]]
    ) -> bool:
        """Give a running request blocks for `num_tokens` tokens in all, taking them from the last in the policy's
        order; False when that was the request itself."""
        while self.kv.blocks_needed(request, num_tokens) > self.kv.pool.num_free:
            victim = self._victim()
            scheduled.pop(victim.request_id, None)
            grown.pop(victim.request_id, None)
            self._preempt(victim)
            if victim is request:
                return False
        if new := self.kv.grow(request, num_tokens):
            grown[request.request_id] = new
        return True

    def _admit(self, budget: int, scheduled: dict[str, int]) -> list[NewRequest]:
        """Take in waiting requests, in order, while budget, batch and pool have room for them.

        A request is let in when the pool could hold all its tokens beside all that the running ones have, not just
        its first chunk: else it would be preempted, and its chunks computed again, as soon as they met.
        """
        new_requests: list[NewRequest] = []
        reserved: int | None = None
        while budget > 0 and len(self.running) < self.max_num_seqs and self.kv.pool.num_free:
            request = self.waiting.peek()
            if request is None or request.in_flight:
                break
            prefix = self.kv.find_prefix(request)
            room = self.kv.room_after(prefix, request.num_tokens)
            if room < 0:
                break
            if reserved is None:
                reserved = sum(self.kv.blocks_needed(r, r.num_tokens) for r in self.running)
            if room < reserved:
                break
            computed = len(prefix) * self.kv.block_size
            count = self._chunk(request.num_tokens - computed, budget)
            self.waiting.pop()
            self.kv.admit(request, prefix, computed + count)
            reserved += self.kv.blocks_needed(request, request.num_tokens)
            if request.status is Status.WAITING:
                self.kv.count_lookup(request, prefix)
                request.scheduled_ns = time.monotonic_ns()
                request.num_cached = computed
            request.status = Status.RUNNING
            request.num_computed = computed
            self.running.append(request)
            scheduled[request.request_id] = count
            budget -= count
            new_requests.append(
                NewRequest(
                    request.request_id,
                    request.token_ids,
                    request.num_prompt,
                    request.sampling,
                    request.block_ids,
                    computed,
                )
            )
        return new_requests

    def _victim(self) -> Request:
        if self.policy == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda r: (r.priority, r.queued_ns))

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.kv.free(request)
        self.running.remove(request)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        self._dropped.append(request.request_id)
        self.waiting.push_preempted(request)

    def update(self, result: StepResult) -> list[tuple[int, RequestOutput]]:
        """Take in a step's result; returns (client index, output) per request that has something to say."""
        expected = self._in_flight.popleft()
        if result.step_id != expected:
            raise RuntimeError(f"the worker answered step {result.step_id}, step {expected} is due")
        for request_id, part in result.prompt_logprobs.items():
            request = self.requests.get(request_id)
            if request is None or request.first_output_sent:
                continue
            # A part that begins with the first token (which has none) starts over after a preemption.
            request.prompt_logprobs = part if part[0] is None else request.prompt_logprobs + part
        outputs = []
        finished = False
        for request_id, token in zip(result.request_ids, result.token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None:  # it ended while this step was in flight
                continue
            request.in_flight -= 1
            request.token_ids.append(token)
            output = RequestOutput(request_id, [token])
            if result.logprobs and (logprobs := result.logprobs.get(request_id)) is not None:
                output.logprobs = [logprobs]
            if not request.first_output_sent:
                request.first_output_sent = True
                output.num_cached_tokens = request.num_cached
                output.queued_ns = request.queued_ns
                output.scheduled_ns = request.scheduled_ns
                if request.sampling.prompt_logprobs is not None:
                    output.prompt_logprobs = request.prompt_logprobs
            if len(request.token_ids) >= request.max_total_tokens or token in request.stop_set:
                finished |= self._end_with(request, token, output)
            outputs.append((request.client_index, output))
        if finished:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        return outputs

    def _end_with(self, request: Request, token: int, output: RequestOutput) -> bool:
        """End a request if its newest token is the last, and say so in `output`."""
        if token in request.stop_set and request.num_output > request.sampling.min_tokens:
            output.finish_reason = "stop"
            if token in request.sampling.stop_token_ids:
                output.stop_token_id = token
        elif len(request.token_ids) >= request.max_total_tokens:
            output.finish_reason = "length"
        else:
            return False
        self._finish(request, output.finish_reason)
        return True

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The caller takes it out of `running`."""
        if request.status is Status.RUNNING:
            self.kv.cache_blocks(request)
            self.kv.free(request)
            self._dropped.append(request.request_id)
        else:
            self.waiting.discard(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv.pool.usage,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.kv.num_queries,
            prefix_cache_hits=self.kv.num_hits,
            num_steps=self.num_steps,
        )
