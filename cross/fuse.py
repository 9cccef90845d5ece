"""Fusion: element-wise nodes are computed inside their readers instead of being stored.

Before    y = map(x * s + t);  z = map(max(y, 0));  dy = map(select(y > 0, dz, 0));  reduce(dy, dy * (x - m))
After     z = map(max(x * s + t, 0));               reduce(select(x * s + t > 0, dz, 0), ... * (x - m))

A node goes into its readers when every reader is element-wise or a sum over the same domain, in the same block, and
no reader then streams more tensors than before (a single reader may). What is cheap is thus recomputed in backward, not saved.
Block boundaries, gradients and results always exist under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cross.expression import Expr, arg, size, substitute
from cross.graph import Node, Shape, TensorType
from cross.program_graph import ProgramGraph

READERS = ("map", "reduce", "sum_batch", "channel_window_sum")
MAXIMUM_INPUTS = 12
MAXIMUM_REPEATED_OPERATIONS = 12


def fuse(program: ProgramGraph) -> ProgramGraph:
    """The program with element-wise nodes merged into their readers wherever that costs no extra traffic."""
    nodes = list(program.nodes)
    for candidate in program.nodes:
        if candidate.op != "map" or candidate.outputs[0] in program.protected:
            continue
        current = next(n for n in nodes if n.outputs == candidate.outputs)
        readers = [n for n in nodes if current.outputs[0] in n.inputs]
        results = _merge_into_all(program, current, readers)
        if results is None:
            continue
        swap = {id(old): new for old, new in zip(readers, results, strict=True)}
        nodes = [swap.get(id(n), n) for n in nodes if n is not current]
    return replace(program, nodes=tuple(nodes))


def domain_of(tensors: Mapping[str, TensorType], node: Node) -> Shape:
    """The index space a reader walks: its output's for a map; a sum says its own."""
    if node.op in ("map", "channel_window_sum"):
        return tensors[node.outputs[0]].shape
    return tuple(node.attrs["domain"])


def expressions(node: Node) -> tuple[Expr, ...]:
    return node.attrs["exprs"] if node.op == "reduce" else (node.attrs["expr"],)


def _merge_into_all(program: ProgramGraph, node: Node, readers: list[Node]) -> list[Node] | None:
    tensors = program.tensors
    domain = tensors[node.outputs[0]].shape
    if not readers or any(r.op not in READERS or r.block != node.block for r in readers):
        return None
    if any(domain_of(tensors, r) != domain for r in readers):
        return None
    results = [merged(node, reader) for reader in readers]
    if any(len(m.inputs) > MAXIMUM_INPUTS for m in results):
        return None
    once = len(readers) == 1 and readers[0].op != "channel_window_sum" and _mentions(readers[0], node.outputs[0]) == 1
    if once:
        return results
    if size(node.attrs["expr"]) > MAXIMUM_REPEATED_OPERATIONS:
        return None
    grows = any(
        _streams(tensors, m, domain) > _streams(tensors, r, domain) for m, r in zip(results, readers, strict=True)
    )
    return None if grows else results


def _mentions(reader: Node, name: str) -> int:
    """How often a reader's expressions use a tensor."""
    index = reader.inputs.index(name)

    def count(expr: Expr) -> int:
        if expr[0] == "input":
            return int(expr[1] == index)
        return sum(count(p) for p in expr[1:] if isinstance(p, tuple))

    return sum(count(e) for e in expressions(reader))


def _streams(tensors: Mapping[str, TensorType], node: Node, domain: Shape) -> int:
    """Full-size tensors that a reader loads."""
    return sum(tensors[name].shape == domain for name in set(node.inputs))


def merged(node: Node, reader: Node) -> Node:
    """The reader with the node's expression in place of its output."""
    inputs: list[str] = []

    def place(name: str) -> Expr:
        if name not in inputs:
            inputs.append(name)
        return arg(inputs.index(name))

    def replacement(index: int) -> Expr:
        name = reader.inputs[index]
        if name == node.outputs[0]:
            return substitute(node.attrs["expr"], lambda i: place(node.inputs[i]))
        return place(name)

    replaced = tuple(substitute(e, replacement) for e in expressions(reader))
    key = "exprs" if reader.op == "reduce" else "expr"
    attrs = {**reader.attrs, key: replaced if key == "exprs" else replaced[0]}
    return replace(reader, inputs=tuple(inputs), attrs=attrs)
