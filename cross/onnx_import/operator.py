"""One ONNX node being converted: its attributes, constant inputs and shapes, and the draft it is written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from cross.graph import Origin, Shape
from cross.onnx_import.draft import Draft
from cross.onnx_import.propagate import Propagated
from cross.onnx_import.source import display_name

Array = np.ndarray[Any, np.dtype[Any]]


class NotConvertible(Exception):
    """This node, as it is used here, cannot be trained; the text says why."""


@dataclass
class Operator:
    """`tensors` maps ONNX names of computed tensors to the draft's names."""

    node: NodeProto
    graph: Propagated
    draft: Draft
    tensors: Mapping[str, str]
    attrs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return display_name(self.node)

    @property
    def opset(self) -> int:
        return self.graph.opset

    def has(self, index: int) -> bool:
        """Whether the optional input is given."""
        return index < len(self.node.input) and bool(self.node.input[index])

    def is_data(self, index: int) -> bool:
        return self.node.input[index] in self.tensors

    def data(self, index: int = 0) -> str:
        """The computed tensor that is the input."""
        name = self.node.input[index]
        if name not in self.tensors:
            raise NotConvertible(f"input {index} ({name or 'absent'}) depends on no image")
        return self.tensors[name]

    def shape(self, index: int = 0) -> Shape:
        """Shape of a computed input."""
        return self.draft.shapes[self.data(index)]

    def constant(self, index: int, what: str) -> Array:
        """The value of an input that must be known."""
        name = self.node.input[index] if self.has(index) else ""
        if name not in self.graph.values:
            raise NotConvertible(f"its {what} is computed, not stored" if name else f"its {what} is missing")
        return self.graph.values[name]

    def origin(self, index: int) -> str:
        """The user's name of a constant: the initializer it was folded from, if it is one."""
        name = self.node.input[index]
        return self.graph.origins.get(name, Origin(name)).tensor

    def parameter(self, index: int, array: Array, layout: str, *, tie: bool = False) -> str:
        """The stored input `index` as a trainable tensor; `array` is its value, reshaped, or transposed ('kn')."""
        return self.draft.parameter(self.origin(index), array, layout, self._provenance(index, array, layout), tie=tie)

    def tie(self, name: str, index: int, array: Array, layout: str) -> None:
        """The stored input `index` is the parameter `name`, which something else reads too."""
        self.draft.tie(name, self._provenance(index, array, layout))

    def state(self, index: int, array: Array) -> str:
        """The stored input `index` as a running statistic."""
        return self.draft.state(self.origin(index), array, self._provenance(index, array, "c"))

    def _provenance(self, index: int, array: Array, layout: str) -> Origin:
        name = self.node.input[index]
        before, value = self.graph.origins.get(name, Origin(name)), self.graph.values[name]
        steps = before.steps
        if layout == "kn":
            steps = (*steps, ("transpose", (1, 0)))
        elif value.shape != array.shape:
            steps = (*steps, ("reshape", value.shape))
        return Origin(before.tensor, ((self.node.output[0], index),), steps, before.folded)

    def output_shape(self, index: int = 0) -> Shape:
        return self.graph.shapes[self.node.output[index]]

    def setting(self, name: str, index: int, default: Any = None) -> Any:
        """A value that was an attribute in old opsets and is an input in new ones, as a list or a number."""
        if self.has(index):
            return self.constant(index, name).tolist()
        return self.attrs.get(name, default)

    def axis(self, value: int, rank: int | None = None) -> int:
        """A positive axis that is not the batch."""
        rank = len(self.shape()) if rank is None else rank
        axis = value + rank if value < 0 else value
        if not 0 <= axis < rank:
            raise NotConvertible(f"axis {value} of a tensor of {rank} dimensions")
        if axis == 0:
            raise NotConvertible("it works across the batch")
        return axis

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Append one of our nodes; its output is named after the ONNX node's output."""
        try:
            return self.draft.emit(op, inputs, attrs, name=f"{self.node.output[0]}/{op}", source=self.name)
        except ValueError as error:
            raise NotConvertible(str(error)) from error

    def reshape(self, tensor: str, shape: Shape) -> str:
        """`tensor` in another shape; itself where the shape is the same."""
        return tensor if self.draft.shapes[tensor] == shape else self.emit("reshape", tensor, shape=shape)

    def number(self, value: float) -> str:
        """A scalar constant."""
        return self.draft.constant(f"{self.node.output[0]}/constant", np.array([value], np.float32))

    def only_output(self) -> None:
        """Refuse a node whose optional outputs are read."""
        extra = [o for o in self.node.output[1:] if o and o in self.used_names()]
        if extra:
            raise NotConvertible(f"its second output {extra[0]!r} is used")

    def used_names(self) -> set[str]:
        return {name for node in self.graph.nodes for name in node.input}

    def require_rank(self, rank: int, what: str) -> None:
        if len(self.shape()) != rank:
            raise NotConvertible(f"{what} of a tensor of {len(self.shape())} dimensions")


def read_attributes(node: NodeProto) -> dict[str, Any]:
    """Attributes as Python values: strings as str, floats as the decimal number that was meant (1e-05)."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return float(str(np.float32(value))) if isinstance(value, float) else value
