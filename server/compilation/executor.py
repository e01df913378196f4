"""Runs a plan: compiled pieces and attention calls, one after the other, on the model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from server.compilation.pieces import CompiledPiece
from server.compilation.plan import AttentionStep, Operand, PieceStep, Plan

AttentionCall = Callable[..., None]
"""`(query, key, value, output, layer_name)`; writes `output`."""


class BoundStep:
    """One step with its weights in place: `arguments` is a template whose gaps the run fills from the slots."""

    __slots__ = ("arguments", "drops", "gaps", "layer", "piece", "results")

    def __init__(
        self,
        piece: CompiledPiece | None,
        layer: str,
        arguments: list[Any],
        gaps: list[tuple[int, int]],
        results: list[int],
        drops: list[int],
    ) -> None:
        self.piece = piece
        """None: the step is an attention call of `layer`."""
        self.layer = layer
        self.arguments = arguments
        self.gaps = gaps
        """(position in `arguments`, slot)"""
        self.results = results
        self.drops = drops
        """Slots that no later step reads: let go of, so that their memory is reused within the pass."""


# The step's own inputs live in the first slots.
_INPUT_SLOTS = {"input_ids": 0, "positions": 1, "num_tokens": 2}


class PlanExecutor:
    """Callable like the model: `(input_ids (T,), positions (T,)) -> hidden states (T, hidden size)`."""

    def __init__(
        self,
        plan: Plan,
        pieces: Sequence[CompiledPiece],
        weights: dict[str, torch.Tensor],
        attention: AttentionCall,
    ) -> None:
        """Bind `plan` to the model's parameters and buffers by name.

        Raises KeyError when the model lacks a weight that the plan names.
        """
        self.attention = attention
        self.num_slots = len(_INPUT_SLOTS) + plan.num_slots
        self.output_slot = self._slot(plan.output)
        last_reader: dict[int, int] = {}
        for number, step in enumerate(plan.steps):
            for operand in _operands(step):
                if operand.weight is None:
                    last_reader[self._slot(operand)] = number
            if isinstance(step, PieceStep):
                for result in step.results:
                    last_reader.setdefault(result + len(_INPUT_SLOTS), number)
        last_reader[self.output_slot] = len(plan.steps)
        drops: dict[int, list[int]] = {}
        for slot, number in last_reader.items():
            drops.setdefault(number, []).append(slot)
        self.steps: list[BoundStep] = []
        for number, step in enumerate(plan.steps):
            operands = _operands(step)
            self.steps.append(
                BoundStep(
                    piece=pieces[step.piece] if isinstance(step, PieceStep) else None,
                    layer="" if isinstance(step, PieceStep) else step.layer,
                    arguments=[None if o.weight is None else weights[o.weight] for o in operands],
                    gaps=[(i, self._slot(o)) for i, o in enumerate(operands) if o.weight is None],
                    results=[r + len(_INPUT_SLOTS) for r in step.results] if isinstance(step, PieceStep) else [],
                    drops=drops.get(number, []),
                )
            )

    @staticmethod
    def _slot(operand: Operand) -> int:
        if operand.input is not None:
            return _INPUT_SLOTS[operand.input]
        if operand.slot is None:
            raise ValueError("a weight has no slot")
        return operand.slot + len(_INPUT_SLOTS)

    def start(self, input_ids: torch.Tensor, positions: torch.Tensor) -> list[Any]:
        """Slots at the beginning of a pass."""
        slots: list[Any] = [None] * self.num_slots
        slots[0], slots[1], slots[2] = input_ids, positions, input_ids.shape[0]
        return slots

    @staticmethod
    def operands(step: BoundStep, slots: list[Any]) -> list[Any]:
        """Arguments of a step (an attention call's without the layer's name)."""
        arguments = step.arguments.copy()
        for position, slot in step.gaps:
            arguments[position] = slots[slot]
        return arguments

    @staticmethod
    def drop(step: BoundStep, slots: list[Any]) -> None:
        """Let go of what no step after `step` reads."""
        for slot in step.drops:
            slots[slot] = None

    def run_step(self, step: BoundStep, slots: list[Any]) -> None:
        arguments = self.operands(step, slots)
        if step.piece is None:
            self.attention(*arguments, step.layer)
        else:
            for slot, value in zip(step.results, step.piece(*arguments), strict=True):
                slots[slot] = value
        self.drop(step, slots)

    def touch(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run each distinct piece and one attention call once: enough for what libraries load and allocate at the
        first call of a shape. The result has the shape of hidden states and no meaning."""
        slots = self.start(input_ids, positions)
        made: dict[int, list[torch.Tensor]] = {}
        attended = False
        for step in self.steps:
            if step.piece is None:
                if not attended:
                    self.attention(*self.operands(step, slots), step.layer)
                attended = True
            else:
                if id(step.piece) not in made:
                    made[id(step.piece)] = list(step.piece(*self.operands(step, slots)))
                for slot, value in zip(step.results, made[id(step.piece)], strict=True):
                    slots[slot] = value
            self.drop(step, slots)
        hidden: torch.Tensor = slots[self.output_slot]
        return hidden

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        slots = self.start(input_ids, positions)
        for step in self.steps:
            self.run_step(step, slots)
        hidden: torch.Tensor = slots[self.output_slot]
        return hidden


def _operands(step: PieceStep | AttentionStep) -> list[Operand]:
    if isinstance(step, PieceStep):
        return step.operands
    return [step.query, step.key, step.value, step.output]
