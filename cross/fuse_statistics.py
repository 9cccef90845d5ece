"""Statistics of a batch norm go into the convolution that makes its input.

Before    y = conv2d(x, w);            sum, m2 = batch_statistics(y);  ... = batch_norm_finish(sum, m2, ...)
After     y, sum, m2 = conv2d(x, w);                                   ... = batch_norm_finish(sum, m2, ...)

So y is not read again for them. What sum and m2 are sums over is then the kernel's choice, which `batch_norm_finish` learns from
their storage. Convolutions in groups have kernels of their own, which gather nothing.
"""

from __future__ import annotations

from dataclasses import replace

from cross.graph import Node
from cross.program_graph import ProgramGraph


def fuse_statistics(program: ProgramGraph) -> ProgramGraph:
    """The program with `batch_statistics` merged into the convolutions of the same block before them."""
    nodes: list[Node] = []
    makers: dict[str, int] = {}
    for node in program.nodes:
        position = makers.get(node.inputs[0], -1) if node.op == "batch_statistics" else -1
        if position >= 0 and nodes[position].block == node.block:
            maker = nodes[position]
            nodes[position] = replace(maker, outputs=(*maker.outputs, *node.outputs))
            del makers[node.inputs[0]]
            continue
        if node.op == "conv2d" and node.attrs["groups"] == 1:
            makers[node.outputs[0]] = len(nodes)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))
