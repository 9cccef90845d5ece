"""VGG (Simonyan and Zisserman 2015, columns D and E) for small images: batch norm after each convolution, one dense layer.

Layers are numbered as PyTorch's `Sequential` numbers them. Convolutions before a batch norm have no bias: it would have no
effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

STAGES_16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
STAGES_19 = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and convolutions of the stages; a 2x2 max pool ends each."""


def build_16(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """13 convolutions and a dense layer, for images [C, H, W] of at least 32x32."""
    return _build(input_shape, classes, STAGES_16, "vgg16")


def build_19(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """16 convolutions and a dense layer, for images [C, H, W] of at least 32x32."""
    return _build(input_shape, classes, STAGES_19, "vgg19")


def _build(input_shape: Sequence[int], classes: int, stages: Sequence[tuple[int, int]], name: str) -> onnx.ModelProto:
    g = GraphBuilder(input_shape)
    x, channels, index = g.input, input_shape[0], 0
    for width, count in stages:
        for _ in range(count):
            x = g.conv(x, f"features.{index}", (channels, width), 3)
            x = g.relu(g.batch_norm(x, f"features.{index + 1}", width), f"features.{index + 2}")
            channels, index = width, index + 3
        x = g.max_pool(x, f"features.{index}", 2, 2, pad=0)
        index += 1
    x = g.global_average_pool(x, "avgpool")
    return g.finish(g.linear(x, "classifier", (channels, classes)), classes, name)
