"""Which parameters are the classifier: the layer that turns features into one output a class."""

from __future__ import annotations

from cross.graph import Model, Node

_BEHIND = frozenset(("add", "sub", "mul", "div", "reshape", "transpose", "avg_pool2d", "max_pool2d", "reduce_mean",
                     "reduce_sum", "softmax", "log_softmax", "relu", "dropout"))  # fmt: skip
"""What may stand between the layer and the model's output: its bias, pooling of a 1x1 convolution's map, reshapes."""


def classifier_parameters(model: Model) -> tuple[str, ...]:
    """Weight and bias of the last dense layer or 1x1 convolution; all of the last block's where no such layer ends it."""
    producers = {name: node for node in model.nodes for name in node.outputs}
    found: list[str] = []
    node = producers.get(model.output)
    while node is not None and node.op in _BEHIND:
        found += [name for name in node.inputs if name in model.parameters]
        computed = [name for name in node.inputs if model.tensors[name].batched]
        node = producers.get(computed[0]) if len(computed) == 1 else None
    if node is not None and _is_classifier(model, node):
        return (node.inputs[1], *reversed(found))
    last = len(model.blocks) - 1
    reads = {name for node in model.nodes if node.block == last for name in node.inputs}
    return tuple(name for name in model.parameters if name in reads)


def _is_classifier(model: Model, node: Node) -> bool:
    if node.op not in ("dense", "conv2d") or node.inputs[1] not in model.parameters:
        return False
    return node.op == "dense" or (model.tensors[node.inputs[1]].shape[2:] == (1, 1) and node.attrs["groups"] == 1)
