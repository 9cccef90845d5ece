"""Channels-last graphs (Keras through tf2onnx) turned to channels-first, so that no layer is wrapped in transposes.

Transposes are not moved one by one. Every tensor may be known as a permuted view of another; operators that do not care
about the order work on that other tensor and pass the view on, the rest have it made real. What a convolution undid,
cancels. One walk over the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cross.graph import Node, Shape
from cross.onnx_import.draft import Draft
from cross.onnx_import.infer import BINARY, REDUCTIONS, UNARY

Perm = tuple[int, ...]

TO_CHANNELS_FIRST = (0, 3, 1, 2)
"""Applied to [N,H,W,C] gives [N,C,H,W]."""

_PIXELWISE = UNARY | BINARY | {"pad"}


@dataclass
class _Rewriter:
    """`views` maps a tensor of the old graph to (tensor of the new graph, perm): old = transpose(new, perm)."""

    old: Draft
    new: Draft
    views: dict[str, tuple[str, Perm]]
    real: dict[tuple[str, Perm], str] = field(default_factory=dict)

    def view(self, name: str) -> tuple[str, Perm]:
        return self.views.get(name, (name, tuple(range(len(self.old.shapes[name])))))

    def made_real(self, name: str, node: Node) -> str:
        """The tensor of the new graph that equals the old one; a transpose is added once where it is a view."""
        base, perm = self.view(name)
        return self.transposed(base, perm, name, node)

    def transposed(self, base: str, perm: Perm, name: str, node: Node) -> str:
        if perm == tuple(range(len(perm))):
            return base
        if (base, perm) not in self.real:
            shape = tuple(self.new.shapes[base][i] for i in perm)
            if _keeps_order(self.new.shapes[base], perm):
                made = self.new.emit("reshape", (base,), {"shape": shape}, name=f"{name}/moved", source=node.source)
            else:
                made = self.new.emit("transpose", (base,), {"perm": perm}, name=f"{name}/moved", source=node.source)
            self.real[base, perm] = made
        return self.real[base, perm]

    def emit(self, node: Node, inputs: tuple[str, ...], perm: Perm, **attrs: Any) -> None:
        """Write the node on permuted operands; its old output is a view of what it makes."""
        made = self.new.emit(node.op, inputs, {**node.attrs, **attrs}, name=node.outputs[0], source=node.source)
        self.views[node.outputs[0]] = (made, perm)


def to_channels_first(draft: Draft, output: str) -> tuple[Draft, str, bool]:
    """The same function, views resolved. Returns graph, output, and whether the input was turned to [N,C,H,W]."""
    new = draft.like()
    turned = _input_is_channels_last(draft)
    rewriter = _Rewriter(draft, new, {})
    if turned:
        n, height, width, channels = draft.shapes[draft.input]
        new.shapes[draft.input] = (n, channels, height, width)
        rewriter.views[draft.input] = (draft.input, (0, 2, 3, 1))
    for node in draft.nodes:
        _RULES.get(node.op, _as_it_is)(rewriter, node)
    result = rewriter.made_real(output, draft.nodes[-1])
    new.prune(result)
    return new, result, turned


def _input_is_channels_last(draft: Draft) -> bool:
    """Whether all that is done to [N,H,W,C] before it is turned is element-wise: scaling of pixels, padding."""
    if len(draft.shapes[draft.input]) != 4:
        return False
    readers = draft.consumers()
    waiting, turned = [draft.input], False
    while waiting:
        for node in readers.get(waiting.pop(), []):
            if _turns_input(draft, node):
                turned = True
            elif node.op in _PIXELWISE and sum(map(draft.is_data, node.inputs)) == 1:
                waiting.append(node.outputs[0])
            else:
                return False
    return turned


def _turns_input(draft: Draft, node: Node) -> bool:
    """A transpose to channels first, or the reshape that does the same to one channel."""
    n, height, width, channels = draft.shapes[node.inputs[0]]
    if node.op == "transpose":
        return bool(node.attrs["perm"] == TO_CHANNELS_FIRST)
    return node.op == "reshape" and channels == 1 and node.attrs["shape"] == (n, 1, height, width) and height != 1


def _keeps_order(shape: Shape, perm: Perm) -> bool:
    """Whether the permutation only moves dimensions of 1, which a reshape does as well."""
    moved = [i for i in perm if shape[i] != 1]
    return moved == sorted(moved)


def _compose(inner: Perm, outer: Perm) -> Perm:
    """transpose(transpose(x, inner), outer) = transpose(x, result)."""
    return tuple(inner[i] for i in outer)


def _inverse(perm: Perm) -> Perm:
    return tuple(perm.index(i) for i in range(len(perm)))


def _as_it_is(r: _Rewriter, node: Node) -> None:
    """Operators with an order of their own: their inputs are made real."""
    r.emit(node, tuple(r.made_real(i, node) for i in node.inputs), tuple(range(len(r.old.shapes[node.outputs[0]]))))


def _transpose(r: _Rewriter, node: Node) -> None:
    base, perm = r.view(node.inputs[0])
    r.views[node.outputs[0]] = (base, _compose(perm, node.attrs["perm"]))


def _reshape(r: _Rewriter, node: Node) -> None:
    """Where the view only moves dimensions of 1, the reshape can read what lies below it."""
    base, perm = r.view(node.inputs[0])
    below = _keeps_order(r.new.shapes[base], perm)
    x = base if below else r.made_real(node.inputs[0], node)
    shape = node.attrs["shape"]
    if x == r.new.input and r.new.shapes[x] == shape:
        r.views[node.outputs[0]] = (x, tuple(range(len(shape))))
        return
    r.emit(node, (x,), tuple(range(len(shape))))


def _unary(r: _Rewriter, node: Node) -> None:
    base, perm = r.view(node.inputs[0])
    r.emit(node, (base,), perm)


def _binary(r: _Rewriter, node: Node) -> None:
    """Both operands in the order of the one that is a view; a stored operand is reordered where it is stored."""
    plain = tuple(range(len(r.old.shapes[node.outputs[0]])))
    perms = [r.view(i)[1] for i in node.inputs if r.old.is_data(i)]
    perm = next((p for p in perms if len(p) == len(plain) and p != plain), plain)
    operands = [] if perm == plain else [_operand(r, name, perm, node) for name in node.inputs]
    if not operands or None in operands:
        _as_it_is(r, node)
        return
    r.emit(node, tuple(o for o in operands if o is not None), perm)


def _operand(r: _Rewriter, name: str, perm: Perm, node: Node) -> str | None:
    """The operand x as y with x = transpose(y, perm); None where that would cost a transpose."""
    base, own = r.view(name)
    if not r.old.is_data(name):
        return _stored(r, name, perm)
    if own == perm:
        return base
    if len(own) != len(perm):
        return None
    wanted = _compose(own, _inverse(perm))
    return r.transposed(base, wanted, name, node) if _keeps_order(r.new.shapes[base], wanted) else None


def _stored(r: _Rewriter, name: str, perm: Perm) -> str | None:
    """A parameter or constant reordered as its operand is; None where another reader has it in another order."""
    old_shape = r.old.shapes[name]
    full = (1,) * (len(perm) - len(old_shape)) + old_shape
    moved = tuple(full[i] for i in _inverse(perm))
    if len(old_shape) == 1 and old_shape[0] == 1:
        return name
    table = r.new.parameters if name in r.new.parameters else r.new.constants
    stored = (r.old.parameters if name in r.old.parameters else r.old.constants)[name]
    array = np.transpose(stored.reshape(full), _inverse(perm))[0]
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if moved[0] != 1 or (r.new.shapes[name] not in (old_shape, array.shape)):
        return None
    if array.shape != old_shape and len(r.old.consumers()[name]) > 1:
        return None
    table[name] = array
    r.new.shapes[name] = array.shape
    if name in r.old.origins:
        before = r.old.origins[name]
        moves = (("reshape", old_shape), ("transpose", _inverse(perm)), ("reshape", moved))
        r.new.origins[name] = replace(before, steps=(*before.steps, *moves))
    return name


def _concat(r: _Rewriter, node: Node) -> None:
    views = [r.view(i) for i in node.inputs]
    perms = {perm for _, perm in views}
    if len(perms) > 1:
        _as_it_is(r, node)
        return
    perm = perms.pop()
    r.emit(node, tuple(base for base, _ in views), perm, axis=perm[node.attrs["axis"]])


def _axis(r: _Rewriter, node: Node) -> None:
    base, perm = r.view(node.inputs[0])
    r.emit(node, (base,), perm, axis=perm[node.attrs["axis"]])


def _pad(r: _Rewriter, node: Node) -> None:
    base, perm = r.view(node.inputs[0])
    r.emit(node, (base,), perm, pads=_moved(node.attrs["pads"], perm))


def _slice(r: _Rewriter, node: Node) -> None:
    base, perm = r.view(node.inputs[0])
    spans = {key: _moved(node.attrs[key], perm) for key in ("starts", "ends", "steps")}
    r.emit(node, (base,), perm, **spans)


def _moved(values: tuple[Any, ...], perm: Perm) -> tuple[Any, ...]:
    """One value a dimension, put in the order of what lies below the view."""
    return tuple(values[i] for i in _inverse(perm))


def _reduce(r: _Rewriter, node: Node) -> None:
    base, perm = r.view(node.inputs[0])
    axes = tuple(sorted(perm[a] for a in node.attrs["axes"]))
    if not node.attrs["keepdims"]:
        kept = [p for i, p in enumerate(perm) if i not in node.attrs["axes"]]
        perm = tuple(sorted(kept).index(p) for p in kept)
    r.emit(node, (base,), perm, axes=axes)


_RULES: dict[str, Callable[[_Rewriter, Node], None]] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(REDUCTIONS, _reduce),
    "transpose": _transpose,
    "reshape": _reshape,
    "concat": _concat,
    "softmax": _axis,
    "log_softmax": _axis,
    "pad": _pad,
    "slice": _slice,
}
