"""One rule an operator: how it runs forward and what its gradient is.

A rule is a pair of functions in one table:

    forward(builder, node) -> None
        emits kernel-level nodes that end in node.outputs[0]; may put what the gradient needs under builder.saved.
    gradient(builder, node, dy) -> {input name: gradient tensor}
        emits the backward nodes; only for inputs in `builder.wanted`.

Sources: chain rule; batch norm after Ioffe and Szegedy 2015, section 3 (with PyTorch's unbiased running variance).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cross.errors import UnsupportedModelError
from cross.graph import Node
from cross.rules import convolution, dense, elementwise, movement, normalisation, pooling, reduction
from cross.rules.context import Context

Forward = Callable[[Context, Node], None]
Gradient = Callable[[Context, Node, str], dict[str, str]]


@dataclass(frozen=True)
class Rule:
    forward: Forward
    gradient: Gradient


RULES: dict[str, Rule] = {
    "conv2d": Rule(convolution.forward, convolution.gradient),
    "dense": Rule(dense.forward, dense.gradient),
    "matmul": Rule(dense.matmul, dense.matmul_gradient),
    "batch_norm": Rule(normalisation.batch_norm, normalisation.batch_norm_gradient),
    "embedding": Rule(dense.embedding, dense.embedding_gradient),
    "layer_norm": Rule(normalisation.layer_norm, normalisation.layer_norm_gradient),
    "lrn": Rule(normalisation.lrn, normalisation.lrn_gradient),
    "max_pool2d": Rule(pooling.max_pool, pooling.max_pool_gradient),
    "avg_pool2d": Rule(pooling.avg_pool, pooling.avg_pool_gradient),
    "reduce_mean": Rule(reduction.reduce_mean, reduction.reduce_mean_gradient),
    "reduce_sum": Rule(reduction.reduce_sum, reduction.reduce_sum_gradient),
    "softmax": Rule(reduction.softmax, reduction.softmax_gradient),
    "log_softmax": Rule(reduction.log_softmax, reduction.log_softmax_gradient),
    "reshape": Rule(movement.reshape, movement.reshape_gradient),
    "transpose": Rule(movement.transpose, movement.transpose_gradient),
    "concat": Rule(movement.concat, movement.concat_gradient),
    "slice": Rule(movement.slice_, movement.slice_gradient),
    "pad": Rule(movement.pad, movement.pad_gradient),
    "causal_mask": Rule(elementwise.causal_mask, elementwise.causal_mask_gradient),
    "dropout": Rule(elementwise.dropout, elementwise.dropout_gradient),
    **{op: Rule(elementwise.forward, elementwise.gradient) for op in elementwise.EXPRESSIONS},
}


def rule_of(node: Node) -> Rule:
    """The rule of a node's operator; UnsupportedModelError names the node."""
    if node.op not in RULES:
        raise UnsupportedModelError(
            f"operator {node.op} (node {node.source!r}) has no training rule. Replace it in the model."
        )
    return RULES[node.op]
