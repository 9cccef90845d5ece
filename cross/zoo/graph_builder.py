"""Write a zoo model as ONNX: layers by name, parameters named as PyTorch's state_dict names them.

Weights are ConstantOfShape nodes, so a model is a few kilobytes whatever its size; values come from the seed
(`cross.initialise`) when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


class GraphBuilder:
    """Layers return their output tensor. `name` is the node's, `scope/leaf`; parameters are `scope.leaf.weight` ..."""

    def __init__(self, input_shape: Sequence[int], *, tokens: bool = False) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        kind = TensorProto.INT64 if tokens else TensorProto.FLOAT
        self._input = helper.make_tensor_value_info("input", kind, ["batch", *input_shape])
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
        """Square convolution, padded to keep the size at stride 1 (an odd kernel). `channels`: in, out."""
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

    def mul(self, a: str, b: str, name: str) -> str:
        return self._node("Mul", [a, b], name)

    def sigmoid(self, x: str, name: str) -> str:
        return self._node("Sigmoid", [x], name)

    def gelu(self, x: str, name: str) -> str:
        """x (1 + erf(x / sqrt 2)) / 2 in the five steps that opset 17 has."""
        root = self._node("Div", [x, self._constant(f"{name}/root", math.sqrt(2.0))], f"{name}/div")
        share = self._node("Add", [self._node("Erf", [root], f"{name}/erf"), self._constant(f"{name}/one", 1.0)],
                           f"{name}/add")  # fmt: skip
        return self._node(
            "Mul", [self._node("Mul", [x, share], f"{name}/mul"), self._constant(f"{name}/half", 0.5)], name
        )

    def max_pool(self, x: str, name: str, kernel: int, stride: int, pad: int | None = None, ceil: bool = False) -> str:
        """Max pooling; `pad` on each side, half the kernel where it is not given."""
        pads = [kernel // 2 if pad is None else pad] * 4
        strides = [stride] * 2
        return self._node(
            "MaxPool", [x], name, kernel_shape=[kernel] * 2, strides=strides, pads=pads, ceil_mode=int(ceil)
        )

    def global_average_pool(self, x: str, name: str) -> str:
        return self._node("Flatten", [self._node("GlobalAveragePool", [x], name)], f"{name}/flatten", axis=1)

    def flatten(self, x: str, name: str) -> str:
        return self._node("Flatten", [x], name, axis=1)

    def linear(self, x: str, name: str, features: tuple[int, int]) -> str:
        """Dense layer with bias. `features`: in, out."""
        weight = self._weight(f"{_dotted(name)}.weight", features[::-1])
        bias = self._weight(f"{_dotted(name)}.bias", features[1:])
        return self._node("Gemm", [x, weight, bias], name, transB=1)

    def rows_linear(self, x: str, name: str, features: tuple[int, int]) -> str:
        """Dense layer with bias on every row of [N, T, in]."""
        prefix = _dotted(name)
        weight = self._weight(f"{prefix}.weight", features[::-1])
        turned = self._node("Transpose", [weight], f"{name}/weight", perm=[1, 0])
        y = self._node("MatMul", [x, turned], f"{name}/MatMul")
        return self._node("Add", [y, self._weight(f"{prefix}.bias", features[1:])], name)

    def layer_norm(self, x: str, name: str, width: int) -> str:
        """Over the last axis; eps 1e-5."""
        prefix = _dotted(name)
        inputs = [x, self._weight(f"{prefix}.weight", (width,), 1.0), self._weight(f"{prefix}.bias", (width,))]
        return self._node("LayerNormalization", inputs, name, axis=-1, epsilon=1e-5)

    def embedding(self, tokens: str, name: str, rows: int, width: int) -> str:
        return self._node("Gather", [self._weight(f"{_dotted(name)}.weight", (rows, width)), tokens], name, axis=0)

    def plus_parameter(self, x: str, name: str, shape: Sequence[int]) -> str:
        """x plus a trained tensor that is called `name` and broadcast over the batch."""
        return self._node("Add", [x, self._weight(_dotted(name), shape)], f"{name}/add")

    def plus_constant(self, x: str, name: str, value: np.ndarray[Any, Any]) -> str:
        """x plus stored numbers; the constant is called `name`, and stored once."""
        if all(known.name != name for known in self._initializers):
            self._initializers.append(numpy_helper.from_array(value.astype(np.float32), name))
        return self._node("Add", [x, name], f"{x}/{name}")

    def times(self, x: str, factor: float, name: str) -> str:
        return self._node("Mul", [x, self._constant(f"{name}/factor", factor)], name)

    def matmul(self, a: str, b: str, name: str) -> str:
        return self._node("MatMul", [a, b], name)

    def softmax(self, x: str, name: str) -> str:
        """Over the last axis."""
        return self._node("Softmax", [x], name, axis=-1)

    def reshape(self, x: str, name: str, shape: Sequence[int]) -> str:
        """[N, ...] as [N, *shape]."""
        return self._node("Reshape", [x, self._integers(f"{name}/shape", (0, *shape))], name)

    def transpose(self, x: str, name: str, perm: Sequence[int]) -> str:
        return self._node("Transpose", [x], name, perm=list(perm))

    def concat(self, parts: Sequence[str], name: str) -> str:
        """Along the channels."""
        return self._node("Concat", parts, name, axis=1)

    def channels(self, x: str, name: str, first: int, end: int) -> str:
        """Channels [first, end) of an image."""
        spans = [self._integers(f"{name}/{k}", (v,)) for k, v in (("first", first), ("end", end), ("axis", 1))]
        return self._node("Slice", [x, *spans], name)

    def every_second_pixel(self, x: str, name: str) -> str:
        spans = (("first", (0, 0)), ("end", (2**31 - 1,) * 2), ("axes", (2, 3)), ("steps", (2, 2)))
        return self._node("Slice", [x, *(self._integers(f"{name}/{k}", v) for k, v in spans)], name)

    def pad_channels(self, x: str, name: str, count: int) -> str:
        """`count` channels of zeros before and after."""
        return self._node("Pad", [x, self._integers(f"{name}/pads", (0, count, 0, 0, 0, count, 0, 0))], name)

    def mean_of_pixels(self, x: str, name: str) -> str:
        """[N, C, 1, 1]."""
        return self._node("GlobalAveragePool", [x], name)

    def finish(self, output: str, classes: int, name: str, rows: Sequence[int] = ()) -> onnx.ModelProto:
        """The model whose logits [N, *rows, classes] are `output`."""
        self._nodes.append(helper.make_node("Identity", [output], ["logits"], name="logits"))
        value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", *rows, classes])
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

    def _integers(self, name: str, values: Sequence[int]) -> str:
        self._initializers.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name


def _dotted(name: str) -> str:
    return name.replace("/", ".")
