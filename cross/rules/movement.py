"""Data movement: its gradient is the inverse movement."""

from __future__ import annotations

from cross.graph import Node, TensorType
from cross.rules.context import Context


def reshape(context: Context, node: Node) -> None:
    context.build.emit("reshape", node.inputs, [context.type(node.outputs[0])], {}, node.outputs)


def reshape_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    (x,) = node.inputs
    return {x: context.build.emit("reshape", [dy], [context.type(x)])[0]}


def transpose(context: Context, node: Node) -> None:
    attrs = {"perm": tuple(node.attrs["perm"])}
    context.build.emit("transpose", node.inputs, [context.type(node.outputs[0])], attrs, node.outputs)


def transpose_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    (x,), perm = node.inputs, tuple(node.attrs["perm"])
    inverse = tuple(perm.index(i) for i in range(len(perm)))
    return {x: context.build.emit("transpose", [dy], [context.type(x)], {"perm": inverse})[0]}


def concat(context: Context, node: Node) -> None:
    attrs = {"axis": int(node.attrs["axis"])}
    context.build.emit("concat", node.inputs, [context.type(node.outputs[0])], attrs, node.outputs)


def concat_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    """Each input's slice of dy; an input that comes twice gets the sum."""
    axis, start = int(node.attrs["axis"]), 0
    found: dict[str, str] = {}
    for name in node.inputs:
        kind = context.type(name)
        starts = tuple(start if i == axis else 0 for i in range(len(kind.shape)))
        start += kind.shape[axis]
        if name in context.wanted:
            part = context.build.emit("slice", [dy], [kind], {"starts": starts, "steps": (1,) * len(starts)})[0]
            if name in found:
                part = context.build.map(("add", ("input", 0), ("input", 1)), (found[name], part), kind)
            found[name] = part
    return found


def slice_(context: Context, node: Node) -> None:
    attrs = {"starts": tuple(node.attrs["starts"]), "steps": tuple(node.attrs["steps"])}
    context.build.emit("slice", node.inputs, [context.type(node.outputs[0])], attrs, node.outputs)


def slice_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    (x,) = node.inputs
    attrs = {"starts": tuple(node.attrs["starts"]), "steps": tuple(node.attrs["steps"]), "value": 0.0}
    return {x: context.build.emit("unslice", [dy], [context.type(x)], attrs)[0]}


def pad(context: Context, node: Node) -> None:
    """A constant frame: the inverse of a slice."""
    starts = tuple(int(before) for before, _ in node.attrs["pads"])
    attrs = {"starts": starts, "steps": (1,) * len(starts), "value": float(node.attrs["value"])}
    context.build.emit("unslice", node.inputs, [context.type(node.outputs[0])], attrs, node.outputs)


def pad_gradient(context: Context, node: Node, dy: str) -> dict[str, str]:
    (x,) = node.inputs
    starts = tuple(int(before) for before, _ in node.attrs["pads"])
    kind: TensorType = context.type(x)
    return {x: context.build.emit("slice", [dy], [kind], {"starts": starts, "steps": (1,) * len(starts)})[0]}
