"""Random traffic through the scheduler and a worker that checks, with every invariant looked at on the way."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from server.engine.kv_cache_manager import KVCacheManager
from server.engine.request import Request, Status
from server.engine.scheduler import Scheduler
from server.ipc.api_to_engine import AddRequest
from server.ipc.engine_to_api import RequestOutput, TokenLogprobs
from server.ipc.engine_to_worker import ScheduleStep
from server.ipc.worker_to_engine import StepResult
from server.sampling_params import SamplingParams
from tests.unit.engine.fake_worker import VOCABULARY, FakeWorker, quiet_run


@dataclass(frozen=True)
class Setup:
    """Sizes of the simulated server and its traffic."""

    num_blocks: int = 24
    block_size: int = 4
    max_num_seqs: int = 6
    token_budget: int = 16
    max_model_len: int = 64
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True
    threshold: int = 0
    depth: int = 2
    arrivals: float = 0.3
    """Chance of an arrival per turn."""
    aborts: float = 0.03


@dataclass
class Seen:
    """What a client has seen of its request."""

    message: AddRequest
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Simulation:
    """A server without processes. `turn()` is one event; `drain()` runs until nobody is left."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.rng = random.Random(seed)
        self.kv = KVCacheManager(setup.num_blocks, setup.block_size, setup.prefix_caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=setup.max_num_seqs,
            token_budget=setup.token_budget,
            max_model_len=setup.max_model_len,
            policy=setup.policy,
            long_prefill_token_threshold=setup.threshold,
            max_mixed_prefill_tokens=setup.token_budget // 2 if seed % 3 == 0 else None,
        )
        self.worker = FakeWorker(setup.num_blocks, setup.block_size, setup.max_num_seqs, setup.token_budget)
        self.seen: dict[str, Seen] = {}
        self.sent: deque[bytes] = deque()
        self.num_aborted = 0
        self._families = [self._tokens(24) for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def arrive(self) -> str:
        """A request: half of them continue one of a few common beginnings."""
        rng, longest = self.rng, self.scheduler.max_model_len - 1
        prompt = self._tokens(rng.choice([1, 3, 8, 20, 60]))
        if rng.random() < 0.5:
            prompt = rng.choice(self._families)[: rng.randrange(1, 25)] + prompt[: rng.randrange(4)]
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 20, 100]),
            min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=rng.choice([(), (7,), (7, 8, 9)]),
            eos_token_ids=rng.choice([(), (3,)]),
            seed=rng.choice([None, 1, 2]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        return self.add(prompt[:longest], sampling, priority=rng.choice([0, 0, 1, 5]))

    def add(self, prompt: list[int], sampling: SamplingParams, priority: int = 0) -> str:
        request_id = f"r{len(self.seen)}"
        message = AddRequest(request_id, 0, prompt, sampling, 0, priority)
        self.seen[request_id] = Seen(message)
        copied = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest)
        assert self.scheduler.add(Request(copied, queued_ns=len(self.seen))) is None
        return request_id

    def abort(self, request_ids: list[str]) -> None:
        for request in self.scheduler.abort(request_ids):
            assert self.seen[request.request_id].finish_reason is None
            self.seen[request.request_id].finish_reason = "abort"
            self.num_aborted += 1

    def supply(self) -> None:
        """Schedule as many steps as may be in flight."""
        while self.scheduler.num_in_flight < self.setup.depth and self.scheduler.requests:
            preemptions = self.scheduler.num_preemptions
            step = self.scheduler.schedule()
            if step is None:
                assert self.scheduler.num_in_flight, "requests are there, nothing is in flight and nothing can run"
                return
            self._check_fair(step, preempted=self.scheduler.num_preemptions > preemptions)
            self.sent.append(msgspec.msgpack.encode(step))

    def _check_fair(self, step: ScheduleStep, *, preempted: bool) -> None:
        """Whoever generates gets a token in every step, and a step with nothing in flight before it is never idle."""
        for request in self.scheduler.running:
            if request.in_flight or request.num_output:
                complete = request.num_tokens >= request.max_total_tokens and request.request_id not in step.scheduled
                assert request.request_id in step.scheduled or complete or preempted
        if self.setup.threshold and len(self.scheduler.requests) > 1:
            assert max(step.scheduled.values()) <= self.setup.threshold

    def result(self) -> None:
        """Let the worker run its oldest step and take in the result."""
        data = self.worker.execute(self.sent.popleft())
        for client_index, output in self.scheduler.update(msgspec.msgpack.decode(data, type=StepResult)):
            assert client_index == 0
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        seen = self.seen[output.request_id]
        assert seen.finish_reason is None, "output after the end"
        if not seen.tokens:
            assert output.num_cached_tokens < len(seen.message.prompt_token_ids)
            seen.prompt_logprobs = output.prompt_logprobs
        else:
            assert output.prompt_logprobs is None
        seen.tokens += output.new_token_ids
        seen.finish_reason = output.finish_reason
        if output.stop_token_id is not None:
            assert output.finish_reason == "stop"
            assert output.stop_token_id == seen.tokens[-1]

    def turn(self) -> None:
        rng = self.rng
        while rng.random() < self.setup.arrivals:
            self.arrive()
        if rng.random() < self.setup.aborts and self.scheduler.requests:
            victims = [rng.choice(list(self.scheduler.requests)) for _ in range(rng.randrange(1, 4))]
            self.abort([*victims, "unknown"])
        self.check()
        self.supply()
        self.check()
        if self.sent:
            self.result()
            self.check()

    def drain(self) -> None:
        """Until every request has ended; then look at what is left and at all outputs."""
        for _ in range(100_000):
            if not self.scheduler.requests and not self.sent:
                break
            self.supply()
            if self.sent:
                self.result()
        self.check()
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert len(self.scheduler.waiting) == 0
        assert self.kv.pool.num_free == self.setup.num_blocks, "blocks leaked"
        assert self.kv.pool.usage == 0
        self.check_outputs()

    def check_outputs(self) -> None:
        """Every request has what it would have had alone."""
        for seen in self.seen.values():
            message = seen.message
            tokens, reason = quiet_run(message.prompt_token_ids, message.sampling, self.scheduler.max_model_len)
            assert seen.finish_reason in (reason, "abort")
            assert seen.tokens == tokens[: len(seen.tokens)]
            assert seen.finish_reason == "abort" or len(seen.tokens) == len(tokens)
            if seen.tokens and message.sampling.prompt_logprobs is not None:
                assert seen.prompt_logprobs is not None
                assert seen.prompt_logprobs[0] is None
                found = [entry.token_ids[0] for entry in seen.prompt_logprobs[1:] if entry is not None]
                assert found == message.prompt_token_ids[1:]

    def check(self) -> None:
        """Invariants that hold between any two calls."""
        scheduler, pool = self.scheduler, self.kv.pool
        assert len(scheduler.running) <= self.setup.max_num_seqs
        assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
        held = Counter(block for request in scheduler.running for block in request.block_ids)
        assert pool.references == [held[block] for block in range(self.setup.num_blocks)]
        assert set(pool._free) == {b for b in range(self.setup.num_blocks) if not held[b]}
        assert pool._cached == {digest: b for b, digest in enumerate(pool._hash_of) if digest is not None}
        assert scheduler.stats().num_waiting == len(scheduler.waiting)
        for request in scheduler.requests.values():
            running = request.status is Status.RUNNING
            assert running == (request in scheduler.running)
            assert request.num_tokens == len(request.token_ids) + request.in_flight <= request.max_total_tokens
            assert request.in_flight <= scheduler.num_in_flight
            assert request.num_computed <= request.capacity == len(request.block_ids) * self.setup.block_size
            assert running or not request.block_ids
