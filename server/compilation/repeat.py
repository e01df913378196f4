"""A model of any depth captured as three layers: one after the embedding, one between two others, one before the end.

Tracing takes Dynamo 0.15 s a layer, and all layers of a decoder are the same but for their weights. The plan of three
layers says how a layer in the middle follows on the one before it; `repeat_layers` continues it to the full depth.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from server.compilation.plan import AttentionStep, Operand, PieceStep, Plan

SAMPLE = 3
_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?=\.)")

Step = PieceStep | AttentionStep


def shortened(model: nn.Module) -> tuple[nn.Module, int]:
    """A model of the first three of `model`'s layers, on the same weights, and how many layers there are in all.

    `model` itself, which other threads may be filling with weights, is left alone. One with fewer layers, or whose
    layers differ, is returned as it is.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return model, 0
    if len(layers) <= SAMPLE or not same_layers(layers):
        return model, len(layers)
    short = copy.copy(model)
    short._modules = {**model._modules, "layers": nn.ModuleList(layers[:SAMPLE])}
    return short, len(layers)


def same_layers(layers: nn.ModuleList) -> bool:
    """Whether the layers from the second on differ in nothing but their weights and their number in names."""
    first = _signature(layers[1])
    return all(_signature(layer) == first for layer in layers[2:])


def _signature(layer: nn.Module) -> list[Any]:
    parts: list[Any] = []
    for name, module in layer.named_modules():
        plain: dict[str, Any] = {}
        for key, value in vars(module).items():
            if isinstance(value, str):
                plain[key] = _LAYER.sub("layers.N", value)
            elif value is None or isinstance(value, bool | int | float):
                plain[key] = value
            elif callable(value):
                plain[key] = getattr(value, "__qualname__", type(value).__qualname__)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, t.shape, t.stride(), t.dtype, t.device) for key, t in tensors]
        parts.append((name, type(module), plain, shapes))
    return parts


def repeat_layers(plan: Plan, num_layers: int) -> Plan:
    """The plan of `num_layers` layers, from that of three.

    Raises ValueError for a plan that does not repeat: its second and third layer run different pieces.
    """
    ends = [i + 1 for i, step in enumerate(plan.steps) if isinstance(step, AttentionStep)]
    if len(ends) != SAMPLE:
        raise ValueError(f"a plan with {len(ends)} attention calls is not one of {SAMPLE} layers")
    second, third, tail = plan.steps[ends[0] : ends[1]], plan.steps[ends[1] : ends[2]], plan.steps[ends[2] :]
    if [_kind(step) for step in second] != [_kind(step) for step in third]:
        raise ValueError("the second and the third layer run different pieces")
    width = sum(len(step.results) for step in third if isinstance(step, PieceStep))
    # Slots are numbered in order: from here on they belong to the second layer, `width` later to the third.
    start = min(slot for step in second if isinstance(step, PieceStep) for slot in step.results)
    both = _weights(second) & _weights(third)
    shared = {name for name in both if _places(second, name) == _places(third, name)}
    steps = list(plan.steps[: ends[2]])
    for extra in range(1, num_layers - SAMPLE + 1):
        steps += [_Move(extra, extra * width, start, shared).step(step) for step in third]
    extra = num_layers - SAMPLE
    to_end = _Move(extra, extra * width, start + width, shared)
    return Plan(
        num_pieces=plan.num_pieces,
        num_slots=plan.num_slots + extra * width,
        steps=steps + [to_end.step(step) for step in tail],
        output=to_end.operand(plan.output),
        fingerprints=plan.fingerprints,
    )


def _kind(step: Step) -> int:
    return step.piece if isinstance(step, PieceStep) else -1


def _operands(steps: list[Step]) -> list[Operand]:
    return [operand for step in steps if isinstance(step, PieceStep) for operand in step.operands]


def _weights(steps: list[Step]) -> set[str]:
    return {operand.weight for operand in _operands(steps) if operand.weight is not None}


def _places(steps: list[Step], weight: str) -> list[int]:
    return [place for place, operand in enumerate(_operands(steps)) if operand.weight == weight]


@dataclass(frozen=True, slots=True)
class _Move:
    """What a step becomes `layers` later."""

    layers: int
    slots: int
    first_slot: int
    """Slots below come from before all layers and stay."""
    shared: set[str]
    """Weights that every layer reads at the same place, such as the rotary table: they stay."""

    def step(self, step: Step) -> Step:
        if isinstance(step, PieceStep):
            operands = [self.operand(operand) for operand in step.operands]
            return PieceStep(step.piece, operands, [slot + self.slots for slot in step.results])
        return AttentionStep(
            layer=self._later(step.layer),
            query=self.operand(step.query),
            key=self.operand(step.key),
            value=self.operand(step.value),
            output=self.operand(step.output),
        )

    def operand(self, operand: Operand) -> Operand:
        if operand.weight is not None and operand.weight not in self.shared:
            return Operand(weight=self._later(operand.weight))
        if operand.slot is not None and operand.slot >= self.first_slot:
            return Operand(slot=operand.slot + self.slots)
        return operand

    def _later(self, name: str) -> str:
        return _LAYER.sub(lambda match: f"layers.{int(match[1]) + self.layers}", name)
