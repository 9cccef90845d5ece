"""What each ONNX operator becomes: one table. Preflight and conversion walk over the nodes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from onnx import NodeProto

from cross.errors import UnsupportedModelError
from cross.graph import Node
from cross.onnx_import import elementwise_operators as elementwise
from cross.onnx_import import layer_operators as layer
from cross.onnx_import import shape_operators as shape
from cross.onnx_import.draft import Draft
from cross.onnx_import.operator import NotConvertible, Operator, read_attributes
from cross.onnx_import.propagate import FOLDABLE, Propagated
from cross.onnx_import.source import display_name

Conversion = Callable[[Operator], str | tuple[str, ...]]

CONVERSIONS: Mapping[str, Conversion] = {
    "Add": elementwise.binary("add"),
    "AveragePool": layer.average_pool,
    "BatchNormalization": layer.batch_norm,
    "Cast": elementwise.cast,
    "Clip": elementwise.clip,
    "Concat": shape.concat,
    "Conv": layer.conv,
    "DepthToSpace": shape.depth_to_space,
    "Div": elementwise.binary("div"),
    "Dropout": elementwise.dropout,
    "Erf": elementwise.unary("erf"),
    "Exp": elementwise.unary("exp"),
    "Expand": shape.expand,
    "Flatten": shape.reshape,
    "Gather": shape.gather,
    "Gelu": elementwise.gelu,
    "Gemm": layer.gemm,
    "GlobalAveragePool": layer.global_average_pool,
    "GlobalMaxPool": layer.global_max_pool,
    "HardSigmoid": elementwise.unary("hard_sigmoid", alpha=0.2, beta=0.5),
    "HardSwish": elementwise.unary("hard_swish"),
    "Identity": elementwise.same,
    "LRN": layer.lrn,
    "LayerNormalization": layer.layer_norm,
    "LeakyRelu": elementwise.unary("leaky_relu", alpha=0.01),
    "LogSoftmax": elementwise.softmax("log_softmax"),
    "MatMul": layer.matmul,
    "Max": elementwise.bound_below,
    "MaxPool": layer.max_pool,
    "Min": elementwise.bound_above,
    "Mul": elementwise.binary("mul"),
    "Neg": elementwise.unary("neg"),
    "PRelu": elementwise.prelu,
    "Pad": shape.pad,
    "Pow": elementwise.power,
    "Reciprocal": elementwise.reciprocal,
    "ReduceMean": shape.reduce("reduce_mean"),
    "ReduceSum": shape.reduce("reduce_sum"),
    "Relu": elementwise.unary("relu"),
    "Reshape": shape.reshape,
    "Sigmoid": elementwise.unary("sigmoid"),
    "Slice": shape.slice_,
    "Softmax": elementwise.softmax("softmax"),
    "SpaceToDepth": shape.space_to_depth,
    "Split": shape.split,
    "Sqrt": elementwise.unary("sqrt"),
    "Squeeze": shape.reshape,
    "Sub": elementwise.binary("sub"),
    "Sum": elementwise.add_all,
    "Swish": elementwise.swish,
    "Tanh": elementwise.unary("tanh"),
    "Transpose": shape.transpose,
    "Unsqueeze": shape.reshape,
    "Where": elementwise.where,
}


def preflight(nodes: Iterable[NodeProto], *, folded: bool) -> None:
    """Refuse operators that are not in the table, all in one message, before anything is computed or compiled.

    Before folding (`folded` false) shape arithmetic is let through; after it, what is left of it works on data.
    """
    missing: dict[str, list[str]] = {}
    for node in nodes:
        standard = node.domain in ("", "ai.onnx")
        known = standard and (node.op_type in CONVERSIONS or (not folded and node.op_type in FOLDABLE))
        if not known:
            kind = node.op_type if standard else f"{node.domain}.{node.op_type}"
            missing.setdefault(kind, []).append(display_name(node))
    if missing:
        listed = "; ".join(f"{kind} ({', '.join(names)})" for kind, names in sorted(missing.items()))
        raise UnsupportedModelError(
            f"{sum(map(len, missing.values()))} nodes use operators that cannot be trained: {listed}. "
            "Choose an output before them with --output, or replace them and export again."
        )


def convert(graph: Propagated, input_name: str, output_name: str) -> tuple[Draft, str]:
    """Every node by the table. Returns the draft and its output tensor.

    Raises UnsupportedModelError that names every node that could not be converted, with the reasons.
    """
    draft = Draft(input_name, shapes={input_name: graph.shapes[input_name]})
    tensors = {input_name: input_name}
    reserved = {name for node in graph.nodes for name in node.output}
    refused: list[str] = []
    for node in graph.nodes:
        operator = Operator(node, graph, draft, tensors, read_attributes(node))
        first = len(draft.nodes)
        try:
            results = CONVERSIONS[node.op_type](operator)
        except NotConvertible as reason:
            refused.append(f"{node.op_type} {display_name(node)!r}: {reason}")
            results = tuple(_placeholder(draft, graph, name) for name in node.output)
        for name, result in zip(node.output, (results,) if isinstance(results, str) else results, strict=False):
            tensors[name] = _rename(draft, first, result, name) if name in reserved else result
            if not refused and name in graph.shapes and draft.shapes[tensors[name]] != graph.shapes[name]:
                refused.append(f"{node.op_type} {display_name(node)!r}: shapes disagree")
            if 0 in draft.shapes.get(tensors[name], ()):
                refused.append(f"{node.op_type} {display_name(node)!r}: its output is empty")
    if refused:
        raise UnsupportedModelError(f"cannot be trained: {'; '.join(refused)}. Change these nodes and export again.")
    if output_name not in tensors:
        raise UnsupportedModelError(
            f"output {output_name!r} does not depend on the input. Choose another with --output."
        )
    return draft, tensors[output_name]


def _placeholder(draft: Draft, graph: Propagated, name: str) -> str:
    """Stands for the output of a refused node, so that the walk goes on and finds the others."""
    if name in graph.shapes:
        draft.shapes[name] = graph.shapes[name]
    return name


def _rename(draft: Draft, first: int, result: str, name: str) -> str:
    """Call a result made by this conversion by the user's tensor name."""
    for index in range(first, len(draft.nodes)):
        node = draft.nodes[index]
        if node.outputs == (result,) and name not in draft.shapes:
            draft.nodes[index] = Node(node.op, node.inputs, (name,), node.attrs, node.source)
            draft.shapes[name] = draft.shapes.pop(result)
            if result in draft.trained:
                draft.trained.add(name)
            return name
    return result
