"""Activations and norms that exporters write out in small steps, recognised and put back together.

GELU comes in a dozen spellings (erf or tanh, the half before or after, cubes as powers or products), so it is recognised by
its values: a few element-wise steps over one tensor that give GELU's numbers are GELU. Layer norm is recognised by its form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cross.graph import Node
from cross.onnx_import.draft import Draft
from cross.onnx_import.evaluate import FORWARD

Array = np.ndarray[Any, np.dtype[Any]]
Producers = Mapping[str, Node]

_STEPS = frozenset(("add", "sub", "mul", "div", "erf", "tanh"))
_MOST_STEPS = 16
_POINTS = np.linspace(-6.0, 6.0, 41)
_TOLERANCE = 1e-5


def merge_gelu(node: Node, producers: Producers, draft: Draft) -> Node:
    """`node`, or the GELU that it completes."""
    if node.op not in ("mul", "div"):
        return node
    region = _region(node, producers)
    if not any(name in producers and producers[name].op in ("erf", "tanh") for name in region):
        return node
    for x in region:
        values = _values(node, x, producers, draft)
        for approximate in ("none", "tanh") if values is not None else ():
            wanted = FORWARD["gelu"]([_POINTS], {"approximate": approximate})
            if np.abs(np.asarray(values) - wanted).max() <= _TOLERANCE:
                return Node("gelu", (x,), node.outputs, {"approximate": approximate}, node.source)
    return node


def _region(node: Node, producers: Producers) -> list[str]:
    """Tensors from which `node` is a few element-wise steps away, the nearest first."""
    found = list(dict.fromkeys(node.inputs))
    for name in found:
        producer = producers.get(name)
        if producer is not None and producer.op in _STEPS and len(found) < _MOST_STEPS:
            found += [i for i in dict.fromkeys(producer.inputs) if i not in found]
    return found


def _values(node: Node, x: str, producers: Producers, draft: Draft) -> Array | None:
    """`node` as a function of the numbers in `x` alone, at `_POINTS`; None where it also depends on something else."""
    known: dict[str, Array | None] = {x: _POINTS}

    def value(name: str, depth: int) -> Array | None:
        if name not in known:
            constant, producer = draft.constants.get(name), producers.get(name)
            if constant is not None and constant.size == 1:
                known[name] = constant.astype(np.float64).reshape(())
            elif producer is not None and producer.op in _STEPS and depth < _MOST_STEPS:
                known[name] = step(producer, depth + 1)
            else:
                known[name] = None
        return known[name]

    def step(at: Node, depth: int) -> Array | None:
        inputs = [value(name, depth) for name in at.inputs]
        if any(i is None for i in inputs):
            return None
        with np.errstate(all="ignore"):
            return FORWARD[at.op]([np.asarray(i) for i in inputs], at.attrs)

    found = step(node, 0)
    return found if found is not None and found.shape == _POINTS.shape else None


def merge_layer_norm(node: Node, producers: Producers, draft: Draft) -> Node:
    """`node`, or the layer norm that it completes: its scale (mul), or scale and shift (add)."""
    if node.op == "add":
        for scaled, shift in (node.inputs, node.inputs[::-1]):
            inner = producers.get(scaled)
            if inner is None or inner.op != "mul" or not _is_channel_vector(shift, scaled, draft):
                continue
            merged = merge_layer_norm(inner, producers, draft)
            if merged.op == "layer_norm":
                return Node("layer_norm", (*merged.inputs, shift), node.outputs, merged.attrs, node.source)
    if node.op != "mul":
        return node
    for normal, scale in (node.inputs, node.inputs[::-1]):
        found = _normalised(normal, producers, draft) if _is_channel_vector(scale, normal, draft) else None
        if found is not None:
            return Node("layer_norm", (found[0], scale), node.outputs, {"eps": found[1]}, node.source)
    return node


def _is_channel_vector(name: str, other: str, draft: Draft) -> bool:
    return name in draft.parameters and draft.shapes[name] == draft.shapes[other][-1:]


def _normalised(name: str, producers: Producers, draft: Draft) -> tuple[str, float] | None:
    """(x, eps) where a tensor is (x - mean) / sqrt(mean of (x - mean)^2 + eps) over the last axis."""
    quotient = producers.get(name)
    root = producers.get(quotient.inputs[1]) if quotient is not None and quotient.op == "div" else None
    total = producers.get(root.inputs[0]) if root is not None and root.op == "sqrt" else None
    if quotient is None or total is None or total.op != "add":
        return None
    x = _centred(quotient.inputs[0], producers, draft)
    for var, eps in (total.inputs, total.inputs[::-1]):
        square = _of_last_mean(var, producers, draft)
        product = producers.get(square) if square is not None else None
        constant = draft.constants.get(eps)
        if x is None or product is None or product.op != "mul" or constant is None or constant.size != 1:
            continue
        if product.inputs[0] == product.inputs[1] and _centred(product.inputs[0], producers, draft) == x:
            return x, float(str(constant.reshape(-1)[0]))
    return None


def _centred(name: str, producers: Producers, draft: Draft) -> str | None:
    """x where a tensor is x - mean of x over the last axis."""
    difference = producers.get(name)
    if difference is None or difference.op != "sub":
        return None
    x, mean = difference.inputs
    return x if _of_last_mean(mean, producers, draft) == x else None


def _of_last_mean(name: str, producers: Producers, draft: Draft) -> str | None:
    """x where a tensor is the mean of x over the last axis, kept."""
    mean = producers.get(name)
    if mean is None or mean.op != "reduce_mean" or not mean.attrs["keepdims"]:
        return None
    x = mean.inputs[0]
    return x if tuple(mean.attrs["axes"]) == (len(draft.shapes[x]) - 1,) else None
