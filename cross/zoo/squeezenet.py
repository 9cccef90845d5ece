"""SqueezeNet 1.1 (Iandola et al. 2016) for small images: the stem keeps the size (stride 1).

Layers are numbered as torchvision numbers them. The dropout before the classifier is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

FIRES = (
    (3, 16, 64),
    (4, 16, 64),
    (6, 32, 128),
    (7, 32, 128),
    (9, 48, 192),
    (10, 48, 192),
    (11, 64, 256),
    (12, 64, 256),
)
"""Number, squeezed channels, and channels of each of the two expansions."""

POOLS = (5, 8)


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for images [C, H, W]; sizes are divided by 8 on the way."""
    g = GraphBuilder(input_shape)
    channels = 64
    x = g.relu(g.conv(g.input, "features.0", (input_shape[0], channels), 3, bias=True), "features.1")
    x = g.max_pool(x, "features.2", 3, 2, pad=0, ceil=True)
    for number, squeezed, expanded in FIRES:
        if number - 1 in POOLS:
            x = g.max_pool(x, f"features.{number - 1}", 3, 2, pad=0, ceil=True)
        x = _fire(g, x, f"features.{number}", channels, squeezed, expanded)
        channels = 2 * expanded
    x = g.relu(g.conv(x, "classifier.1", (channels, classes), 1, bias=True), "classifier.2")
    return g.finish(g.global_average_pool(x, "avgpool"), classes, "squeezenet")


def _fire(g: GraphBuilder, x: str, scope: str, channels: int, squeezed: int, expanded: int) -> str:
    x = g.relu(g.conv(x, f"{scope}/squeeze", (channels, squeezed), 1, bias=True), f"{scope}/squeeze_relu")
    parts = []
    for kernel in (1, 3):
        leaf = f"{scope}/expand{kernel}x{kernel}"
        parts.append(g.relu(g.conv(x, leaf, (squeezed, expanded), kernel, bias=True), f"{leaf}_relu"))
    return g.concat(parts, f"{scope}/concat")
