"""What follows a classifier of another size: constants of reshapes behind it, and the shapes the file declares."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from cross.graph import Origin


def resize_behind(graph: GraphProto, origins: Iterable[Origin], old: int, new: int) -> None:
    """Everything computed from the replaced tensors has `new` in the place of `old` classes.

    Shapes declared inside the graph are dropped, as readers infer them again; those of its outputs are corrected.
    """
    reached = {output for origin in origins for output, _ in origin.readers}
    for node in graph.node:
        if node.output[0] in reached or reached.intersection(node.input):
            reached.update(node.output)
            if node.op_type == "Reshape" and node.input[0] in reached:
                _resize_target(graph, node, old, new)
    for value in [value for value in graph.value_info if value.name in reached]:
        graph.value_info.remove(value)
    for value in graph.output:
        if value.name in reached:
            for dim in list(value.type.tensor_type.shape.dim)[1:]:
                if dim.dim_value == old:
                    dim.dim_value = new
                    break


def _resize_target(graph: GraphProto, node: NodeProto, old: int, new: int) -> None:
    """A stored shape that names the old class count, as a new initializer: others may read the old one."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for other in graph.node:
        if other.op_type == "Constant" and other.attribute[0].name == "value":
            stored[other.output[0]] = other.attribute[0].t
    if node.input[1] not in stored:
        return
    target = numpy_helper.to_array(stored[node.input[1]]).copy()
    places = [i for i, extent in enumerate(target) if i > 0 and extent == old]
    if places:
        target[places[0]] = new
        name = f"{node.output[0]}/shape_of_{new}_classes"
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, target.shape, target.astype(np.int64)))
        node.input[1] = name
