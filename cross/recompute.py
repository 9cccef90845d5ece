"""Recomputation: what is cheap to compute again is not kept for backward.

Before    z = map(x, ..);  conv2d(z, w);  ...  conv2d_weight_gradient(z, dy);  map(x, ..)
After     z = map(x, ..);  conv2d(z, w);  ...  z:again = map(x, ..);  conv2d_weight_gradient(z:again, dy);  map(x, ..)

An element-wise result that backward nodes of its own block read is made again before the first of them, where everything that
it is made from is kept at least as long anyway: then its own memory is free in between, and nothing else is kept longer.

At level 'blocks' so are outputs of blocks, out of what the blocks before keep: the output of a residual block is the sum of its own last
convolution, normalised, and the output before, made again in the same expression. Backward of such a program runs over all
blocks or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cross.expression import size
from cross.fuse import MAXIMUM_INPUTS, expressions, merged
from cross.graph import Node, TensorType
from cross.program_graph import ProgramGraph

LEVELS = ("none", "cheap", "blocks")

MOST_OPERATIONS = 12
"""Of an expression that counts as cheap."""

MOST_OPERATIONS_OF_A_CHAIN = 24
"""Of one that makes the output of a block again."""


def recompute(program: ProgramGraph, level: str) -> ProgramGraph:
    """The program with results made again in backward, as the level (one of LEVELS) says."""
    if level == "none":
        return program
    return _within_blocks(_across_blocks(program) if level == "blocks" else program)


def _within_blocks(program: ProgramGraph) -> ProgramGraph:
    tensors, nodes = dict(program.tensors), list(program.nodes)
    for node in program.nodes:
        readers = _backward_readers(nodes, node.outputs[0])
        if not readers or node.outputs[0] in program.protected or not _is_cheap(program, node, MOST_OPERATIONS):
            continue
        if any(nodes[i].block != node.block for i in readers) or not _is_kept(tensors, nodes, node, readers[-1]):
            continue
        _make_again(tensors, nodes, node, readers)
    return replace(program, nodes=tuple(nodes), tensors=tensors)


def _across_blocks(program: ProgramGraph) -> ProgramGraph:
    tensors, nodes = dict(program.tensors), list(program.nodes)
    chains: dict[str, Node] = {}
    for node in program.nodes:
        output = node.outputs[0]
        if output not in program.protected or output == program.output:
            continue
        chain = _chain(tensors, node, chains)
        readers = _backward_readers(nodes, output)
        if not readers or not _is_cheap(program, chain, MOST_OPERATIONS_OF_A_CHAIN):
            continue
        if _is_kept(tensors, nodes, chain, readers[-1]):
            chains[output] = chain
            _make_again(tensors, nodes, chain, readers)
    return replace(program, nodes=tuple(nodes), tensors=tensors)


def _chain(tensors: dict[str, TensorType], node: Node, chains: dict[str, Node]) -> Node:
    """The node with outputs of blocks that are made again in place of themselves, as long as its inputs do not become too many."""
    if node.op != "map":
        return node
    for name in node.inputs:
        whole = name in chains and tensors[name] == tensors[node.outputs[0]]
        longer = merged(chains[name], node) if whole else node
        if len(longer.inputs) <= MAXIMUM_INPUTS:
            node = longer
    return node


def _backward_readers(nodes: Sequence[Node], name: str) -> list[int]:
    return [i for i, n in enumerate(nodes) if n.phase == "backward" and name in n.inputs]


def _is_cheap(program: ProgramGraph, node: Node, most: int) -> bool:
    if node.op != "map" or node.phase != "forward":
        return False
    kind: TensorType = program.tensors[node.outputs[0]]
    return kind.batched and sum(size(expr) for expr in expressions(node)) <= most


def _is_kept(tensors: dict[str, TensorType], nodes: Sequence[Node], node: Node, reader: int) -> bool:
    """Whether all that a node reads is there for that reader anyway."""
    return all(_last_use(nodes, name) >= reader for name in node.inputs if tensors[name].batched)


def _last_use(nodes: Sequence[Node], name: str) -> int:
    return max(i for i, node in enumerate(nodes) if name in node.inputs)


def _make_again(tensors: dict[str, TensorType], nodes: list[Node], node: Node, readers: Sequence[int]) -> None:
    """Put the node before its first reader in backward, and let the readers read it there."""
    (output,) = node.outputs
    again = replace(node, outputs=(f"{output}:again",), phase="backward", block=nodes[readers[0]].block)
    tensors[again.outputs[0]] = tensors[output]
    for i in readers:
        inputs = (again.outputs[0] if name == output else name for name in nodes[i].inputs)
        nodes[i] = replace(nodes[i], inputs=tuple(inputs))
    nodes.insert(readers[0], again)
