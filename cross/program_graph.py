"""A program before it has kernels: nodes of the kernel-level operators, in execution order, with phases and blocks.

Kernel-level operators (what `cross.rules` emits and `cross.kernels` compiles):

    map(x0, x1, ...)            attr expr                  element-wise with numpy broadcasting
    reduce(x0, x1, ...)         attrs exprs, axes, kind    sum or max of each expression over axes (batch never), dimensions kept
    sum_batch(x0, ...)          attr expr                  sum over the batch: an unbatched tensor
    conv2d(x, w)                -> y, and after `cross.fuse_statistics` sum and m2 of y, over parts of the batch's pixels
    conv2d_input_gradient, conv2d_weight_gradient; dense, dense_input_gradient, dense_weight_gradient; matmul
    embedding, embedding_gradient(tokens, dy)              rows of a table; for each row of it, the sum of dy where it was chosen
    batch_statistics(x)         -> sum[N,C], m2[N,C]       per sample and channel: sum, and squared deviations from the sample's own mean
    batch_norm_finish, batch_norm_gradient_finish          sums over samples -> coefficients; running statistics
    batch_norm_running          running statistics -> coefficients, for eval
    max_pool2d (-> y, winner), max_pool2d_gradient, avg_pool2d, avg_pool2d_gradient, channel_window_sum
    reshape, transpose, concat, slice, unslice, pad        data movement
    cross_entropy(logits, target, loss_scale) -> loss rows, gradient of logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cross.graph import Model, Node, TensorType


@dataclass(frozen=True)
class ProgramGraph:
    """One named program. `tensors` types everything its nodes touch; `target` and `loss` are '' in eval."""

    name: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorType]
    input: str
    output: str
    target: str = ""
    loss: str = ""
    protected: frozenset[str] = frozenset()
    """Tensors that must exist under their own name: block boundaries, their gradients, parameter gradients, results."""


@dataclass(frozen=True)
class TrainingGraph:
    """The programs of a model; they share its parameters and states.

    `gradients`: trained parameter -> gradient tensor. `trainable` is the word that chose them (`cross.trainable`).
    """

    model: Model
    programs: tuple[ProgramGraph, ...]
    gradients: Mapping[str, str]
    trainable: str = "all"

    def program(self, name: str) -> ProgramGraph:
        return next(p for p in self.programs if p.name == name)


@dataclass
class Builder:
    """Collects the nodes of one program while rules run. `phase`, `block`, `source` stamp what is emitted next."""

    tensors: dict[str, TensorType]
    training: bool
    nodes: list[Node] = field(default_factory=list)
    phase: str = "forward"
    block: int = 0
    source: str = ""
    producers: dict[str, Node] = field(default_factory=dict)
    _count: int = 0

    def fresh(self, stem: str) -> str:
        """A new tensor name that says where it comes from."""
        self._count += 1
        return f"{stem}~{self._count}"

    def emit(
        self,
        op: str,
        inputs: Sequence[str],
        types: Sequence[TensorType],
        attrs: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> tuple[str, ...]:
        """Append one node; its outputs get `names`, or new ones."""
        outputs = tuple(names) if names is not None else tuple(self.fresh(op) for _ in types)
        for name, kind in zip(outputs, types, strict=True):
            self.tensors[name] = kind
        node = Node(op, tuple(inputs), outputs, dict(attrs or {}), self.source, self.block, self.phase)
        self.nodes.append(node)
        for name in outputs:
            self.producers[name] = node
        return outputs

    def map(self, expr: tuple[Any, ...], inputs: Sequence[str], kind: TensorType, name: str | None = None) -> str:
        """One element-wise node of type `kind`."""
        return self.emit("map", inputs, [kind], {"expr": expr}, None if name is None else [name])[0]

    def rename(self, old: str, new: str) -> None:
        """Give an emitted tensor another name, everywhere."""
        swap = {old: new}

        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(swap.get(n, n) for n in names)

        self.nodes = [replace(n, inputs=renamed(n.inputs), outputs=renamed(n.outputs)) for n in self.nodes]
        self.tensors[new] = self.tensors.pop(old)
        self.producers = {name: node for node in self.nodes for name in node.outputs}
