"""A ModelProto as one plain graph: functions inlined, constants gathered, one input and one output, nothing unused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import NodeProto, TensorProto, numpy_helper

from cross.errors import CorruptInputError, UnsupportedModelError, UsageError

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16))
INTEGERS = frozenset((TensorProto.INT32, TensorProto.INT64))
"""An input of these types holds tokens."""

OLDEST_OPSET = 7
"""Before it, broadcasting was an attribute and batch norm had another meaning."""


@dataclass(frozen=True)
class SourceGraph:
    """Nodes in topological order; `input_dims` as declared, None where free; float constants are float32.

    `input_type`: TensorProto.FLOAT, or the integer type of tokens.
    """

    nodes: tuple[NodeProto, ...]
    constants: Mapping[str, Array]
    input: str
    input_dims: tuple[int | None, ...]
    output: str
    opset: int
    input_type: int = TensorProto.FLOAT


def single_precision(array: Array) -> Array:
    """Floating-point constants of any width as float32; everything is trained in float32."""
    is_float = array.dtype.kind == "f" or array.dtype.name in ("bfloat16",)
    return array.astype(np.float32) if is_float and array.dtype != np.float32 else array


def display_name(node: NodeProto) -> str:
    """The node's name, or its first output where the exporter gave none."""
    return node.name or next(iter(node.output), "?")


def build_source(model: onnx.ModelProto, input_name: str | None, output_name: str | None) -> SourceGraph:
    """Choose input and output and keep what lies between.

    Raises UsageError where the choice is open, UnsupportedModelError for inputs that are not floats and old opsets,
    CorruptInputError for tensors that nobody makes.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset < OLDEST_OPSET:
        raise UnsupportedModelError(f"opset {opset} is older than {OLDEST_OPSET}. Export again at opset 13 or newer.")
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    graph = model.graph
    if graph.sparse_initializer:
        raise UnsupportedModelError(
            f"sparse weights ({graph.sparse_initializer[0].values.name}). Export the model with dense weights."
        )
    constants = {t.name: single_precision(numpy_helper.to_array(t)) for t in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constants[node.output[0]] = single_precision(_constant_value(node))
        else:
            nodes.append(_single_precision_cast(node))
    inputs = {value.name: value for value in graph.input if value.name not in constants}
    output = _choose_output(graph, nodes, output_name)
    kept = _between(nodes, set(inputs) | set(constants), output)
    name = _choose_input(inputs, kept, input_name)
    used = {i for node in kept for i in node.input}
    kind = inputs[name].type.tensor_type.elem_type
    return SourceGraph(
        tuple(kept),
        {k: v for k, v in constants.items() if k in used},
        name,
        _dims(inputs[name]),
        output,
        opset,
        kind if kind in INTEGERS else TensorProto.FLOAT,
    )


def _constant_value(node: NodeProto) -> Array:
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return numpy_helper.to_array(value)
    if attribute.name in ("value_float", "value_floats"):
        return np.array(value, np.float32)
    if attribute.name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    raise UnsupportedModelError(f"Constant {display_name(node)!r} holds {attribute.name}. Only numbers are supported.")


def _single_precision_cast(node: NodeProto) -> NodeProto:
    if node.op_type != "Cast":
        return node
    to = next((a.i for a in node.attribute if a.name == "to"), TensorProto.FLOAT)
    if to not in FLOATS:
        return node
    return onnx.helper.make_node("Cast", node.input, node.output, name=node.name, to=TensorProto.FLOAT)


def _choose_output(graph: onnx.GraphProto, nodes: Iterable[NodeProto], output_name: str | None) -> str:
    """The graph's output, or any tensor of it by name."""
    names = [str(value.name) for value in graph.output]
    if output_name is not None:
        if output_name not in names and not any(output_name in node.output for node in nodes):
            raise UsageError(f"the model has no output {output_name!r}. It has: {', '.join(names)}.")
        return output_name
    if len(names) != 1:
        raise UsageError(f"the model has {len(names)} outputs: {', '.join(names)}. Choose one with --output.")
    return names[0]


def _choose_input(inputs: Mapping[str, onnx.ValueInfoProto], nodes: list[NodeProto], input_name: str | None) -> str:
    used = {i for node in nodes for i in node.input}
    needed = [name for name in inputs if name in used]
    if input_name is not None and input_name not in inputs:
        raise UsageError(f"the model has no input {input_name!r}. It has: {', '.join(inputs) or 'none'}.")
    if not needed:
        raise UnsupportedModelError("the output depends on no input. Choose another with --output.")
    name = input_name or needed[0]
    others = [other for other in needed if other != name]
    if others and input_name is None:
        raise UsageError(f"the model has {len(needed)} inputs: {', '.join(needed)}. Choose one with --input.")
    if others:
        raise UnsupportedModelError(
            f"the output needs {', '.join(others)} beside {name}. Export the model with one input, or choose --output."
        )
    kind = inputs[name].type.tensor_type
    if kind.elem_type not in FLOATS | INTEGERS:
        dtype = TensorProto.DataType.Name(kind.elem_type).lower() if kind.elem_type else "no tensor"
        raise UnsupportedModelError(
            f"input {name!r} is {dtype}, not float32 or int64. Export the model with images or tokens as its input."
        )
    return name


def _dims(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    kind = value.type.tensor_type
    return tuple(d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in kind.shape.dim)


def _between(nodes: list[NodeProto], available: set[str], output: str) -> list[NodeProto]:
    """Nodes that the output depends on, sorted so that every tensor is made before it is used."""
    producer: dict[str, NodeProto] = {}
    for made in nodes:
        for name in filter(None, made.output):
            if name in producer or name in available:
                raise CorruptInputError(f"tensor {name!r} is made twice. The file is broken: export it again.")
            producer[name] = made
    order: list[NodeProto] = []
    state: dict[int, int] = {}
    stack: list[tuple[str, bool]] = [(output, False)]
    while stack:
        name, expanded = stack.pop()
        if name in available or not name:
            continue
        node = producer.get(name)
        if node is None:
            raise CorruptInputError(f"tensor {name!r} is used but never made. The file is broken: export it again.")
        key = id(node)
        if expanded:
            if state[key] == 1:
                state[key] = 2
                order.append(node)
            continue
        if state.get(key) == 2:
            continue
        if state.get(key) == 1:
            raise CorruptInputError(f"the graph has a cycle through {name!r}. The file is broken: export it again.")
        state[key] = 1
        stack.append((name, True))
        stack.extend((i, False) for i in reversed(node.input))
    return _in_file_order(nodes, order, available)


def _in_file_order(nodes: list[NodeProto], order: list[NodeProto], available: set[str]) -> list[NodeProto]:
    """The kept nodes as the file orders them, where that is a topological order as ONNX demands; else `order`."""
    kept = {id(node) for node in order}
    made = set(available) | {""}
    in_file = [node for node in nodes if id(node) in kept]
    for node in in_file:
        if not made.issuperset(node.input):
            return order
        made.update(node.output)
    return in_file
