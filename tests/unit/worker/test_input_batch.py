"""The persistent batch against a naive rebuild from scratch, under random diffs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.ipc.engine_to_worker import NewRequest, ScheduleStep
from server.sampling_params import SamplingParams
from server.worker.input_batch import InputBatch

BLOCK = 4
MAX_LEN = 64
MAX_SEQS = 5
PARAMS = SamplingParams(max_tokens=8)


@dataclass
class Naive:
    """One request as the engine sees it."""

    tokens: list[int]
    """Known ids; None-like -1 for a token that was sampled by the worker."""
    num_prompt: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_diffs_equal_naive_rebuild(data: st.DataObject) -> None:
    batch = InputBatch(MAX_SEQS, MAX_LEN, BLOCK)
    live: dict[str, Naive] = {}
    free = list(range(100))
    next_id = 0
    for step_id in range(data.draw(st.integers(1, 12))):
        dropped = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)) if live else []
        for name in dropped:
            free.extend(live.pop(name).blocks)
        new: list[NewRequest] = []
        for _ in range(data.draw(st.integers(0, MAX_SEQS - len(live)))):
            prompt = data.draw(st.integers(1, 12))
            tokens = data.draw(st.lists(st.integers(0, 999), min_size=prompt, max_size=20))
            cached = data.draw(st.integers(0, (len(tokens) - 1) // BLOCK)) * BLOCK
            name, next_id = f"r{next_id}", next_id + 1
            live[name] = Naive(list(tokens), prompt, cached)
            new.append(NewRequest(name, list(tokens), prompt, PARAMS, [], cached))
        scheduled: dict[str, int] = {}
        new_blocks: dict[str, list[int]] = {}
        for name in data.draw(st.permutations(sorted(live))):
            request = live[name]
            fresh = next((n for n in new if n.request_id == name), None)
            room = min(len(request.tokens), MAX_LEN) - request.computed
            count = data.draw(st.integers(0, room))
            needed = -(-(request.computed + max(count, 1)) // BLOCK) - len(request.blocks)
            added = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(max(needed, 0))]
            request.blocks += added
            if fresh is not None:
                fresh.block_ids = list(request.blocks)
            elif added:
                new_blocks[name] = added
            if count:
                scheduled[name] = count
        batch.apply(ScheduleStep(step_id, new, scheduled, new_blocks, dropped))
        assert len(batch) == len(live)
        if not scheduled:
            continue

        step = batch.step_rows(ScheduleStep(step_id, [], scheduled, {}, []))
        slots = batch.slots(step)
        assert step.request_ids == list(scheduled)
        row = 0
        for i, (name, count) in enumerate(scheduled.items()):
            request = live[name]
            positions = list(range(request.computed, request.computed + count))
            assert list(step.query_start_loc[i : i + 2]) == [row, row + count]
            assert list(step.positions[row : row + count]) == positions
            assert list(step.token_sequence[row : row + count]) == [i] * count
            assert list(slots[row : row + count]) == [request.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
            assert step.seq_lens[i] == request.computed + count
            assert step.samples[i] == (request.computed + count == len(request.tokens))
            own_row = batch.row_of(name)
            assert step.rows[i] == own_row
            assert list(batch.block_table[own_row, : len(request.blocks)]) == request.blocks
            for position in positions:
                known = request.tokens[position] >= 0
                assert known == (position < batch.num_known[own_row])
                if known:
                    assert batch.token_ids[own_row, position] == request.tokens[position]
            row += count
        batch.advance(step)
        for i, (name, count) in enumerate(scheduled.items()):
            live[name].computed += count
            if step.samples[i] and len(live[name].tokens) < MAX_LEN:
                live[name].tokens.append(-1)
            elif step.samples[i]:
                free.extend(live.pop(name).blocks)
                batch.drop(name)


def test_refuses_what_cannot_be() -> None:
    batch = InputBatch(1, 8, BLOCK)
    batch.add(NewRequest("a", [1, 2], 2, PARAMS, [0], 0))
    with pytest.raises(RuntimeError, match="in the batch already"):
        batch.add(NewRequest("a", [1], 1, PARAMS, [], 0))
    with pytest.raises(RuntimeError, match="rows are taken"):
        batch.add(NewRequest("b", [1], 1, PARAMS, [], 0))
    with pytest.raises(RuntimeError, match="at most 2"):
        batch.append_blocks(batch.row_of("a"), [1, 2])
    assert batch.drop("nobody") is None
    assert batch.drop("a") == 0
    assert "a" not in batch
    assert np.array_equal(batch.num_tokens, [2])
