"""Batch norms put back: exporters fold them into convolutions, and without them fine-tuning needs small steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cross.errors import UnsupportedModelError, UsageError
from cross.graph import Init, Model, Node, TensorType
from cross.onnx_import.evaluate import forward

Array = np.ndarray[Any, np.dtype[Any]]

EPS = 1e-5
MOMENTUM = 0.1


def unfold_batch_norm(model: Model, samples: Array) -> Model:
    """Put a batch norm in the place of every convolution's bias; on `samples` [B, C, H, W] the function is unchanged.

    One pass over the samples gives each convolution's mean m and variance v a channel; scale = sqrt(v + eps) and
    shift = m + bias undo the normalisation. Raises UsageError for samples of another shape, UnsupportedModelError where
    no convolution has a bias.
    """
    if samples.ndim != len(model.input_shape) + 1 or samples.shape[1:] != model.input_shape or not len(samples):
        raise UsageError(
            f"samples of shape {list(samples.shape)} do not fit the model's input {list(model.input_shape)}."
        )
    convolutions = {node.outputs[0] for node in model.nodes if node.op == "conv2d"}
    readers = [name for node in model.nodes for name in node.inputs]
    nodes: list[Node] = []
    parameters, states = dict(model.parameters), dict(model.states)
    inits, tensors = dict(model.inits), dict(model.tensors)
    unfolded: list[dict[str, Any]] = []
    makers = {node.outputs[0]: node for node in model.nodes}
    for node, inputs, _ in forward(model, samples.astype(np.float32)):
        bias = _bias(model, node, convolutions)
        if bias is None or readers.count(bias) > 1 or readers.count(node.inputs[0]) > 1:
            nodes.append(node)
            continue
        x = inputs[0]
        mean, variance = x.mean((0, 2, 3), dtype=np.float64), x.var((0, 2, 3), dtype=np.float64)
        prefix = f"{node.source}/batch_norm"
        made: dict[str, tuple[Array, float]] = {
            f"{prefix}.weight": (np.sqrt(variance + EPS), 1.0),
            f"{prefix}.bias": (mean + parameters.pop(bias).reshape(-1), 0.0),
            f"{prefix}.running_mean": (mean, 0.0),
            f"{prefix}.running_var": (variance, 1.0),
        }
        for (name, (array, start)), table in zip(made.items(), (parameters, parameters, states, states), strict=True):
            table[name] = array.astype(np.float32)
            tensors[name] = TensorType(array.shape)
            inits[name] = Init("constant", start)
        del inits[bias], tensors[bias]
        weight = makers[node.inputs[0]].inputs[1]
        unfolded.append({"weight": weight, "bias": bias, "batch_norm": prefix, "eps": EPS})
        attrs = {"eps": EPS, "momentum": MOMENTUM}
        nodes.append(replace(node, op="batch_norm", inputs=(node.inputs[0], *made), attrs=attrs))
    if len(states) == len(model.states):
        raise UnsupportedModelError(
            "no convolution has a bias, so there is no batch norm to put back. Leave out --unfold-bn."
        )
    metadata = {**model.metadata, "folded_batch_norm": False, "unfolded_batch_norm": unfolded}
    metadata["notes"] = [note for note in model.metadata.get("notes", ()) if "no batch norm" not in note]
    metadata["weight_layout"] = {k: v for k, v in model.metadata["weight_layout"].items() if k in parameters}
    return replace(
        model,
        nodes=tuple(nodes),
        tensors=tensors,
        parameters=parameters,
        states=states,
        inits=inits,
        metadata=metadata,
    )


def _bias(model: Model, node: Node, convolutions: set[str]) -> str | None:
    """The bias that the node adds to a convolution's output."""
    if node.op != "add" or node.inputs[0] not in convolutions or node.inputs[1] not in model.parameters:
        return None
    shape = model.parameters[node.inputs[1]].shape
    return node.inputs[1] if shape == (model.tensors[node.inputs[0]].shape[1], 1, 1) else None
