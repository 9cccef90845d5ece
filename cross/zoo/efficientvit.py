"""EfficientViT-M1 (Liu et al. 2023, "Memory Efficient Vision Transformer with Cascaded Group Attention") for small images.

From the paper: widths 128, 144, 192; depths 1, 2, 3; heads 2, 3, 3; keys of 16 channels; the sandwich of depthwise
convolution and feed-forward (expansion 2) on both sides of attention; heads in a cascade, each fed with the one before, with
depthwise convolutions of 7, 5, 3 on queries; batch norm after every convolution; between stages an inverted residual block
(expansion 4) with squeeze-and-excitation at stride 2.
Not as published: two of the stem's four convolutions keep the size, so that 32x32 images reach the first stage as 8x8 and
not 2x2; attention covers the whole map (the paper cuts maps above 7x7 into windows); each head learns a bias for every pair
of positions, where the paper shares one among pairs of equal distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cross.zoo.graph_builder import GraphBuilder

WIDTHS, DEPTHS, HEADS = (128, 144, 192), (1, 2, 3), (2, 3, 3)
KEY, KERNELS = 16, (7, 5, 3)
STEM_STRIDES = (2, 2, 1, 1)


def build_m1(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for images [C, H, W]; sizes are divided by 16 on the way."""
    g = GraphBuilder(input_shape)
    x, channels = g.input, input_shape[0]
    size = (input_shape[1], input_shape[2])
    for index, stride in enumerate(STEM_STRIDES):
        width = WIDTHS[0] >> (3 - index)
        x = _conv_bn(g, x, f"stem.{index}", (channels, width), 3, stride)
        x = g.relu(x, f"stem.{index}/relu") if index < 3 else x
        channels, size = width, _halved(size) if stride == 2 else size
    for stage, (width, depth, heads) in enumerate(zip(WIDTHS, DEPTHS, HEADS, strict=True)):
        if stage:
            x = _downsample(g, x, f"down{stage}", (channels, width))
            channels, size = width, _halved(size)
        for index in range(depth):
            x = _block(g, x, f"stage{stage}.{index}", width, heads, size)
    x = g.batch_norm(g.global_average_pool(x, "avgpool"), "head.bn", channels)
    return g.finish(g.linear(x, "head.linear", (channels, classes)), classes, "efficientvit-m1")


def _halved(size: tuple[int, int]) -> tuple[int, int]:
    return -(-size[0] // 2), -(-size[1] // 2)


def _conv_bn(
    g: GraphBuilder, x: str, scope: str, channels: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1
) -> str:
    return g.batch_norm(g.conv(x, f"{scope}/conv", channels, kernel, stride, groups), f"{scope}/bn", channels[1])


def _depthwise(g: GraphBuilder, x: str, scope: str, width: int) -> str:
    """x plus its 3x3 depthwise convolution."""
    return g.add(x, _conv_bn(g, x, scope, (width, width), 3, groups=width), f"{scope}/add")


def _feed_forward(g: GraphBuilder, x: str, scope: str, width: int) -> str:
    y = g.relu(_conv_bn(g, x, f"{scope}/pw1", (width, 2 * width), 1), f"{scope}/relu")
    return g.add(x, _conv_bn(g, y, f"{scope}/pw2", (2 * width, width), 1), f"{scope}/add")


def _block(g: GraphBuilder, x: str, scope: str, width: int, heads: int, size: tuple[int, int]) -> str:
    x = _feed_forward(g, _depthwise(g, x, f"{scope}/dw0", width), f"{scope}/ffn0", width)
    x = g.add(x, _attention(g, x, f"{scope}/attn", width, heads, size), f"{scope}/attn/add")
    return _feed_forward(g, _depthwise(g, x, f"{scope}/dw1", width), f"{scope}/ffn1", width)


def _attention(g: GraphBuilder, x: str, scope: str, width: int, heads: int, size: tuple[int, int]) -> str:
    """Cascaded group attention over all positions."""
    part, positions = width // heads, size[0] * size[1]
    outputs: list[str] = []
    for head in range(heads):
        own = f"{scope}/head{head}"
        feed = g.channels(x, f"{own}/part", head * part, (head + 1) * part)
        if outputs:
            feed = g.add(feed, outputs[-1], f"{own}/feed")
        mixed = _conv_bn(g, feed, f"{own}/qkv", (part, 2 * KEY + part), 1)
        query = g.channels(mixed, f"{own}/query", 0, KEY)
        query = _conv_bn(g, query, f"{own}/dw", (KEY, KEY), KERNELS[head], groups=KEY)
        rows = g.transpose(g.reshape(query, f"{own}/q", (KEY, positions)), f"{own}/q/rows", (0, 2, 1))
        key = g.reshape(g.channels(mixed, f"{own}/key", KEY, 2 * KEY), f"{own}/k", (KEY, positions))
        scores = g.times(g.matmul(rows, key, f"{own}/scores"), KEY**-0.5, f"{own}/scaled")
        weights = g.softmax(g.plus_parameter(scores, f"{own}/bias", (positions, positions)), f"{own}/weights")
        value = g.channels(mixed, f"{own}/value", 2 * KEY, 2 * KEY + part)
        rows = g.transpose(g.reshape(value, f"{own}/v", (part, positions)), f"{own}/v/rows", (0, 2, 1))
        turned = g.transpose(g.matmul(weights, rows, f"{own}/mixed"), f"{own}/columns", (0, 2, 1))
        outputs.append(g.reshape(turned, f"{own}/image", (part, *size)))
    joined = g.relu(g.concat(outputs, f"{scope}/joined"), f"{scope}/relu")
    return _conv_bn(g, joined, f"{scope}/proj", (width, width), 1)


def _downsample(g: GraphBuilder, x: str, scope: str, channels: tuple[int, int]) -> str:
    """Depthwise and feed-forward, an inverted residual at stride 2 with squeeze-and-excitation, the two again."""
    before, after = channels
    x = _feed_forward(g, _depthwise(g, x, f"{scope}/dw0", before), f"{scope}/ffn0", before)
    inner = 4 * before
    x = g.relu(_conv_bn(g, x, f"{scope}/merge1", (before, inner), 1), f"{scope}/relu1")
    x = g.relu(_conv_bn(g, x, f"{scope}/merge2", (inner, inner), 3, 2, groups=inner), f"{scope}/relu2")
    gate = g.conv(g.mean_of_pixels(x, f"{scope}/se/mean"), f"{scope}/se/fc1", (inner, inner // 4), 1, bias=True)
    gate = g.conv(g.relu(gate, f"{scope}/se/relu"), f"{scope}/se/fc2", (inner // 4, inner), 1, bias=True)
    x = g.mul(x, g.sigmoid(gate, f"{scope}/se/gate"), f"{scope}/se")
    x = _conv_bn(g, x, f"{scope}/merge3", (inner, after), 1)
    return _feed_forward(g, _depthwise(g, x, f"{scope}/dw1", after), f"{scope}/ffn1", after)
