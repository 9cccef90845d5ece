"""Max and average pooling. Max pooling saves which tap won, so ties go where PyTorch sends them: to the first."""

from __future__ import annotations

from cross.graph import Node, TensorType
from cross.rules.context import Context


def max_pool(context: Context, node: Node) -> None:
    kind, output = context.type(node.outputs[0]), node.outputs[0]
    winner = context.build.fresh(f"{output}.winner")
    context.saved[output] = (winner,)
    types = [kind, TensorType(kind.shape, "int32")]
    context.build.emit("max_pool2d", node.inputs, types, node.attrs, [output, winner])


def max_pool_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    (x,), (winner,) = node.inputs, context.saved[node.outputs[0]]
    return {x: context.build.emit("max_pool2d_gradient", [dy, winner], [context.type(x)], node.attrs)[0]}


def avg_pool(context: Context, node: Node) -> None:
    context.build.emit("avg_pool2d", node.inputs, [context.type(node.outputs[0])], node.attrs, node.outputs)


def avg_pool_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    (x,) = node.inputs
    return {x: context.build.emit("avg_pool2d_gradient", [dy], [context.type(x)], node.attrs)[0]}
