"""MobileNetV2 (Sandler et al. 2018) for small images: the stem and the second stage keep the size (strides 1)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks, first stride."""

STEM, LAST = 32, 1280


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for images [C, H, W]; sizes are divided by 8 on the way."""
    g = GraphBuilder(input_shape)
    x = _conv_bn_relu6(g, g.input, "", "1", (input_shape[0], STEM), 3)
    channels, index = STEM, 0
    for expansion, width, count, first_stride in STAGES:
        for stride in (first_stride, *[1] * (count - 1)):
            x = _inverted_residual(g, x, f"layers.{index}/", (channels, width), expansion, stride)
            channels, index = width, index + 1
    x = _conv_bn_relu6(g, x, "", "2", (channels, LAST), 1)
    x = g.global_average_pool(x, "avgpool")
    return g.finish(g.linear(x, "linear", (LAST, classes)), classes, "mobilenetv2")


def _inverted_residual(
    g: GraphBuilder, x: str, scope: str, channels: tuple[int, int], expansion: int, stride: int
) -> str:
    """1x1 expansion, 3x3 depthwise, linear 1x1 projection; a shortcut where the shape stays."""
    planes = channels[0] * expansion
    y = _conv_bn_relu6(g, x, scope, "1", (channels[0], planes), 1)
    y = _conv_bn_relu6(g, y, scope, "2", (planes, planes), 3, stride, groups=planes)
    y = g.batch_norm(g.conv(y, f"{scope}conv3", (planes, channels[1]), 1), f"{scope}bn3", channels[1])
    return g.add(y, x, f"{scope}add") if stride == 1 and channels[0] == channels[1] else y


def _conv_bn_relu6(
    g: GraphBuilder,
    x: str,
    scope: str,
    number: str,
    channels: tuple[int, int],
    kernel: int,
    stride: int = 1,
    groups: int = 1,
) -> str:
    y = g.conv(x, f"{scope}conv{number}", channels, kernel, stride, groups)
    return g.relu6(g.batch_norm(y, f"{scope}bn{number}", channels[1]), f"{scope}relu{number}")
