"""The plan of a split graph: which piece runs when, on which weights and intermediate tensors.

A plan is plain data and is stored as JSON beside the compiled pieces: a warm start reads it and needs neither Dynamo
nor the graph. It names weights, it holds none.
"""

from __future__ import annotations

import msgspec


class Operand(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One argument of a step: exactly one of the fields is set."""

    slot: int | None = None
    """An intermediate tensor that an earlier step made."""
    weight: str | None = None
    """Qualified name of a parameter or buffer."""
    input: str | None = None
    """`input_ids`, `positions` or `num_tokens`."""


class PieceStep(msgspec.Struct, frozen=True, tag="piece", forbid_unknown_fields=True):
    piece: int
    operands: list[Operand]
    results: list[int]
    """Slots that take the piece's outputs, in order."""


class AttentionStep(msgspec.Struct, frozen=True, tag="attention", forbid_unknown_fields=True):
    layer: str
    query: Operand
    key: Operand
    value: Operand
    output: Operand
    """Written by the op."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_pieces: int
    """Distinct pieces."""
    num_slots: int
    steps: list[PieceStep | AttentionStep]
    output: Operand
    fingerprints: list[str]
    """What each distinct piece computes, see `fingerprint_piece`."""

    def check(self) -> None:
        """Raise ValueError unless every step uses only slots that earlier steps filled."""
        filled: set[int] = set()
        for number, step in enumerate(self.steps):
            operands = step.operands if isinstance(step, PieceStep) else [step.query, step.key, step.value, step.output]
            for operand in operands:
                self._check_operand(operand, filled, number)
            if isinstance(step, PieceStep):
                if not 0 <= step.piece < self.num_pieces:
                    raise ValueError(f"step {number} calls piece {step.piece} of {self.num_pieces}")
                filled.update(step.results)
        self._check_operand(self.output, filled, len(self.steps))
        if filled - set(range(self.num_slots)):
            raise ValueError(f"slots beyond {self.num_slots} are used")

    def weights(self) -> set[str]:
        """Names of all weights that the steps read."""
        operands = [o for step in self.steps if isinstance(step, PieceStep) for o in step.operands]
        return {operand.weight for operand in operands if operand.weight is not None}

    @staticmethod
    def _check_operand(operand: Operand, filled: set[int], step: int) -> None:
        if sum(field is not None for field in (operand.slot, operand.weight, operand.input)) != 1:
            raise ValueError(f"an operand of step {step} must be a slot, a weight or an input")
        if operand.slot is not None and operand.slot not in filled:
            raise ValueError(f"step {step} reads slot {operand.slot} before it is filled")
        if operand.input not in (None, "input_ids", "positions", "num_tokens"):
            raise ValueError(f"step {step} reads unknown input {operand.input!r}")
