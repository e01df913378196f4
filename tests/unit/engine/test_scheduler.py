"""The scheduler's decisions, one at a time."""

from __future__ import annotations

from typing import Any

import pytest

from server.engine.kv_cache_manager import KVCacheManager
from server.engine.request import Request, Status
from server.engine.scheduler import Scheduler
from server.ipc.api_to_engine import AddRequest
from server.ipc.engine_to_api import RequestOutput, TokenLogprobs
from server.ipc.engine_to_worker import ScheduleStep
from server.ipc.worker_to_engine import StepResult
from server.sampling_params import SamplingParams


def make_scheduler(num_blocks: int = 64, block_size: int = 4, **options: Any) -> Scheduler:
    sizes = {"max_num_seqs": 8, "token_budget": 16, "max_model_len": 256} | options
    caching = sizes.pop("prefix_caching", True)
    return Scheduler(KVCacheManager(num_blocks, block_size, bool(caching)), **sizes)


def add(
    scheduler: Scheduler, name: str, prompt: int | list[int], priority: int = 0, **sampling: Any
) -> RequestOutput | None:
    tokens = [ord(name[0]) * 100 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(**({"max_tokens": 100} | sampling))
    return scheduler.add(Request(AddRequest(name, 0, tokens, params, 0, priority), len(scheduler.requests)))


def schedule(scheduler: Scheduler) -> ScheduleStep:
    step = scheduler.schedule()
    assert step is not None
    return step


def answer(
    scheduler: Scheduler, step: ScheduleStep, tokens: dict[str, int], prompt_logprobs: Any = None
) -> dict[str, RequestOutput]:
    result = StepResult(step.step_id, list(tokens), list(tokens.values()), {}, prompt_logprobs or {})
    return {output.request_id: output for _, output in scheduler.update(result)}


def test_decodes_come_first_then_chunks_then_new_requests() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    answer(scheduler, schedule(scheduler), {"a": 1})
    add(scheduler, "long", 40)
    add(scheduler, "b", 3)
    step = schedule(scheduler)
    assert step.scheduled == {"a": 1, "long": 15}
    answer(scheduler, step, {"a": 1})
    assert schedule(scheduler).scheduled == {"a": 1, "long": 15}, "who came later waits for the budget"


def test_a_threshold_leaves_budget_for_those_behind_a_long_prompt() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=6)
    add(scheduler, "long", 40)
    assert schedule(scheduler).scheduled == {"long": 16}, "alone it may have everything"
    add(scheduler, "b", 3)
    assert schedule(scheduler).scheduled == {"long": 6, "b": 3}


def test_prompts_get_less_of_a_step_while_others_generate() -> None:
    scheduler = make_scheduler(max_mixed_prefill_tokens=5)
    add(scheduler, "long", 12)
    step = schedule(scheduler)
    assert step.scheduled == {"long": 12}, "nobody generates: the whole budget"
    answer(scheduler, step, {"long": 1})
    add(scheduler, "b", 7)
    add(scheduler, "c", 3)
    step = schedule(scheduler)
    assert step.scheduled == {"long": 1, "b": 5}
    answer(scheduler, step, {"long": 1})
    assert schedule(scheduler).scheduled == {"long": 1, "b": 2, "c": 3}


def test_a_finished_request_leaves_its_prefix() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [1, 2, 3, 4, 5, 6, 7], max_tokens=2)
    first, second = schedule(scheduler), schedule(scheduler)
    answer(scheduler, first, {"a": 8})
    outputs = answer(scheduler, second, {"a": 9})
    assert outputs["a"].finish_reason == "length"
    add(scheduler, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    step = schedule(scheduler)
    assert step.new_requests[0].num_computed_tokens == 8, "the second block was filled by the output"
    assert step.dropped_request_ids == ["a"]
    assert answer(scheduler, step, {"b": 1})["b"].num_cached_tokens == 8


def test_the_newest_is_preempted_and_comes_back_first_with_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    add(scheduler, "a", 7)
    add(scheduler, "b", 7)
    answer(scheduler, schedule(scheduler), {"a": 1, "b": 2})
    answer(scheduler, schedule(scheduler), {"a": 3, "b": 4})
    add(scheduler, "c", 1)
    step = schedule(scheduler)
    assert (step.scheduled, step.dropped_request_ids) == ({"a": 1}, ["b"])
    assert scheduler.num_preemptions == 1
    assert not step.new_requests, "nobody is let in while others are put out"
    answer(scheduler, step, {"a": 5})
    assert scheduler.waiting.peek() is scheduler.requests["b"]
    scheduler.abort(["a"])
    step = schedule(scheduler)
    assert [new.request_id for new in step.new_requests] == ["b", "c"]
    assert step.new_requests[0].token_ids[-2:] == [2, 4]
    assert step.new_requests[0].num_prompt_tokens == 7


def test_priority_puts_out_the_least_important() -> None:
    scheduler = make_scheduler(num_blocks=4, policy="priority")
    add(scheduler, "low", 7, priority=5)
    add(scheduler, "high", 7, priority=1)
    step = schedule(scheduler)
    assert list(step.scheduled) == ["high", "low"]
    answer(scheduler, step, {"high": 1, "low": 1})
    answer(scheduler, schedule(scheduler), {"high": 1, "low": 1})
    step = schedule(scheduler)
    assert list(step.scheduled) == ["high"]
    assert scheduler.requests["low"].status is Status.PREEMPTED


def test_a_prompt_is_let_in_when_all_of_it_fits() -> None:
    scheduler = make_scheduler(num_blocks=10, prefix_caching=False)
    add(scheduler, "a", 20)
    step = schedule(scheduler)
    add(scheduler, "big", 24)
    answer(scheduler, step, {})
    step = schedule(scheduler)
    assert step.scheduled == {"a": 4}, "5 blocks are free, 6 are wanted: chunks would be computed in vain"
    scheduler.abort(["a"])
    answer(scheduler, step, {})
    assert schedule(scheduler).scheduled == {"big": 16}


def test_chunks_to_come_of_the_running_count_as_taken() -> None:
    scheduler = make_scheduler(num_blocks=10, prefix_caching=False, long_prefill_token_threshold=8)
    add(scheduler, "a", 24)
    add(scheduler, "b", 24)
    assert schedule(scheduler).scheduled == {"a": 8}


@pytest.mark.parametrize("prompt", [0, 256, 300])
def test_what_can_never_run_is_refused(prompt: int) -> None:
    scheduler = make_scheduler()
    refusal = add(scheduler, "a", prompt)
    assert refusal is not None
    assert refusal.finish_reason == "error"
    assert not scheduler.requests
    assert scheduler.schedule() is None


def test_the_context_is_no_longer_than_the_pool() -> None:
    scheduler = make_scheduler(num_blocks=3)
    assert scheduler.max_model_len == 12
    assert add(scheduler, "a", 12) is not None
    assert add(scheduler, "b", 11) is None
    outputs = answer(scheduler, schedule(scheduler), {"b": 1})
    assert outputs["b"].finish_reason == "length"


def test_aborting_twice_in_one_message_is_once() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    schedule(scheduler)
    assert [r.request_id for r in scheduler.abort(["a", "a", "nobody"])] == ["a"]
    assert scheduler.abort(["a"]) == []
    assert scheduler.kv.pool.num_free == 64


def test_a_step_in_flight_of_an_ended_request_is_ignored() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, stop_token_ids=(9,))
    first, second = schedule(scheduler), schedule(scheduler)
    assert second.scheduled == {"a": 1}
    outputs = answer(scheduler, first, {"a": 9})
    assert (outputs["a"].finish_reason, outputs["a"].stop_token_id) == ("stop", 9)
    assert answer(scheduler, second, {"a": 5}) == {}
    assert scheduler.stats().kv_cache_usage == 0


def test_no_step_is_wasted_on_a_request_whose_last_token_is_in_flight() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_tokens=1)
    step = schedule(scheduler)
    assert scheduler.schedule() is None
    assert answer(scheduler, step, {"a": 5})["a"].finish_reason == "length"


def test_eos_has_no_stop_token_id_and_min_tokens_holds_it_back() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, eos_token_ids=(2,), min_tokens=1)
    assert answer(scheduler, schedule(scheduler), {"a": 2})["a"].finish_reason is None
    output = answer(scheduler, schedule(scheduler), {"a": 2})["a"]
    assert (output.finish_reason, output.stop_token_id) == ("stop", None)


def test_prompt_logprobs_are_whole_when_a_preemption_came_between() -> None:
    def part(*tokens: int) -> list[TokenLogprobs | None]:
        return [TokenLogprobs([token], [-1.0], 1) for token in tokens]

    scheduler = make_scheduler(num_blocks=8, token_budget=8)
    add(scheduler, "a", 3)
    answer(scheduler, schedule(scheduler), {"a": 1})
    add(scheduler, "b", 10, prompt_logprobs=0)
    step = schedule(scheduler)
    assert step.scheduled == {"a": 1, "b": 7}
    # While the step runs, b loses its blocks; then it starts over.
    scheduler._preempt(scheduler.requests["b"])
    answer(scheduler, step, {"a": 1}, {"b": [None, *part(1, 2, 3, 4, 5, 6, 7)]})
    step = schedule(scheduler)
    assert step.new_requests[0].num_computed_tokens == 0
    answer(scheduler, step, {"a": 1}, {"b": [None, *part(1, 2, 3, 4, 5, 6, 7)]})
    step = schedule(scheduler)
    # The last chunk is in flight when b is preempted again: its token comes all the same.
    scheduler._preempt(scheduler.requests["b"])
    output = answer(scheduler, step, {"a": 1, "b": 5}, {"b": part(8, 9)})["b"]
    assert output.prompt_logprobs == [None, *part(1, 2, 3, 4, 5, 6, 7, 8, 9)]


def test_an_answer_to_another_step_is_an_error() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    schedule(scheduler)
    with pytest.raises(RuntimeError, match="answered step 7, step 1 is due"):
        scheduler.update(StepResult(7, [], [], {}, {}))
