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
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        # A request that had every block to itself could not go on beyond the pool.
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.policy = policy
        self.chunk_limit = long_prefill_token_threshold or token_budget
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_queue(policy)
        self.num_preemptions = 0
        self.num_steps = 0
        self._dropped: list[str] = []
        """Requests that the worker holds and must forget with the next step."""
        self._in_flight: deque[int] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled whose results are still out."""
        return len(self._in_flight)

    def add(self, request: Request) -> RequestOutput | None:
        """Queue a request; returns its end if it can never run."""
        if request.num_prompt >= self.max_model_len:
            return RequestOutput(request.request_id, [], finish_reason="error")
        self.requests[request.request_id] = request
        self.waiting.push(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests at once, whatever they are doing; returns those that were there."""
        aborted = [r for r in map(self.requests.get, request_ids) if r is not None]
        for request in aborted:
            self._finish(request, "abort")
        if any(aborted):
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        return aborted

    def has_work(self) -> bool:
        """Whether a step could be scheduled now, or the worker must be told to forget somebody."""
        return bool(self.requests)

    def schedule(self) -> ScheduleStep | None:
        """The next step; None when nothing can run now."""
        scheduled: dict[str, int] = {}
        grown: dict[str, list[int]] = {}
        preemptions = self.num_preemptions
        budget = self._schedule_running(self.token_budget, scheduled, grown, decodes=True)
        budget = self._schedule_running(budget, scheduled, grown, decodes=False)
        new_requests = [] if self.num_preemptions > preemptions else self._admit(budget, scheduled)
        if not scheduled:
            return None
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            request.num_computed += count
            if request.num_computed == request.num_tokens:
                request.in_flight += 1
            self.kv.cache_blocks(request)
        self.num_steps += 1
        self._in_flight.append(self.num_steps)
        dropped, self._dropped = self._dropped, []
        return ScheduleStep(self.num_steps, new_requests, scheduled, grown, dropped)

    def _schedule_running(
        self, budget: int, scheduled: dict[str, int], grown: dict[str, list[int]], *, decodes: bool
    ) -> int:
        """Give running requests their one token (`decodes`) or a chunk (the others); returns the budget left."""
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            i += 1
            wanted = request.num_tokens - request.num_computed
            if (wanted == 1) is not decodes or wanted == 0 or self._is_complete(request):
                continue
            count = min(wanted, budget, self.chunk_limit)
            while self.kv.blocks_needed(request, request.num_computed + count) > self.kv.pool.num_free:
                victim = self._victim()
                budget += scheduled.pop(victim.request_id, 0)
                grown.pop(victim.request_id, None)
                self._preempt(victim)
                if victim is request:
                    break
            if request.status is not Status.RUNNING:
                i -= 1
                continue
            # A victim that stood before this request has moved it.
            if i > len(self.running) or self.running[i - 1] is not request:
                i = self.running.index(request) + 1
            if new := self.kv.grow(request, request.num_computed + count):
                grown[request.request_id] = new
            scheduled[request.request_id] = count
            budget -= count
        return budget

    def _admit(self, budget: int, scheduled: dict[str, int]) -> list[NewRequest]:
        new_requests = []
        while budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            if request is None or request.in_flight:
                break
            prefix = self.kv.find_prefix(request)
            computed = len(prefix) * self.kv.block_size
            count = min(request.num_tokens - computed, budget, self.chunk_limit)
            if not self.kv.can_admit(request, prefix, computed + count):
                break
            self.waiting.pop()
            self.kv.admit(request, prefix, computed + count)
            if request.status is Status.WAITING:
                self.kv.count_lookup(request, prefix)
                request.scheduled_ns = time.monotonic_ns()
                request.num_cached = computed
            request.status = Status.RUNNING
            request.num_computed = computed
            request.num_cached_blocks = len(prefix)
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

    def _is_complete(self, request: Request) -> bool:
        """Whether the tokens in flight are the last that the request may have."""
        return request.in_flight > 0 and (
            request.num_output + request.in_flight >= request.sampling.max_tokens
            or request.num_tokens >= self.max_model_len
        )

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
        if not request.first_output_sent:
            request.prompt_logprobs = []
        self._dropped.append(request.request_id)
        self.waiting.push_preempted(request)

    def update(self, result: StepResult) -> list[tuple[int, RequestOutput]]:
        """Take in a step's result; returns (client index, output) per request that has something to say."""
        expected = self._in_flight.popleft()
        if result.step_id != expected:
            raise RuntimeError(f"the worker answered step {result.step_id}, step {expected} is due")
        for request_id, part in result.prompt_logprobs.items():
            request = self.requests.get(request_id)
            if request is not None and not request.first_output_sent:
                request.prompt_logprobs += part
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
            if (reason := self._finish_reason(request, token)) is not None:
                output.finish_reason = reason
                if reason == "stop" and token in request.sampling.stop_token_ids:
                    output.stop_token_id = token
                self._finish(request, reason)
                finished = True
            outputs.append((request.client_index, output))
        if finished:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        return outputs

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_set and request.num_output > request.sampling.min_tokens:
            return "stop"
        if request.num_output >= request.sampling.max_tokens or len(request.token_ids) >= self.max_model_len:
            return "length"
        return None

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

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks and may cache what they compute from now."""
        self.kv.pool.reset_cache()
