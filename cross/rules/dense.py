"""Dense layers, tables of rows (embeddings) and batched matrix products."""

from __future__ import annotations

from cross.expression import arg
from cross.graph import Node, TensorType
from cross.rules.context import Context


def forward(context: Context, node: Node) -> None:
    context.build.emit("dense", node.inputs, [context.type(node.outputs[0])], {}, node.outputs)


def gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    x, weight = node.inputs
    found = {}
    if weight in context.wanted:
        found[weight] = context.build.emit("dense_weight_gradient", [x, dy], [context.type(weight)])[0]
    if x in context.wanted:
        found[x] = context.build.emit("dense_input_gradient", [dy, weight], [context.type(x)])[0]
    return found


def embedding(context: Context, node: Node) -> None:
    context.build.emit("embedding", node.inputs, [context.type(node.outputs[0])], {}, node.outputs)


def embedding_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    tokens, weight = node.inputs
    return {weight: context.build.emit("embedding_gradient", [tokens, dy], [context.type(weight)])[0]}


def _product(context: Context, a: str, b: str, kind: TensorType, transpose_a: bool, transpose_b: bool) -> str:
    attrs = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    return context.build.emit("matmul", [a, b], [kind], attrs)[0]


def matmul(context: Context, node: Node) -> None:
    attrs = {"transpose_a": False, "transpose_b": False}
    context.build.emit("matmul", node.inputs, [context.type(node.outputs[0])], attrs, node.outputs)


def matmul_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """dA = dY B^T, dB = A^T dY; where both are one tensor the two are added."""
    a, b = node.inputs
    found: dict[str, str] = {}
    if a in context.wanted:
        found[a] = _product(context, dy, b, context.type(a), False, True)
    if b in context.wanted:
        other = _product(context, a, dy, context.type(b), True, False)
        found[b] = (
            context.build.map(("add", arg(0), arg(1)), (found[b], other), context.type(b)) if b in found else other
        )
    return found
