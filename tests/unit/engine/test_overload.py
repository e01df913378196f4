"""More arrivals than the engine can run, step by step: what being admitted is worth while the queue stays full.

Steps, not seconds: the time per output token is the steps between two tokens times their length, and how long a step
can be follows from what it may hold.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from server.engine.kv_cache_manager import KVCacheManager
from server.engine.request import Request, Status
from server.engine.scheduler import Scheduler
from server.ipc.api_to_engine import AddRequest
from server.ipc.worker_to_engine import StepResult
from server.sampling_params import SamplingParams

RUNNING = 8
QUEUE = 10 * RUNNING
TOKENS = 20
BUDGET = 64
MIXED = 16
BLOCK = 4
LONGEST = 30 + TOKENS


@dataclass
class Overload:
    """An engine whose queue never gets shorter than ten times what can run, and what is seen of its steps."""

    num_blocks: int
    depth: int
    random: random.Random = field(default_factory=lambda: random.Random(1))
    arrived: list[str] = field(default_factory=list)
    token_steps: dict[str, list[int]] = field(default_factory=dict)
    """Per request the steps that each of its tokens was sampled in."""
    preempted: dict[str, list[int]] = field(default_factory=dict)
    """Per request the steps at which it was put out."""
    mixed: list[int] = field(default_factory=list)
    """Prompt tokens of each step in which somebody generated."""

    def __post_init__(self) -> None:
        kv = KVCacheManager(self.num_blocks, BLOCK, False)
        self.scheduler = Scheduler(
            kv, max_num_seqs=RUNNING, token_budget=BUDGET, max_model_len=64, max_mixed_prefill_tokens=MIXED
        )
        self._out: list[tuple[int, list[str]]] = []

    def turn(self) -> None:
        """Arrivals, a step as soon as one may be in flight, and the oldest result."""
        while len(self.scheduler.waiting) < QUEUE:
            name = f"r{len(self.arrived)}"
            self.arrived.append(name)
            prompt = [1] * self.random.randrange(4, LONGEST - TOKENS)
            message = AddRequest(name, 0, prompt, SamplingParams(max_tokens=TOKENS), 0)
            assert self.scheduler.add(Request(message, len(self.arrived))) is None
        while self.scheduler.num_in_flight < self.depth and self._schedule():
            pass
        step_id, names = self._out.pop(0)
        self.scheduler.update(StepResult(step_id, names, [7] * len(names), {}, {}))

    def _schedule(self) -> bool:
        running = list(self.scheduler.running)
        generating = {r.request_id for r in running if r.num_tokens > r.num_prompt}
        requests = self.scheduler.requests
        tokens = {name: request.num_tokens for name, request in requests.items()}
        step = self.scheduler.schedule()
        if step is None:
            return False
        for request in running:
            if request.status is Status.PREEMPTED:
                self.preempted.setdefault(request.request_id, []).append(step.step_id)
        sampling = [name for name in step.scheduled if requests[name].num_tokens > tokens[name]]
        for name in sampling:
            self.token_steps.setdefault(name, []).append(step.step_id)
        if generating & step.scheduled.keys():
            # A prompt's last token alone costs as much as any token that is generated.
            self.mixed.append(
                sum(count for name, count in step.scheduled.items() if name not in generating and count > 1)
            )
        self._out.append((step.step_id, sampling))
        return True

    def finished(self) -> list[str]:
        return [name for name, steps in self.token_steps.items() if len(steps) == TOKENS]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_admitted_get_a_token_in_every_step(depth: int) -> None:
    overload = Overload(num_blocks=RUNNING * (LONGEST // BLOCK + 1), depth=depth)
    for _ in range(500):
        overload.turn()
    finished = overload.finished()
    assert len(finished) > 100
    for name in finished:
        steps = overload.token_steps[name]
        assert steps == list(range(steps[0], steps[0] + TOKENS)), f"{name} was held up"
    assert not overload.preempted, "who is admitted to a pool with room for all stays"
    assert max(overload.mixed) <= MIXED, "newcomers make no step longer than this"
    assert list(overload.token_steps) == overload.arrived[: len(overload.token_steps)], "first come, first served"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_newcomers_put_nobody_out_when_blocks_are_short(depth: int) -> None:
    """With blocks for less than half of them: only the last of those who run is ever put out, so whoever came first
    never is, and between two of its tokens a request waits for nobody who came after it."""
    overload = Overload(num_blocks=3 * (LONGEST // BLOCK + 1), depth=depth)
    order = {}
    for _ in range(1500):
        overload.turn()
        names = [r.request_id for r in overload.scheduler.running]
        order |= {name: overload.arrived.index(name) for name in names}
        assert [order[name] for name in names] == sorted(order[name] for name in names)
        waiting = overload.scheduler.waiting.peek()
        assert waiting is None or overload.arrived.index(waiting.request_id) > max(
            (order[name] for name in names), default=-1
        )
    finished = overload.finished()
    assert len(finished) > 50
    assert overload.preempted, "blocks were short"
    for name in finished:
        steps = overload.token_steps[name]
        gaps = [later for earlier, later in itertools.pairwise(steps) if later != earlier + 1]
        assert len(gaps) <= len(overload.preempted.get(name, [])), f"{name} was held up without being put out"
