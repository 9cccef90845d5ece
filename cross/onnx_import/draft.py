"""The graph that conversions and clean-up passes write: `cross.graph` nodes in order, their shapes, their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cross.graph import Node, Origin, Shape
from cross.onnx_import.infer import WEIGHTED, output_shape

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Draft:
    """A graph under construction. `trained` are tensors that depend on a weight: constants they meet are trainable."""

    input: str
    nodes: list[Node] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    parameters: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    origins: dict[str, Origin] = field(default_factory=dict)

    def emit(
        self, op: str, inputs: Sequence[str], attrs: dict[str, Any] | None = None, *, name: str, source: str = ""
    ) -> str:
        """Append a node whose output is called `name` (made unique); ValueError where shapes do not fit."""
        attrs = attrs or {}
        shape = output_shape(op, [self.shapes[i] for i in inputs], attrs)
        output = self.unique(name)
        self.shapes[output] = shape
        self.nodes.append(Node(op, tuple(inputs), (output,), attrs, source))
        if op in WEIGHTED or any(i in self.trained or i in self.parameters for i in inputs):
            self.trained.add(output)
        return output

    def unique(self, name: str) -> str:
        """`name`, or `name#2` ... where it is taken."""
        candidate, count = name, 1
        while candidate in self.shapes:
            count += 1
            candidate = f"{name}#{count}"
        return candidate

    def parameter(self, name: str, array: Array, layout: str, origin: Origin, *, tie: bool = False) -> str:
        """Add a trainable tensor. With `tie`, the same array under the same name is one tensor used twice."""
        known = self.parameters.get(name)
        if tie and known is not None and self.layouts[name] == layout and np.array_equal(known, array):
            self.tie(name, origin)
            return name
        name = self._add(name, array)
        self.parameters[name] = array
        self.layouts[name] = layout
        self.origins[name] = origin
        return name

    def tie(self, name: str, origin: Origin) -> None:
        """Note that the file reads the parameter `name` once more, as `origin` says."""
        first = self.origins[name]
        if first.steps == origin.steps:
            self.origins[name] = replace(first, readers=first.readers + origin.readers)
        else:
            self.origins[name] = replace(first, others=(*first.others, origin))

    def state(self, name: str, array: Array, origin: Origin) -> str:
        """Add a running statistic."""
        name = self._add(name, array)
        self.states[name] = array
        self.origins[name] = origin
        return name

    def constant(self, name: str, array: Array) -> str:
        """Add a tensor that is never trained, once; scalars have shape [1]."""
        if name in self.constants and np.array_equal(self.constants[name], array):
            return name
        name = self._add(name, array)
        self.constants[name] = array
        return name

    def _add(self, name: str, array: Array) -> str:
        name = self.unique(name)
        self.shapes[name] = array.shape
        return name

    def is_data(self, name: str) -> bool:
        """Whether the tensor is computed (or the input), not stored."""
        return not (name in self.parameters or name in self.states or name in self.constants)

    def like(self) -> Draft:
        """An empty graph with the same input and weights: what a clean-up pass rewrites into."""
        stored = {**self.parameters, **self.states, **self.constants}
        return Draft(
            self.input,
            shapes={self.input: self.shapes[self.input], **{name: array.shape for name, array in stored.items()}},
            parameters=dict(self.parameters),
            states=dict(self.states),
            constants=dict(self.constants),
            layouts=dict(self.layouts),
            origins=dict(self.origins),
        )

    def consumers(self) -> dict[str, list[Node]]:
        """The nodes that read each tensor."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return readers

    def prune(self, output: str) -> None:
        """Drop nodes and weights that `output` does not depend on."""
        needed, kept = {output}, []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]
        for table in (self.parameters, self.states, self.constants):
            for name in [n for n in table if n not in needed]:
                del table[name]
                self.layouts.pop(name, None)
                self.origins.pop(name, None)
        alive = needed | {self.input}
        self.shapes = {name: shape for name, shape in self.shapes.items() if name in alive}
