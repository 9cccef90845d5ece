"""A perceptron with two hidden layers: the smallest model that trains."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx

from cross.zoo.graph_builder import GraphBuilder

HIDDEN = (256, 128)


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """fc1 (256), ReLU, fc2 (128), ReLU, fc3 (classes) on the flattened image."""
    g = GraphBuilder(input_shape)
    x = g.flatten(g.input, "flatten")
    x = g.relu(g.linear(x, "fc1", (prod(input_shape), HIDDEN[0])), "relu1")
    x = g.relu(g.linear(x, "fc2", HIDDEN), "relu2")
    return g.finish(g.linear(x, "fc3", (HIDDEN[1], classes)), classes, "mlp")
