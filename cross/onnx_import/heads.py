"""Transposes of attention heads that exporters spell by merging the batch with the heads.

Before    [N, H, T, D] -> Reshape [N * H, T, D] -> Transpose (0, 2, 1) -> Reshape [N, H, D, T]
After     [N, H, T, D] -> Transpose (0, 1, 3, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from onnx import NodeProto, helper

Dims = Callable[[str], tuple[int, ...] | None]
"""Shape of a tensor at one batch size, None where it is not known."""


def unmerge_heads(nodes: Iterable[NodeProto], output: str, shapes: Iterable[Dims]) -> tuple[NodeProto, ...]:
    """`nodes` with every such triple as one Transpose; it must be one at each batch size of `shapes`."""
    nodes, shapes = tuple(nodes), tuple(shapes)
    makers = {name: node for node in nodes for name in node.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    replaced: dict[int, NodeProto | None] = {}
    for node in nodes:
        if node.op_type != "Transpose":
            continue
        before, after = makers.get(node.input[0]), readers.get(node.output[0], [])
        if before is None or before.op_type != "Reshape" or len(after) != 1 or after[0].op_type != "Reshape":
            continue
        x, merged, turned, result = before.input[0], before.output[0], node.output[0], after[0].output[0]
        if len(readers[merged]) > 1 or output in (merged, turned):
            continue
        if all(_exchanges_last_two(dims(x), dims(merged), dims(turned), dims(result)) for dims in shapes):
            rank = len(shapes[0](x) or ())
            perm = [*range(rank - 2), rank - 1, rank - 2]
            replaced[id(after[0])] = helper.make_node("Transpose", [x], [result], name=node.name, perm=perm)
            replaced[id(before)] = replaced[id(node)] = None
    kept = (replaced.get(id(node), node) for node in nodes)
    return tuple(node for node in kept if node is not None)


def _exchanges_last_two(
    x: tuple[int, ...] | None,
    merged: tuple[int, ...] | None,
    turned: tuple[int, ...] | None,
    result: tuple[int, ...] | None,
) -> bool:
    if x is None or len(x) < 4:
        return False
    rows = prod(x[:-2])
    flat = (rows, *x[-2:])
    return merged == flat and turned == (rows, x[-1], x[-2]) and result == (*x[:-2], x[-1], x[-2])
