"""ResNet-20 for CIFAR (He et al. 2016, section 4.2): three stages of three blocks, shortcuts without weights.

Where the shape changes, the shortcut takes every second pixel and fills up channels with zeros, half before and half after
(option A). Names are those of the usual PyTorch implementations, so their trained weights fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

STAGES = ((16, 1), (32, 2), (64, 2))
"""Channels and first stride."""

BLOCKS = 3


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for images [C, H, W]."""
    g = GraphBuilder(input_shape)
    channels = STAGES[0][0]
    x = g.batch_norm(g.conv(g.input, "conv1", (input_shape[0], channels), 3), "bn1", channels)
    x = g.relu(x, "relu")
    for stage, (width, first_stride) in enumerate(STAGES, start=1):
        for index in range(BLOCKS):
            x = _block(g, x, f"layer{stage}.{index}", (channels, width), first_stride if index == 0 else 1)
            channels = width
    x = g.global_average_pool(x, "avgpool")
    return g.finish(g.linear(x, "linear", (channels, classes)), classes, "resnet20")


def _block(g: GraphBuilder, x: str, scope: str, channels: tuple[int, int], stride: int) -> str:
    width = channels[1]
    y = g.relu(g.batch_norm(g.conv(x, f"{scope}/conv1", channels, 3, stride), f"{scope}/bn1", width), f"{scope}/relu1")
    y = g.batch_norm(g.conv(y, f"{scope}/conv2", (width, width), 3), f"{scope}/bn2", width)
    if stride != 1:
        x = g.pad_channels(g.every_second_pixel(x, f"{scope}/pixels"), f"{scope}/pad", (width - channels[0]) // 2)
    return g.relu(g.add(y, x, f"{scope}/add"), f"{scope}/relu2")
