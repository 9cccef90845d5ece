"""ResNet-18 (He et al. 2016): for small images with a 3x3 stem, and as published with a 7x7 stem and max pool."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels and first stride of the four stages, two blocks each."""


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The CIFAR form: 3x3 stem at stride 1, no max pool."""
    g = GraphBuilder(input_shape)
    x = _conv_bn(g, g.input, "conv1", "bn1", (input_shape[0], 64), 3, 1)
    return _body(g, g.relu(x, "relu"), classes, "resnet18")


def build_imagenet(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The published form: 7x7 stem at stride 2, 3x3 max pool at stride 2; any input size."""
    g = GraphBuilder(input_shape)
    x = _conv_bn(g, g.input, "conv1", "bn1", (input_shape[0], 64), 7, 2)
    x = g.max_pool(g.relu(x, "relu"), "maxpool", 3, 2)
    return _body(g, x, classes, "resnet18-imagenet")


def _body(g: GraphBuilder, x: str, classes: int, name: str) -> onnx.ModelProto:
    channels = 64
    for stage, (width, first_stride) in enumerate(STAGES, start=1):
        for index, stride in enumerate((first_stride, 1)):
            x = _basic_block(g, x, f"layer{stage}.{index}", (channels, width), stride)
            channels = width
    x = g.global_average_pool(x, "avgpool")
    return g.finish(g.linear(x, "fc", (channels, classes)), classes, name)


def _basic_block(g: GraphBuilder, x: str, scope: str, channels: tuple[int, int], stride: int) -> str:
    """Two 3x3 convolutions and a shortcut, projected by a 1x1 convolution where the shape changes."""
    width = channels[1]
    y = g.relu(_conv_bn(g, x, f"{scope}/conv1", f"{scope}/bn1", channels, 3, stride), f"{scope}/relu1")
    y = _conv_bn(g, y, f"{scope}/conv2", f"{scope}/bn2", (width, width), 3, 1)
    if stride != 1 or channels[0] != width:
        x = _conv_bn(g, x, f"{scope}/downsample.0", f"{scope}/downsample.1", channels, 1, stride)
    return g.relu(g.add(y, x, f"{scope}/add"), f"{scope}/relu2")


def _conv_bn(g: GraphBuilder, x: str, conv: str, norm: str, channels: tuple[int, int], kernel: int, stride: int) -> str:
    return g.batch_norm(g.conv(x, conv, channels, kernel, stride), norm, channels[1])
