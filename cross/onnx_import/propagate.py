"""Constant folding, and shapes in which the batch is symbolic.

Shapes are worked out at two batch sizes with concrete numbers. A dimension that follows the batch in both is the batch;
everything that shape arithmetic (Shape, Gather, Concat, ...) computes is then a plain number. A first run at the batch
size that the file declares shows what a baked-in Reshape meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from cross.errors import CorruptInputError, UnsupportedModelError
from cross.graph import BATCH, Origin, Shape
from cross.onnx_import.heads import unmerge_heads
from cross.onnx_import.source import SourceGraph, display_name, single_precision

Array = np.ndarray[Any, np.dtype[Any]]

FOLDABLE = frozenset(
    """Abs Add And Cast CastLike Ceil Clip Concat ConstantOfShape DequantizeLinear Div Equal Exp Expand Flatten Floor
    Gather Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Pow Range Reciprocal ReduceMax
    ReduceMin ReduceProd ReduceSum Reshape Shape Size Slice Split Sqrt Squeeze Sub Tile Transpose Trilu Unsqueeze
    Where""".split()
)
"""Operators evaluated where all their inputs are known."""

RENAMING = frozenset(("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Flatten"))
"""Folded, they leave the same weights in another order: the result keeps the user's name."""

BATCHES = (2, 3)
_SMALL_ELEMENTS = 4096
_ONNX_ERRORS = (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, onnx.checker.ValidationError)
_FOLD_LIMIT_BYTES = 2 << 30
"""Of one folded constant, and of all: a file of a few bytes can ask for any amount."""


@dataclass(frozen=True)
class Propagated:
    """What is left to convert: nodes, symbolic shapes, every known value, and where folded weights come from."""

    nodes: tuple[NodeProto, ...]
    shapes: Mapping[str, Shape]
    values: Mapping[str, Array]
    origins: Mapping[str, Origin]
    opset: int


@dataclass
class _Run:
    """One walk over the graph at one concrete batch size."""

    types: dict[str, TypeProto]
    values: dict[str, Array]

    def dims(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor that is not stored, None where it is not known."""
        return _dims(self.types.get(name))


Shapes = Mapping[str, tuple[int, ...]]


def fold_constants(source: SourceGraph) -> tuple[SourceGraph, dict[str, Origin]]:
    """Evaluate what depends on neither input nor batch. Also returns {folded tensor: initializer it only reorders}."""
    constants = dict(source.constants)
    origins: dict[str, Origin] = {}
    remaining, made_bytes = [], 0
    for node in source.nodes:
        names = [i for i in node.input if i]
        if node.domain in ("", "ai.onnx") and node.op_type in FOLDABLE and all(i in constants for i in names):
            made = _evaluate(node, constants, source.opset)
            made_bytes += sum(array.nbytes for array in made.values())
            _check_size(node, made_bytes)
            constants.update(made)
            if node.op_type in RENAMING or _takes_all(node, constants):
                before = origins.get(names[0], Origin(names[0]))
                steps = (*before.steps, *_reordering(node, constants[names[0]].shape))
                origins[node.output[0]] = Origin(before.tensor, (), steps, len(steps))
        else:
            remaining.append(node)
    folded = replace(source, nodes=tuple(remaining), constants=constants)
    return folded, origins


def _reordering(node: NodeProto, before: Shape) -> tuple[tuple[str, Shape], ...]:
    """What a node of RENAMING does to an array of shape `before`, as steps of an Origin."""
    if node.op_type == "Cast":
        return ()
    if node.op_type != "Transpose":
        return (("reshape", before),)
    perm = next((tuple(a.ints) for a in node.attribute if a.name == "perm"), tuple(range(len(before)))[::-1])
    return (("transpose", perm),)


def _takes_all(node: NodeProto, values: Mapping[str, Array]) -> bool:
    """Whether a Gather or Slice takes a whole table in order, as position embeddings of full length do."""
    if node.op_type not in ("Gather", "Slice"):
        return False
    whole, taken = values[node.input[0]], values[node.output[0]]
    return whole.ndim > 1 and whole.size == taken.size and np.array_equal(whole.ravel(), taken.ravel())


def propagate(source: SourceGraph, sample_shape: Shape, origins: Mapping[str, Origin]) -> Propagated:
    """Symbolic shapes of a folded graph whose input is [BATCH, *sample_shape].

    Raises UnsupportedModelError where a tensor mixes the batch with another dimension, CorruptInputError where shapes
    clash.
    """
    declared = source.input_dims[0] if source.input_dims else None
    baked = _try_run(source, declared or 1, sample_shape)
    first, second = (_run(source, batch, sample_shape, baked) for batch in BATCHES)
    nodes = tuple(
        node for node in source.nodes if not all(o in first.values and o in second.values for o in node.output if o)
    )
    nodes = unmerge_heads(nodes, source.output, (first.dims, second.dims))
    values = {**source.constants, **_common_values(first.values, second.values)}
    used = {source.output}.union(*(node.input for node in nodes))
    shapes: dict[str, Shape] = {source.input: (BATCH, *sample_shape)}
    for node in nodes:
        for name in node.output:
            if name in used and name in first.types and name in second.types:
                shapes[name] = _symbolic(_dims(first.types[name]), _dims(second.types[name]), node)
    shapes.update({name: array.shape for name, array in values.items()})
    return Propagated(nodes, shapes, values, origins, source.opset)


def _try_run(source: SourceGraph, batch: int, sample_shape: Shape) -> Shapes:
    """Shapes at the file's own batch size; empty where the graph does not work at that size."""
    try:
        run = _run(source, batch, sample_shape, {})
    except (UnsupportedModelError, CorruptInputError):
        return {}
    return {name: dims for name, kind in run.types.items() if (dims := _dims(kind)) is not None}


def _run(source: SourceGraph, batch: int, sample_shape: Shape, baked: Shapes) -> _Run:
    kind = onnx.helper.make_tensor_type_proto(source.input_type, (batch, *sample_shape))
    run = _Run({source.input: kind}, dict(source.constants))
    for node in source.nodes:
        names = [i for i in node.input if i]
        known = node.op_type in FOLDABLE and all(i in run.values for i in names)
        if node.op_type in ("Shape", "Size") and _dims(run.types.get(names[0])) is not None:
            run.values[node.output[0]] = _shape_value(node, _dims(run.types[names[0]]) or ())
        elif known:
            run.values.update(_evaluate(node, run.values, source.opset))
        else:
            _infer(node, run, source, batch, baked)
    return run


def _infer(node: NodeProto, run: _Run, source: SourceGraph, batch: int, baked: Shapes) -> None:
    """Output types of a node that computes on data, from onnx's own inference."""
    if node.op_type == "Reshape" and (shape := _unbaked(node, run, batch, baked, source)) is not None:
        run.types[node.output[0]] = onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, shape)
        return
    types, data = {}, {}
    for name in filter(None, node.input):
        if name in run.values:
            value = run.values[name]
            types[name] = onnx.helper.make_tensor_type_proto(
                onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            if value.size <= _SMALL_ELEMENTS:
                data[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        elif name in run.types:
            types[name] = run.types[name]
        else:
            return
    try:
        schema = onnx.defs.get_schema(node.op_type, source.opset, node.domain)
        opset = [onnx.helper.make_opsetid("", source.opset)]
        run.types.update(onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opset))
    except (RuntimeError, ValueError, *_ONNX_ERRORS) as error:
        raise CorruptInputError(
            f"{node.op_type} {display_name(node)!r} does not fit its inputs at batch {batch}: {_reason(error)}. "
            "Check the input shape, or export the model again."
        ) from error


def _unbaked(node: NodeProto, run: _Run, batch: int, baked: Shapes, source: SourceGraph) -> tuple[int, ...] | None:
    """What a Reshape whose constant names the file's batch size means at another; None for any other Reshape."""
    target = source.constants.get(node.input[1]) if len(node.input) > 1 else None
    before, after = baked.get(node.input[0]), baked.get(node.output[0])
    if target is None or target.size == 0 or not before or not after:
        return None
    if int(target.flat[0]) <= 0 or not int(target.flat[0]) == before[0] == after[0]:
        return None
    now = _dims(run.types.get(node.input[0]))
    if now is None or now[0] != batch or prod(now[1:]) != prod(after[1:]):
        return None
    return (batch, *after[1:])


def _shape_value(node: NodeProto, dims: tuple[int, ...]) -> Array:
    if node.op_type == "Size":
        return np.array(prod(dims), np.int64)
    attrs = {a.name: a.i for a in node.attribute}
    return np.array(dims[attrs.get("start", 0) : attrs.get("end", len(dims))], np.int64)


def _evaluate(node: NodeProto, values: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """The node's outputs, by onnx's reference implementation. Sizes first: a small file can ask for a lot."""
    if node.op_type == "ConstantOfShape":
        return {node.output[0]: _constant_of_shape(node, values)}
    _refuse_huge(node, values)
    names = list(dict.fromkeys(i for i in node.input if i))
    graph = onnx.helper.make_graph(
        [node],
        "fold",
        [
            onnx.helper.make_tensor_value_info(
                i, onnx.helper.np_dtype_to_tensor_dtype(values[i].dtype), values[i].shape
            )
            for i in names
        ],
        [onnx.ValueInfoProto(name=o) for o in node.output if o],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        results = ReferenceEvaluator(model).run(None, {i: values[i] for i in names})
    except Exception as error:  # the reference evaluator raises whatever numpy raises
        raise CorruptInputError(
            f"{node.op_type} {display_name(node)!r} cannot be evaluated: {_reason(error)}. Export the model again."
        ) from error
    return {o: single_precision(np.asarray(r)) for o, r in zip(filter(None, node.output), results, strict=True)}


def _constant_of_shape(node: NodeProto, values: Mapping[str, Array]) -> Array:
    """A view without memory of its own: light files describe large constant weights this way."""
    value = np.zeros((), np.float32)
    for attribute in node.attribute:
        value = single_precision(numpy_helper.to_array(attribute.t)).reshape(())
    shape = tuple(int(d) for d in values[node.input[0]])
    _check_size(node, 4.0 * prod(shape))
    return np.broadcast_to(value, shape)


_GROWING: Mapping[str, Callable[..., float]] = {
    "Expand": lambda x, shape: float(np.prod(np.abs(shape), dtype=np.float64)) * max(x.size, 1),
    "Tile": lambda x, repeats, *_: float(np.prod(np.abs(repeats), dtype=np.float64)) * max(x.size, 1),
    "Range": lambda start, limit, delta: abs(float(limit) - float(start)) / max(abs(float(delta)), 1e-30),
}


def _refuse_huge(node: NodeProto, values: Mapping[str, Array]) -> None:
    inputs = [values[i] for i in node.input if i]
    elements = float(sum(i.size for i in inputs))
    if node.op_type in _GROWING:
        elements = _GROWING[node.op_type](*inputs)
    elif len(inputs) > 1:
        elements = float(np.prod([max(d) for d in _aligned(inputs)], dtype=np.float64)) + elements
    _check_size(node, elements * 4)


def _check_size(node: NodeProto, size_bytes: float) -> None:
    if size_bytes > _FOLD_LIMIT_BYTES:
        raise CorruptInputError(
            f"{node.op_type} {display_name(node)!r} would make constants of {size_bytes / 2**30:.1f} GiB. "
            "Export the model again."
        )


def _aligned(arrays: list[Array]) -> list[tuple[int, ...]]:
    """Dimensions that broadcasting would bring together, from the last one on."""
    rank = max(a.ndim for a in arrays)
    return list(zip(*((1,) * (rank - a.ndim) + a.shape for a in arrays), strict=True))


def _dims(kind: TypeProto | None) -> tuple[int, ...] | None:
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None


def _symbolic(first: tuple[int, ...] | None, second: tuple[int, ...] | None, node: NodeProto) -> Shape:
    where = f"{node.op_type} {display_name(node)!r}"
    if first is None or second is None:
        raise UnsupportedModelError(f"{where}: its output's shape depends on data. Export it with fixed shapes.")
    if len(first) != len(second):
        raise UnsupportedModelError(f"{where}: its output's rank depends on the batch. Keep the batch first.")
    moving = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not moving:
        raise UnsupportedModelError(f"{where}: its output {list(first)} has no batch dimension. Keep the batch first.")
    if len(moving) > 1:
        raise UnsupportedModelError(f"{where}: its output grows with the square of the batch, which is not trained.")
    if moving != [0] or (first[0], second[0]) != BATCHES:
        raise UnsupportedModelError(
            f"{where}: its output mixes the batch with another dimension ({list(first)} at batch {BATCHES[0]}). "
            "Keep the batch first and alone."
        )
    return (BATCH, *first[1:])


def _common_values(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Array]:
    """Values that do not depend on the batch, or only repeat one row for it."""
    common = {}
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        if a is b or (a.shape == b.shape and np.array_equal(a, b)):
            common[name] = a
        elif a.ndim and (a.shape[:1] + b.shape[:1]) == BATCHES and a.shape[1:] == b.shape[1:]:
            rows = np.concatenate([a, b])
            if np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)):
                common[name] = a[:1]
    return common


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
