"""AlexNet (Krizhevsky, Sutskever and Hinton 2012) for small images: the five convolutions, 2x2 pools, one dense layer.

The published channels in PyTorch's one-GPU form. Response normalisation and the two hidden dense layers are left out, as is
usual for 32x32 images. Layers are numbered as PyTorch's `Sequential` numbers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

LAYERS = ((64, 11, 4, True), (192, 5, 1, True), (384, 3, 1, False), (256, 3, 1, False), (256, 3, 1, True))
"""Channels, kernel, stride, and whether a pool follows."""


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for images [C, H, W] of at least 29x29; sizes are divided by 32 on the way."""
    g = GraphBuilder(input_shape)
    x, channels, index = g.input, input_shape[0], 0
    for width, kernel, stride, is_pooled in LAYERS:
        x = g.conv(x, f"features.{index}", (channels, width), kernel, stride, bias=True)
        x = g.relu(x, f"features.{index + 1}")
        index += 2
        if is_pooled:
            x = g.max_pool(x, f"features.{index}", 2, 2, pad=0)
            index += 1
        channels = width
    x = g.global_average_pool(x, "avgpool")
    return g.finish(g.linear(x, "classifier", (channels, classes)), classes, "alexnet")
