"""ResNet-8 of MLPerf Tiny (Banbury et al. 2021): three stacks of one residual block, 16, 32 and 64 channels.

Convolutions before a batch norm have no bias (it would have no effect); the 1x1 shortcuts, without batch norm, do.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

STACKS = ((16, 1), (32, 2), (64, 2))


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for images [C, H, W], any size from 4x4 on."""
    g = GraphBuilder(input_shape)
    channels = STACKS[0][0]
    x = g.batch_norm(g.conv(g.input, "conv1", (input_shape[0], channels), 3), "bn1", channels)
    x = g.relu(x, "relu")
    for index, (width, stride) in enumerate(STACKS):
        scope = f"stacks.{index}"
        y = g.batch_norm(g.conv(x, f"{scope}/conv1", (channels, width), 3, stride), f"{scope}/bn1", width)
        y = g.relu(y, f"{scope}/relu1")
        y = g.batch_norm(g.conv(y, f"{scope}/conv2", (width, width), 3), f"{scope}/bn2", width)
        if stride != 1 or channels != width:
            x = g.conv(x, f"{scope}/shortcut", (channels, width), 1, stride, bias=True)
        x = g.relu(g.add(y, x, f"{scope}/add"), f"{scope}/relu2")
        channels = width
    x = g.global_average_pool(x, "avgpool")
    return g.finish(g.linear(x, "fc", (channels, classes)), classes, "resnet8")
