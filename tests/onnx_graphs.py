"""ONNX graphs of the kinds that people have, drawn node by node, and the check that import keeps their function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from cross.graph import Model
from cross.load_model import load_model
from tests.numpy_forward import numpy_forward

Array = np.ndarray[Any, np.dtype[Any]]


class Sketch:
    """A graph being drawn. `constant_nodes`: weights as Constant nodes instead of initializers."""

    def __init__(
        self, dims: Sequence[int | str], *, opset: int = 17, constant_nodes: bool = False, seed: int = 0
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
        self.opset = opset
        self.constant_nodes = constant_nodes
        self.random = np.random.default_rng(seed)

    def node(self, op: str, *inputs: str, name: str = "", outputs: int = 1, domain: str = "", **attrs: Any) -> str:
        """Add a node; returns its first output, the others are that name with .1, .2 ..."""
        output = name or f"{op.lower()}_{len(self.nodes)}"
        outputs_ = [output, *(f"{output}.{i}" for i in range(1, outputs))]
        self.nodes.append(helper.make_node(op, inputs, outputs_, name=output, domain=domain, **attrs))
        return output

    def stored(self, value: Any, name: str = "") -> str:
        """Add a constant as it is."""
        array = np.asarray(value)
        name = name or f"stored_{len(self.nodes)}_{len(self.initializers)}"
        tensor = numpy_helper.from_array(array, name)
        if self.constant_nodes:
            self.nodes.append(helper.make_node("Constant", [], [name], name=f"{name}/node", value=tensor))
        else:
            self.initializers.append(tensor)
        return name

    def weight(self, *shape: int, name: str = "") -> str:
        """Add random float32 weights of a size that keeps the signal's."""
        fan_in = max(int(np.prod(shape[1:])), 1)
        return self.stored(self.random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(fan_in)), name)

    def batch_norm(self, x: str, channels: int, name: str = "") -> str:
        one, spread = np.ones(channels, np.float32), self.random.uniform(0.5, 1.5, (2, channels)).astype(np.float32)
        shift = self.random.standard_normal((2, channels)).astype(np.float32)
        stored = [self.stored(v) for v in (one * spread[0], shift[0], shift[1], spread[1])]
        return self.node("BatchNormalization", x, *stored, name=name)

    def model(self, *outputs: str) -> onnx.ModelProto:
        values = [helper.make_empty_tensor_value_info(o) for o in outputs]
        graph = helper.make_graph(self.nodes, "sketch", self.inputs, values, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def save(self, path: Path, *outputs: str) -> Path:
        path.write_bytes(self.model(*outputs).SerializeToString())
        return path


def imported(path: Path, x: Array, **options: Any) -> tuple[Model, Array]:
    """The model, and what our numpy oracle computes with it for a batch in the file's own layout."""
    model = load_model(path, **options)
    if model.metadata["input_layout"] == "nhwc":
        x = np.moveaxis(x, 3, 1)
    values = numpy_forward(model, x)
    wrong = [n for n, v in values.items() if v.shape != model.tensors[n].numpy_shape(len(x))]
    assert not wrong, f"declared shapes differ: {wrong}"
    result = values[model.output]
    if model.metadata["softmax"]:
        result = result - result.max(-1, keepdims=True)
        result = result - np.log(np.exp(result).sum(-1, keepdims=True))
        result = np.exp(result) if model.metadata["softmax"] == "softmax" else result
    return model, result


def run_reference(path: Path, x: Array) -> Array:
    """The file's only output by onnx's reference implementation (wrong for old softmax and batch norm, and for LRN)."""
    evaluator = ReferenceEvaluator(onnx.load(path))
    return np.asarray(evaluator.run(None, {evaluator.input_names[0]: x})[0])


def run_onnxruntime(path: Path, x: Array) -> Array:
    """The file's only output by ONNX Runtime, a test dependency; unused inputs are left out."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def assert_same_function(
    path: Path,
    x: Array,
    *,
    run: Callable[[Path, Array], Array] = run_reference,
    one_by_one: bool = False,
    **options: Any,
) -> Model:
    """Import, run, and compare with a reference to 1e-4 of the largest value.

    `one_by_one`: the file takes one sample at a time; ours takes them all.
    """
    model, result = imported(path, x, **options)
    wanted = np.concatenate([run(path, x[i : i + 1]) for i in range(len(x))]) if one_by_one else run(path, x)
    assert np.isfinite(wanted).all() and np.ptp(wanted) > 0
    np.testing.assert_allclose(result.reshape(wanted.shape), wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))
    return model


def operators_of(model: Model) -> Mapping[str, int]:
    """How often each operator occurs."""
    counts: dict[str, int] = {}
    for node in model.nodes:
        counts[node.op] = counts.get(node.op, 0) + 1
    return counts


def keras_style(path: Path, *, softmax: bool = True, flatten: bool = False) -> Path:
    """A small MobileNet as tf2onnx writes it without optimising: [N,H,W,C], every convolution between transposes.

    SAME padding (asymmetric at stride 2), ReLU6 as Clip, depthwise as groups, an explicit Pad, a residual Add, a
    squeeze-and-excite gate, biases of [C] added channels-last.
    """
    s = Sketch(["n", 12, 10, 3])

    def convolution(x: str, weight: str, **attrs: Any) -> str:
        first = s.node("Transpose", x, perm=[0, 3, 1, 2])
        return s.node("Transpose", s.node("Conv", first, weight, **attrs), perm=[0, 2, 3, 1])

    def norm(x: str, channels: int) -> str:
        first = s.node("Transpose", x, perm=[0, 3, 1, 2])
        return s.node("Transpose", s.batch_norm(first, channels), perm=[0, 2, 3, 1])

    def relu6(x: str) -> str:
        return s.node("Clip", x, s.stored(np.float32(0)), s.stored(np.float32(6)))

    x = convolution("x", s.weight(8, 3, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2])
    x = relu6(norm(x, 8))
    y = convolution(x, s.weight(8, 1, 3, 3), auto_pad="SAME_UPPER", group=8)
    y = relu6(norm(y, 8))
    y = convolution(y, s.weight(8, 8, 1, 1))
    x = s.node("Add", s.node("Add", y, s.stored(s.random.standard_normal(8).astype(np.float32))), x, name="residual")
    x = s.node("Pad", x, s.stored(np.array([0, 0, 1, 0, 0, 1, 0, 0])))
    x = relu6(norm(convolution(x, s.weight(12, 8, 3, 3), strides=[2, 2]), 12))
    gate = s.node("ReduceMean", x, axes=[1, 2], keepdims=0)
    gate = s.node("Sigmoid", s.node("MatMul", gate, s.weight(12, 12)))
    x = s.node("Mul", x, s.node("Reshape", gate, s.stored(np.array([-1, 1, 1, 12]))))
    pooled = s.node("MaxPool", s.node("Transpose", x, perm=[0, 3, 1, 2]), kernel_shape=[2, 2], strides=[1, 1])
    x = s.node("Transpose", pooled, perm=[0, 2, 3, 1])
    x = s.node("Concat", x, s.node("LeakyRelu", x), axis=3)
    if flatten:
        x = s.node("Reshape", x, s.stored(np.array([-1, 24 * 2 * 1])))
        features = 48
    else:
        x = s.node("GlobalAveragePool", s.node("Transpose", x, perm=[0, 3, 1, 2]))
        x = s.node("Squeeze", x, s.stored(np.array([2, 3])))
        features = 24
    x = s.node("Add", s.node("MatMul", x, s.weight(features, 5, name="dense/kernel")), s.weight(5, name="dense/bias"))
    return s.save(path, s.node("Softmax", x) if softmax else x)
