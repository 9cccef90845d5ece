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
SILENT = 0.02
"""An output whose largest standard deviation over samples is below this does not depend on its input: a ResNet-18 with
PyTorch's initial weights has 0.003 in inference mode; with a fresh classifier on features worth keeping it is above 0.1."""


def unfold_batch_norm(model: Model, samples: Array) -> Model:
    """Put a batch norm in the place of every convolution's bias; on `samples` [B, C, H, W] the function is unchanged.

    A model without any batch norm also gets one behind convolutions without a bias: exporters leave a bias of zeros out.
    One pass over the samples gives each convolution's mean m and variance v a channel; scale = sqrt(v + eps) and
    shift = m + bias undo the normalisation. Where the model's output does not depend on its input (an untrained network
    in inference mode, whose signal has died out), they start afresh instead.
    Raises UsageError for samples of another shape, UnsupportedModelError where no convolution gets one.
    """
    if samples.ndim != len(model.input_shape) + 1 or samples.shape[1:] != model.input_shape or not len(samples):
        raise UsageError(
            f"samples of shape {list(samples.shape)} do not fit the model's input {list(model.input_shape)}."
        )
    convolutions = {node.outputs[0] for node in model.nodes if node.op == "conv2d"}
    biased = {node.inputs[0] for node in model.nodes if _bias(model, node, convolutions)}
    bare = set() if any(node.op == "batch_norm" for node in model.nodes) else convolutions - biased
    readers = [name for node in model.nodes for name in node.inputs]
    makers = {node.outputs[0]: node for node in model.nodes}
    written = _Unfolded(model)
    for node, inputs, output in forward(model, samples.astype(np.float32)):
        written.starts.append(len(written.nodes))
        bias = _bias(model, node, convolutions)
        if node.outputs[0] in bare:
            inner = f"{node.outputs[0]}/convolution"
            written.tensors[inner] = model.tensors[node.outputs[0]]
            written.nodes.append(replace(node, outputs=(inner,)))
            written.add(node, inner, output, node.inputs[1], "")
        elif bias is None or readers.count(bias) > 1 or readers.count(node.inputs[0]) > 1:
            written.nodes.append(node)
        else:
            written.add(node, node.inputs[0], inputs[0], makers[node.inputs[0]].inputs[1], bias)
    if not written.entries:
        raise UnsupportedModelError(
            "no convolution has a bias, so there is no batch norm to put back. Leave out --unfold-bn."
        )
    return written.finish(silent=float(output.std(0).max()) < SILENT)


class _Unfolded:
    """The model being written: nodes with batch norms, and where each old node begins among them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.nodes: list[Node] = []
        self.starts: list[int] = []
        self.entries: list[dict[str, Any]] = []
        self.parameters, self.states = dict(model.parameters), dict(model.states)
        self.inits, self.tensors = dict(model.inits), dict(model.tensors)

    def add(self, node: Node, x: str, value: Array, weight: str, bias: str) -> None:
        """A batch norm of convolution output `x` (on the samples: `value`) in the place of `node`; `bias` may be ''."""
        mean, variance = value.mean((0, 2, 3), dtype=np.float64), value.var((0, 2, 3), dtype=np.float64)
        prefix = f"{node.source}/batch_norm"
        shift = self.parameters.pop(bias).reshape(-1) if bias else 0.0
        made: dict[str, tuple[Array, float]] = {
            f"{prefix}.weight": (np.sqrt(variance + EPS), 1.0),
            f"{prefix}.bias": (mean + shift, 0.0),
            f"{prefix}.running_mean": (mean, 0.0),
            f"{prefix}.running_var": (variance, 1.0),
        }
        tables = (self.parameters, self.parameters, self.states, self.states)
        for (name, (array, start)), table in zip(made.items(), tables, strict=True):
            table[name] = array.astype(np.float32)
            self.tensors[name] = TensorType(array.shape)
            self.inits[name] = Init("constant", start)
        if bias:
            del self.inits[bias], self.tensors[bias]
        self.entries.append({"weight": weight, "bias": bias, "batch_norm": prefix, "eps": EPS})
        attrs = {"eps": EPS, "momentum": MOMENTUM}
        self.nodes.append(replace(node, op="batch_norm", inputs=(x, *made), attrs=attrs))

    def finish(self, silent: bool) -> Model:
        """The whole model; its blocks hold the nodes that they held. `silent`: faint batch norms start afresh."""
        if silent:
            for prefix in (entry["batch_norm"] for entry in self.entries):
                for table in (self.parameters, self.states):
                    for name in [name for name in table if name.startswith(f"{prefix}.")]:
                        table[name] = np.full_like(table[name], self.inits[name].scale)
        model, starts = self.model, [*self.starts, len(self.nodes)]
        metadata = {**model.metadata, "folded_batch_norm": False, "unfolded_batch_norm": self.entries}
        metadata["notes"] = [note for note in model.metadata.get("notes", ()) if "no batch norm" not in note]
        metadata["untrained"] = silent
        if silent:
            metadata["notes"].append(
                "the model's output hardly depends on its input, as before any training: its batch norms start afresh"
            )
        layouts = model.metadata["weight_layout"]
        metadata["weight_layout"] = {name: layout for name, layout in layouts.items() if name in self.parameters}
        return replace(
            model,
            nodes=tuple(self.nodes),
            tensors=self.tensors,
            parameters=self.parameters,
            states=self.states,
            inits=self.inits,
            blocks=tuple(
                replace(block, first_node=starts[block.first_node], end_node=starts[block.end_node])
                for block in model.blocks
            ),
            metadata=metadata,
        )


def _bias(model: Model, node: Node, convolutions: set[str]) -> str | None:
    """The bias that the node adds to a convolution's output."""
    if node.op != "add" or node.inputs[0] not in convolutions or node.inputs[1] not in model.parameters:
        return None
    shape = model.parameters[node.inputs[1]].shape
    return node.inputs[1] if shape == (model.tensors[node.inputs[0]].shape[1], 1, 1) else None
