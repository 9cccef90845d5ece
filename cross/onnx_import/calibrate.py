"""Scales of seeded weights in a network without batch norm, so that it trains from its first step.

PyTorch's default bound passes on 0.4 of a signal's size at each ReLU: after the 19 layers of a VGG nothing is left, and
with the gain that corrects this, max pools make it explode. So every weight is scaled until its output has a given
spread on one random image (layer-sequential unit variance: Mishkin and Matas 2016, "All you need is a good init").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cross.graph import Init, Model, Node
from cross.initialise import uniform
from cross.onnx_import.evaluate import FORWARD

Array = np.ndarray[Any, np.dtype[Any]]

CONVOLUTION_SPREAD, DENSE_SPREAD, HEAD_SPREAD = 1.0, 0.5, 0.05
"""Standard deviation of outputs. Dense layers have thousands of inputs, and their gradient grows with all of them: at
unit variance the first steps of an AlexNet overshoot even at a learning rate of 1e-3. HEAD: a dense layer that is last."""

_SCALED = ("conv2d", "dense")
_DIGITS = 2
"""Significant digits of a scale: the same on every host, however its numpy rounds."""


def calibrate(model: Model, seed: int) -> Model:
    """`model` with seeded weights of calibrated scales; a weight that is used twice is scaled for its first use."""
    last_use = {name: i for i, node in enumerate(model.nodes) for name in node.inputs}
    last = [node for node in model.nodes if node.op in _SCALED][-1:]
    random = np.random.default_rng(0)
    image: Array = random.standard_normal((1, *model.input_shape)).astype(np.float32)
    if model.tensors[model.input].dtype == "int32":
        image = random.integers(0, model.input_values, (1, *model.input_shape))
    values: dict[str, Array] = {**model.parameters, **model.states, **model.constants, model.input: image}
    inits, parameters = dict(model.inits), dict(model.parameters)
    done: set[str] = set()
    for index, node in enumerate(model.nodes):
        name = node.inputs[1] if node.op in _SCALED else ""
        if name and name not in done:
            unit = uniform(name, parameters[name].shape, 1.0, seed)
            output = FORWARD[node.op]([values[node.inputs[0]], unit], node.attrs)
            scale = _scale(output, _wanted(node, node is last[0]), inits[name].scale)
            inits[name] = Init("uniform", scale)
            parameters[name] = values[name] = unit * np.float32(scale)
            done.add(name)
        output = FORWARD[node.op]([values[i] for i in node.inputs], node.attrs)
        values[node.outputs[0]] = output
        for used in node.inputs:
            if last_use[used] == index:
                values.pop(used, None)
    return replace(model, inits=inits, parameters=parameters)


def _wanted(node: Node, last: bool) -> float:
    if node.op == "conv2d":
        return CONVOLUTION_SPREAD
    return HEAD_SPREAD if last else DENSE_SPREAD


def _scale(output: Array, wanted: float, default: float) -> float:
    spread = float(output.std())
    if not np.isfinite(spread) or spread == 0.0:
        return default
    return float(f"{wanted / spread:.{_DIGITS}g}")
