"""Convolution: its two gradients are kernels of their own."""

from __future__ import annotations

from cross.graph import Node
from cross.rules.context import Context


def forward(context: Context, node: Node) -> None:
    context.build.emit("conv2d", node.inputs, [context.type(node.outputs[0])], node.attrs, node.outputs)


def gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    x, weight = node.inputs
    found = {}
    if weight in context.wanted:
        found[weight] = context.build.emit("conv2d_weight_gradient", [x, dy], [context.type(weight)], node.attrs)[0]
    if x in context.wanted:
        found[x] = context.build.emit("conv2d_input_gradient", [dy, weight], [context.type(x)], node.attrs)[0]
    return found
