"""Weights of an ONNX graph replaced where they are stored: initializers, Constant nodes, folded results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from cross.graph import Origin
from cross.onnx_export.undo import Resized, undo
from cross.onnx_import.propagate import RENAMING
from cross.onnx_import.source import FLOATS

Array = np.ndarray[Any, np.dtype[Any]]
Reader = tuple[str, int]

_BIAS_INPUT = 2
_OUTSIDE = -1
"""Index of a reader that is no input of a node: the graph's outputs, a graph inside a node."""


class WeightStore:
    """The stored tensors of a graph, and who reads them. Edits the graph it is given."""

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.readers: dict[str, set[Reader]] = {}
        for node in graph.node:
            for index, name in enumerate(node.input):
                self._reads(name, (node.output[0], index))
            for name in _inner_names(node):
                self._reads(name, (node.output[0], _OUTSIDE))
        for value in graph.output:
            self._reads(value.name, (value.name, _OUTSIDE))

    def _reads(self, tensor: str, reader: Reader) -> None:
        self.readers.setdefault(tensor, set()).add(reader)

    def write(self, name: str, array: Array, origin: Origin, resized: Resized | None = None) -> None:
        """Store `array`, the model's tensor `name`, where the file keeps it.

        Where something else reads the same tensor too, that keeps its value: ours becomes an initializer of its own.
        """
        for tensor in dict.fromkeys(each.tensor for each in (origin, *origin.others)):
            same = [each for each in (origin, *origin.others) if each.tensor == tensor]
            readers = {reader for each in same for reader in each.readers}
            if self._replaceable(tensor) and self._read_only_by(tensor, readers):
                self._store(tensor, undo(array, same[0].steps, resized))
                continue
            for each in same:
                self._give_own(name, undo(array, each.steps[each.folded :], resized), each)

    def _give_own(self, name: str, array: Array, origin: Origin) -> None:
        """Let the readers of `origin` read a new initializer."""
        fresh = self._unique(name)
        self._add(fresh, array)
        for output, index in origin.readers:
            node = self.makers[output]
            old, node.input[index] = node.input[index], fresh
            self._forget(old, (output, index))
            self._reads(fresh, (output, index))

    def add_bias(self, weight: Origin, name: str, bias: Array) -> None:
        """Give the convolution that reads `weight` the bias [C] that the file left out."""
        ((output, _),) = weight.readers
        node, fresh = self.makers[output], self._unique(name)
        del node.input[_BIAS_INPUT:]
        node.input.append(fresh)
        self._reads(fresh, (output, _BIAS_INPUT))
        self._add(fresh, bias)

    def remove(self, node: NodeProto) -> None:
        """Take a node out, and whatever was only there for it."""
        self.graph.node.remove(node)
        for name in node.output:
            self.makers.pop(name, None)
        for index, name in enumerate(node.input):
            self._forget(name, (node.output[0], index))

    def cut_input(self, node: NodeProto, index: int) -> None:
        """Drop the inputs of a node from `index` on."""
        for place in range(index, len(node.input)):
            self._forget(node.input[place], (node.output[0], place))
        del node.input[index:]

    def _forget(self, tensor: str, reader: Reader) -> None:
        self.readers.get(tensor, set()).discard(reader)
        if self.readers.get(tensor):
            return
        if tensor in self.initializers:
            self.graph.initializer.remove(self.initializers.pop(tensor))
            for value in [value for value in self.graph.input if value.name == tensor]:
                self.graph.input.remove(value)
        elif tensor in self.makers and not any(self.readers.get(o) for o in self.makers[tensor].output):
            self.remove(self.makers[tensor])

    def _replaceable(self, tensor: str) -> bool:
        if tensor in self.initializers:
            return self.initializers[tensor].data_type in FLOATS
        maker = self.makers.get(tensor)
        return maker is not None and len(maker.output) == 1

    def _read_only_by(self, tensor: str, wanted: set[Reader]) -> bool:
        """Whether all that reads the tensor, also through nodes that only reorder it, are `wanted`."""
        for reader in self.readers.get(tensor, ()):
            if reader in wanted:
                continue
            output, index = reader
            if index != 0 or self.makers[output].op_type not in RENAMING or not self._read_only_by(output, wanted):
                return False
        return True

    def _store(self, tensor: str, array: Array) -> None:
        maker = self.makers.get(tensor)
        if tensor in self.initializers:
            stored = self.initializers[tensor]
            stored.CopyFrom(_tensor(tensor, array, stored.data_type))
            for value in self.graph.input:
                if value.name == tensor:
                    value.CopyFrom(helper.make_tensor_value_info(tensor, stored.data_type, array.shape))
        elif maker is not None and maker.op_type == "Constant":
            kind = next((a.t.data_type for a in maker.attribute if a.name == "value"), TensorProto.FLOAT)
            del maker.attribute[:]
            value = _tensor(tensor, array, kind)
            maker.attribute.append(AttributeProto(name="value", t=value, type=AttributeProto.TENSOR))
        else:
            assert maker is not None, "the importer named a tensor of this graph"
            readers = self.readers[tensor]
            self.remove(maker)
            self.readers[tensor] = readers
            self._add(tensor, array)

    def _add(self, name: str, array: Array) -> None:
        self.graph.initializer.append(_tensor(name, array, TensorProto.FLOAT))
        self.initializers[name] = self.graph.initializer[-1]

    def _unique(self, name: str) -> str:
        taken = {*self.initializers, *self.makers, *self.readers, *(value.name for value in self.graph.input)}
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name}#{count}"
        return candidate


def _tensor(name: str, array: Array, data_type: int) -> TensorProto:
    """The array in the file's own width."""
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    return numpy_helper.from_array(np.ascontiguousarray(array).astype(dtype), name)


def _inner_names(node: NodeProto) -> Iterator[str]:
    """What graphs inside a node read, from inside or from outside of them."""
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            for deeper in inner.node:
                yield from deeper.input
                yield from _inner_names(deeper)
            yield from (value.name for value in inner.output)


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy to edit, with local functions written out as the importer read them."""
    if model.functions:
        return onnx.inliner.inline_local_functions(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
