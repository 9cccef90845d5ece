"""What a rule sees: the builder, what forward rules left for their gradients, and which tensors need one."""

from __future__ import annotations

from dataclasses import dataclass, field

from cross.expression import Expr, arg
from cross.graph import BATCH, Shape, TensorType
from cross.program_graph import Builder

DROPOUT_COUNTER = "dropout_counter"
LOSS_SCALE = "loss_scale"
LABEL_SMOOTHING = "label_smoothing"
TARGET = "target"


def gradient_name(tensor: str) -> str:
    """The name under which a tensor's gradient is found."""
    return f"grad:{tensor}"


@dataclass
class Context:
    build: Builder
    wanted: set[str] = field(default_factory=set)
    frozen_norms: frozenset[str] = frozenset()
    """Outputs of the batch norms that use running statistics in training too."""
    saved: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def shape(self, name: str) -> Shape:
        return self.build.tensors[name].shape

    def type(self, name: str) -> TensorType:
        return self.build.tensors[name]

    def sum_to(self, expr: Expr, inputs: tuple[str, ...], domain: Shape, shape: Shape) -> str:
        """Sum an expression over `domain` (batched) down to `shape`, which numpy would broadcast to it."""
        build = self.build
        aligned = (1,) * (len(domain) - len(shape)) + shape
        axes = tuple(i for i in range(1, len(domain)) if aligned[i] == 1 and domain[i] != 1)
        keeps_batch = aligned[0] == BATCH
        if not axes and keeps_batch:
            return build.map(expr, inputs, TensorType(domain))
        if axes:
            rows = tuple(1 if i in axes else d for i, d in enumerate(domain))
            attrs = {"exprs": (expr,), "axes": axes, "kind": "sum", "domain": domain}
            inputs = build.emit("reduce", inputs, [TensorType(rows)], attrs)
            expr, domain = arg(0), rows
        if keeps_batch:
            return self.reshaped(inputs[0], shape)
        total = build.emit("sum_batch", inputs, [TensorType(domain[1:])], {"expr": expr, "domain": domain})[0]
        return self.reshaped(total, shape)

    def rows(self, expr: Expr, inputs: tuple[str, ...], domain: Shape, axis: int, kind: str = "sum") -> str:
        """Sum or maximum of an expression over one axis of `domain`, which stays as 1."""
        kept = TensorType(tuple(1 if d == axis else extent for d, extent in enumerate(domain)))
        attrs = {"exprs": (expr,), "axes": (axis,), "kind": kind, "domain": domain}
        return self.build.emit("reduce", inputs, [kept], attrs)[0]

    def reshaped(self, name: str, shape: Shape) -> str:
        """The same elements in another shape; the tensor itself where the shape is right already."""
        if self.shape(name) == shape:
            return name
        producer = self.build.producers.get(name)
        if producer is not None and producer.op == "sum_batch":
            # A fresh sum of one output: its type can simply be the other shape (both are vectors in memory).
            self.build.tensors[name] = TensorType(shape)
            return name
        return self.build.emit("reshape", [name], [TensorType(shape)])[0]
