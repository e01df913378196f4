"""Split of a captured graph at every attention op, into pieces that are compiled once per distinct shape of code.

A Llama of any depth has three distinct pieces: embedding to first attention, attention to attention, last attention to
final norm. Two pieces are the same when their graphs differ only in names: node names, and the layer names and weights
that reach them as arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from server.compilation.capture import CapturedGraph
from server.compilation.plan import AttentionStep, Operand, PieceStep, Plan

ATTENTION_OP = "benchserve::attention"


@dataclass(frozen=True, slots=True)
class SplitGraph:
    plan: Plan
    pieces: list[fx.GraphModule]
    """The distinct pieces, in order of first use; a piece's number in the plan is its index here. Each takes its
    operands in the order of its placeholders and returns a tuple."""


def is_attention(node: fx.Node, op: str = ATTENTION_OP) -> bool:
    """Whether a node calls the op: as an `OpOverload` (`ns.op.default`) or as a packet (`ns.op`)."""
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name == op
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name == op
    return False


def split(captured: CapturedGraph, attention_op: str = ATTENTION_OP) -> SplitGraph:
    """Split at `attention_op` and describe how the pieces and the attention calls follow one another."""
    graph = captured.graph
    partition = 0
    partition_of: dict[fx.Node, int] = {}
    attention_partitions: set[int] = set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            if node.op == "get_attr":
                raise RuntimeError(f"the graph holds a constant tensor ({node.target}): make it a buffer of the model")
            continue
        if is_attention(node, attention_op):
            partition += 1
            partition_of[node] = partition
            attention_partitions.add(partition)
            partition += 1
        else:
            partition_of[node] = partition
    outer = split_module(graph, graph, lambda node: partition_of[node], keep_original_order=True)
    attention_modules = {f"submod_{number}" for number in attention_partitions}
    return _build(captured, outer, attention_modules)


def _build(captured: CapturedGraph, outer: fx.GraphModule, attention_modules: set[str]) -> SplitGraph:
    operands: dict[fx.Node, Operand] = {}
    steps: list[PieceStep | AttentionStep] = []
    pieces: list[fx.GraphModule] = []
    numbers: dict[str, int] = {}
    outputs: list[Operand] = []
    num_slots = 0
    result_slots: dict[fx.Node, list[int]] = {}
    returns_tuple: dict[fx.Node, bool] = {}
    for node in outer.graph.nodes:
        if node.op == "placeholder":
            operands[node] = _input_operand(captured, node.name)
        elif node.op == "call_module" and node.target in attention_modules:
            steps.append(_attention_step(getattr(outer, node.target), [operands[a] for a in node.args]))
        elif node.op == "call_module":
            piece = getattr(outer, node.target)
            returns_tuple[node] = _make_output_tuple(piece)
            fingerprint = fingerprint_piece(piece)
            if fingerprint not in numbers:
                numbers[fingerprint] = len(pieces)
                pieces.append(piece)
            slots = list(range(num_slots, num_slots + _num_outputs(piece)))
            num_slots += len(slots)
            result_slots[node] = slots
            if not returns_tuple[node]:
                operands[node] = Operand(slot=slots[0])
            steps.append(PieceStep(numbers[fingerprint], [operands[a] for a in node.args], slots))
        elif node.op == "call_function":  # operator.getitem on a piece's outputs
            source, index = node.args
            operands[node] = Operand(slot=result_slots[source][index])
        elif node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            outputs = [operands[a] for a in flat]
        else:
            raise RuntimeError(f"unexpected {node.op} in the split graph")
    if len(outputs) != 1:
        raise RuntimeError(f"the model must return one tensor, not {len(outputs)}")
    plan = Plan(
        num_pieces=len(pieces),
        num_slots=num_slots,
        steps=list(steps),
        output=outputs[0],
        fingerprints=list(numbers),
    )
    return SplitGraph(plan, pieces)


def _input_operand(captured: CapturedGraph, placeholder: str) -> Operand:
    # split_module keeps a placeholder's target as its name, which Dynamo spells with other capitals than the node name.
    if placeholder in captured.weights:
        return Operand(weight=captured.weights[placeholder])
    if placeholder in captured.inputs:
        return Operand(input=captured.inputs[placeholder])
    if placeholder in captured.num_tokens:
        return Operand(input="num_tokens")
    raise RuntimeError(f"unknown input {placeholder} of the split graph")


def _attention_step(module: fx.GraphModule, operands: list[Operand]) -> AttentionStep:
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    outer_operand = dict(zip(placeholders, operands, strict=True))
    (call,) = (n for n in module.graph.nodes if n.op == "call_function")
    query, key, value, output, layer_name = call.args
    if not isinstance(layer_name, str):
        raise RuntimeError("the attention op must name its layer with a constant")
    return AttentionStep(
        layer=layer_name,
        query=outer_operand[query],
        key=outer_operand[key],
        value=outer_operand[value],
        output=outer_operand[output],
    )


def _output_node(piece: fx.GraphModule) -> fx.Node:
    return next(iter(reversed(piece.graph.nodes)))


def _make_output_tuple(piece: fx.GraphModule) -> bool:
    """Make a piece return a tuple always; whether it did so before (and its user indexes it)."""
    output = _output_node(piece)
    if isinstance(output.args[0], tuple | list):
        return True
    output.args = ((output.args[0],),)
    piece.recompile()
    return False


def _num_outputs(piece: fx.GraphModule) -> int:
    values: Any = _output_node(piece).args[0]
    return len(values)


def fingerprint_piece(piece: fx.GraphModule) -> str:
    """Digest of what a piece computes: operations, arguments, and type, shape and strides of its inputs."""
    order = {node: index for index, node in enumerate(piece.graph.nodes)}
    lines = []
    for node in piece.graph.nodes:
        described = fx.node.map_arg((node.args, node.kwargs), _numbered(order))
        value = _describe_value(node.meta.get("example_value")) if node.op == "placeholder" else ""
        target = "" if node.op == "placeholder" else _describe_target(node.target)
        lines.append(f"{order[node]} {node.op} {target} {described if node.op != 'placeholder' else ''} {value}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _numbered(order: dict[fx.Node, int]) -> Callable[[fx.Node], Any]:
    return lambda node: f"%{order[node]}"


def _describe_target(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', None) or target}"


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    return str(value)
