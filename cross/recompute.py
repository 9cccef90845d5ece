"""Recomputation: what is cheap to compute again is not kept for backward.

Before    z = map(x, ..);  conv2d(z, w);  ...  conv2d_weight_gradient(z, dy);  map(x, ..)
After     z = map(x, ..);  conv2d(z, w);  ...  z:again = map(x, ..);  conv2d_weight_gradient(z:again, dy);  map(x, ..)

An element-wise result that backward nodes of its own block read is made again before the first of them, where everything that
it is made from is kept at least as long anyway: then its own memory is free in between, and nothing else is kept longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cross.expression import size
from cross.fuse import expressions
from cross.graph import Node, TensorType
from cross.program_graph import ProgramGraph

MOST_OPERATIONS = 12
"""Of an expression that counts as cheap."""


def recompute(program: ProgramGraph) -> ProgramGraph:
    """The program with cheap results made again in backward."""
    tensors, nodes = dict(program.tensors), list(program.nodes)
    for node in program.nodes:
        readers = [i for i, n in enumerate(nodes) if n.phase == "backward" and node.outputs[0] in n.inputs]
        if not readers or not _is_cheap(program, node) or any(nodes[i].block != node.block for i in readers):
            continue
        if any(_last_use(nodes, name) < readers[-1] for name in node.inputs if tensors[name].batched):
            continue
        again = _again(node)
        tensors[again.outputs[0]] = tensors[node.outputs[0]]
        swap = {node.outputs[0]: again.outputs[0]}
        for i in readers:
            nodes[i] = replace(nodes[i], inputs=tuple(swap.get(name, name) for name in nodes[i].inputs))
        nodes.insert(readers[0], again)
    return replace(program, nodes=tuple(nodes), tensors=tensors)


def _is_cheap(program: ProgramGraph, node: Node) -> bool:
    if node.op != "map" or node.phase != "forward" or node.outputs[0] in program.protected:
        return False
    kind: TensorType = program.tensors[node.outputs[0]]
    return kind.batched and sum(size(expr) for expr in expressions(node)) <= MOST_OPERATIONS


def _last_use(nodes: Sequence[Node], name: str) -> int:
    return max(i for i, node in enumerate(nodes) if name in node.inputs)


def _again(node: Node) -> Node:
    return replace(node, outputs=(f"{node.outputs[0]}:again",), phase="backward")
