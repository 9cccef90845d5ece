"""Write a zoo model as ONNX: layers by name, parameters named as PyTorch's state_dict names them.

Weights are ConstantOfShape nodes, so a model is a few kilobytes whatever its size; values come from the seed
(`cross.initialise`) when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


class GraphBuilder:
    """Layers return their output tensor. `name` is the node's, `scope/leaf`; parameters are `scope.leaf.weight` ..."""

    def __init__(self, input_shape: Sequence[int]) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._input = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *input_shape])
        self.input = "input"

    def conv(
        self,
        x: str,
        name: str,
        channels: tuple[int, int],
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> str:
        """Square convolution, padded to keep the size at stride 1. `channels`: in, out."""
        weight = self._weight(f"{_dotted(name)}.weight", (channels[1], channels[0] // groups, kernel, kernel))
        inputs = [x, weight]
        if bias:
            inputs.append(self._weight(f"{_dotted(name)}.bias", (channels[1],)))
        pad = kernel // 2
        return self._node(
            "Conv", inputs, name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=groups
        )

    def batch_norm(self, x: str, name: str, channels: int) -> str:
        """In training form: eps 1e-5, PyTorch's momentum 0.1."""
        prefix = _dotted(name)
        names = [f"{prefix}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
        inputs = [
            x,
            *(self._weight(n, (channels,), value) for n, value in zip(names, (1.0, 0.0, 0.0, 1.0), strict=True)),
        ]
        outputs = [name, f"{names[2]}/new", f"{names[3]}/new"]
        node = helper.make_node(
            "BatchNormalization", inputs, outputs, name=name, epsilon=1e-5, momentum=0.9, training_mode=1
        )
        self._nodes.append(node)
        return name

    def relu(self, x: str, name: str) -> str:
        return self._node("Relu", [x], name)

    def relu6(self, x: str, name: str) -> str:
        return self._node("Clip", [x, self._constant(f"{name}/min", 0.0), self._constant(f"{name}/max", 6.0)], name)

    def add(self, a: str, b: str, name: str) -> str:
        return self._node("Add", [a, b], name)

    def max_pool(self, x: str, name: str, kernel: int, stride: int) -> str:
        pad = kernel // 2
        return self._node("MaxPool", [x], name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)

    def global_average_pool(self, x: str, name: str) -> str:
        return self._node("Flatten", [self._node("GlobalAveragePool", [x], name)], f"{name}/flatten", axis=1)

    def flatten(self, x: str, name: str) -> str:
        return self._node("Flatten", [x], name, axis=1)

    def linear(self, x: str, name: str, features: tuple[int, int]) -> str:
        """Dense layer with bias. `features`: in, out."""
        weight = self._weight(f"{_dotted(name)}.weight", features[::-1])
        bias = self._weight(f"{_dotted(name)}.bias", features[1:])
        return self._node("Gemm", [x, weight, bias], name, transB=1)

    def finish(self, output: str, classes: int, name: str) -> onnx.ModelProto:
        """The model whose logits are `output`."""
        self._nodes.append(helper.make_node("Identity", [output], ["logits"], name="logits"))
        value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])
        graph = helper.make_graph(self._nodes, name, [self._input], [value], self._initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="taste-edge")

    def _node(self, op: str, inputs: Sequence[str], name: str, **attrs: Any) -> str:
        self._nodes.append(helper.make_node(op, inputs, [name], name=name, **attrs))
        return name

    def _weight(self, name: str, shape: Sequence[int], value: float = 0.0) -> str:
        self._initializers.append(numpy_helper.from_array(np.array(shape, np.int64), f"{name}/shape"))
        fill = helper.make_tensor("value", TensorProto.FLOAT, [1], [value])
        self._nodes.append(helper.make_node("ConstantOfShape", [f"{name}/shape"], [name], name=name, value=fill))
        return name

    def _constant(self, name: str, value: float) -> str:
        self._initializers.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name


def _dotted(name: str) -> str:
    return name.replace("/", ".")
