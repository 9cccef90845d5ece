"""A decoder-only transformer (Vaswani et al. 2017) over characters: each position predicts the next character.

6 layers, 256 wide, 8 heads, 64 characters, a vocabulary of 96. Layer norms come before attention and perceptron and once more
before the classifier; GELU; learned positions; attention sees nothing to the right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from cross.zoo.graph_builder import GraphBuilder

LAYERS, WIDTH, HEADS = 6, 256, 8


def build(input_shape: Sequence[int], classes: int) -> onnx.ModelProto:
    """The model for windows [T] of tokens; `classes` is the vocabulary. Logits [N, T, classes]."""
    return build_sized(input_shape, classes, LAYERS, WIDTH, HEADS)


def build_sized(input_shape: Sequence[int], classes: int, layers: int, width: int, heads: int) -> onnx.ModelProto:
    """The same with another depth and width; `heads` divides `width`."""
    (length,) = input_shape
    g = GraphBuilder(input_shape, tokens=True)
    x = g.plus_parameter(g.embedding(g.input, "tok", classes, width), "pos", (length, width))
    for index in range(layers):
        scope = f"layers.{index}"
        y = g.layer_norm(x, f"{scope}/ln1", width)
        x = g.add(x, _attention(g, y, f"{scope}/attn", length, width, heads), f"{scope}/attn/add")
        y = g.rows_linear(g.layer_norm(x, f"{scope}/ln2", width), f"{scope}/mlp/fc1", (width, 4 * width))
        y = g.rows_linear(g.gelu(y, f"{scope}/mlp/gelu"), f"{scope}/mlp/fc2", (4 * width, width))
        x = g.add(x, y, f"{scope}/mlp/add")
    x = g.rows_linear(g.layer_norm(x, "ln", width), "head", (width, classes))
    return g.finish(x, classes, "chartransformer", (length,))


def _attention(g: GraphBuilder, x: str, scope: str, length: int, width: int, heads: int) -> str:
    """softmax(Q K^T / sqrt(width of a head) + mask) V for each head, then one dense layer."""
    size = width // heads
    parts = {}
    for leaf, perm in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
        rows = g.rows_linear(x, f"{scope}/{leaf}", (width, width))
        split = g.reshape(rows, f"{scope}/{leaf}/heads", (length, heads, size))
        parts[leaf] = g.transpose(split, f"{scope}/{leaf}/turned", perm)
    scores = g.times(g.matmul(parts["query"], parts["key"], f"{scope}/scores"), size**-0.5, f"{scope}/scaled")
    mask = np.triu(np.full((length, length), -np.inf), 1)
    weights = g.softmax(g.plus_constant(scores, "mask", mask), f"{scope}/weights")
    mixed = g.transpose(g.matmul(weights, parts["value"], f"{scope}/mixed"), f"{scope}/mixed/turned", (0, 2, 1, 3))
    return g.rows_linear(g.reshape(mixed, f"{scope}/joined", (length, width)), f"{scope}/proj", (width, width))
