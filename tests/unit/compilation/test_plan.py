"""Plans that come from disk are checked before anything runs."""

from __future__ import annotations

import msgspec
import pytest

from server.compilation.capture import capture
from server.compilation.pieces import relocate
from server.compilation.plan import AttentionStep, Operand, PieceStep, Plan
from server.compilation.split import fingerprint_piece, split
from tests.unit.compilation.conftest import Compiled
from tests.unit.compilation.models import CPU, make_model


def plan_of(steps: list[PieceStep | AttentionStep], output: Operand, slots: int = 2) -> Plan:
    return Plan(num_pieces=1, num_slots=slots, steps=steps, output=output, fingerprints=["x"])


IDS, SLOT = Operand(input="input_ids"), Operand(slot=0)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of([PieceStep(0, [SLOT], [0])], SLOT), "reads slot 0 before it is filled"),
        (plan_of([PieceStep(1, [IDS], [0])], SLOT), "calls piece 1 of 1"),
        (plan_of([PieceStep(0, [IDS], [5])], Operand(slot=5)), "slots beyond 2 are used"),
        (plan_of([PieceStep(0, [Operand()], [0])], SLOT), "must be a slot, a weight or an input"),
        (plan_of([PieceStep(0, [Operand(slot=0, weight="w")], [0])], SLOT), "must be a slot, a weight or an input"),
        (plan_of([PieceStep(0, [Operand(input="prompt")], [0])], SLOT), "reads unknown input 'prompt'"),
        (plan_of([PieceStep(0, [IDS], [0])], Operand(slot=1)), "reads slot 1 before it is filled"),
        (plan_of([AttentionStep("a", IDS, IDS, IDS, SLOT)], IDS), "reads slot 0 before it is filled"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.check()


def test_plans_survive_json(compiled: Compiled) -> None:
    plan = compiled.compiler.compiled.plan
    plan.check()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"num_pieces": 1, "steps": "none"}', type=Plan)


def test_pieces_are_told_apart_by_what_they_compute() -> None:
    pieces = split(capture(make_model().model, 7, CPU)).pieces
    again = split(capture(make_model().model, 9, CPU)).pieces
    fingerprints = [fingerprint_piece(piece) for piece in pieces]
    assert len(set(fingerprints)) == 3
    assert fingerprints == [fingerprint_piece(piece) for piece in again]


def test_kernels_look_for_benchmarks_where_they_are_now() -> None:
    assert relocate("/run/a/inductor/ab/cabc.py", "/run/b/inductor") == "/run/b/inductor/ab/cabc.py"
