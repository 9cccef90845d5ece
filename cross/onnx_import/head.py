"""The end of the graph: a trailing softmax is taken off, the class count replaced, logits made [N, classes]."""

from __future__ import annotations

from math import prod

import numpy as np

from cross.errors import UnsupportedModelError
from cross.graph import Node, Shape
from cross.onnx_import.draft import Draft
from cross.onnx_import.infer import BINARY, POOLS, REDUCTIONS, UNARY

_SOFTMAXES = frozenset(("softmax", "log_softmax"))
_BEHIND_CLASSIFIER = UNARY | BINARY | POOLS | REDUCTIONS | {"reshape"}


def remove_softmax(draft: Draft, output: str) -> tuple[str, str]:
    """Take off a softmax over the classes, also before reshapes. Returns the new output and the kind, or ''."""
    producers = {node.outputs[0]: node for node in draft.nodes}
    reshapes: list[Node] = []
    node = producers.get(output)
    while node is not None and node.op == "reshape":
        reshapes.append(node)
        node = producers.get(node.inputs[0])
    if node is None or node.op not in _SOFTMAXES:
        return output, ""
    shape = draft.shapes[node.outputs[0]]
    of_tokens = len(shape) == 3 and node.attrs["axis"] == 2 and not reshapes
    if shape[node.attrs["axis"]] != prod(shape[1:]) and not of_tokens:
        return output, ""
    logits = node.inputs[0]
    for step in reversed(reshapes):
        logits = draft.emit(
            "reshape", (logits,), dict(step.attrs), name=f"{step.outputs[0]}/logits", source=step.source
        )
    draft.prune(logits)
    return logits, node.op


def flatten_logits(draft: Draft, output: str) -> str:
    """[N, classes, 1, 1] as [N, classes]."""
    shape = draft.shapes[output]
    if len(shape) <= 2 or prod(shape[1:]) != max(shape[1:]):
        return output
    return draft.emit(
        "reshape", (output,), {"shape": (shape[0], prod(shape[1:]))}, name=f"{output}/logits", source=output
    )


def replace_classes(draft: Draft, output: str, classes: int) -> tuple[Draft, set[str]]:
    """Give the last dense layer or 1x1 convolution `classes` outputs. Also returns the parameters to initialise afresh.

    The user's weights stay where the count is already right. UnsupportedModelError where no such layer ends the graph.
    """
    old = draft.shapes[output][-1]
    if old == classes:
        return draft, set()
    producers = {node.outputs[0]: node for node in draft.nodes}
    tail: dict[str, Node] = {}
    node = producers.get(output)
    while node is not None and node.op in _BEHIND_CLASSIFIER:
        tail[node.outputs[0]] = node
        computed = [i for i in node.inputs if draft.is_data(i)]
        node = producers.get(computed[0]) if len(computed) == 1 else None
    if node is None or not _is_classifier(draft, node) or draft.shapes[node.inputs[1]][0] != old:
        raise UnsupportedModelError(
            f"no dense layer or 1x1 convolution of {old} outputs ends the model: it cannot have {classes} classes. "
            f"Leave --classes at {old}, or choose another --output."
        )
    fresh = {node.inputs[1]} | {i for n in tail.values() for i in n.inputs if i in draft.parameters}
    resized = draft.like()
    for name in fresh:
        shape = _with_classes(draft.shapes[name], old, classes, 0)
        resized.parameters[name] = np.zeros(shape, np.float32)
        resized.shapes[name] = shape
    for old_node in draft.nodes:
        attrs = dict(old_node.attrs)
        if old_node.outputs[0] in tail and old_node.op == "reshape":
            attrs["shape"] = _with_classes(attrs["shape"], old, classes, 1)
        resized.emit(old_node.op, old_node.inputs, attrs, name=old_node.outputs[0], source=old_node.source)
    return resized, fresh


def _is_classifier(draft: Draft, node: Node) -> bool:
    if node.op == "dense":
        return True
    return node.op == "conv2d" and draft.shapes[node.inputs[1]][2:] == (1, 1) and node.attrs["groups"] == 1


def _with_classes(shape: Shape, old: int, new: int, first: int) -> Shape:
    """The shape with its class dimension, the first of that size from `first` on, replaced."""
    position = shape.index(old, first)
    return (*shape[:position], new, *shape[position + 1 :])
