"""A graph exported for training turned to inference: batch norms use their running statistics, dropouts do nothing."""

from __future__ import annotations

from cross.onnx_export.write_back import WeightStore

_TRAINING_INPUT = 2
"""Index of Dropout's input that says whether it drops."""


def to_inference_form(store: WeightStore) -> None:
    """Batch norms lose what they compute for training (outputs that nothing reads), dropouts their training flag."""
    graph = store.graph
    for node in list(graph.node):
        if node.op_type == "BatchNormalization":
            extra = set(node.output[1:])
            for value in [value for value in graph.output if value.name in extra]:
                graph.output.remove(value)
            for value in [value for value in graph.value_info if value.name in extra]:
                graph.value_info.remove(value)
            del node.output[1:]
            for attribute in [a for a in node.attribute if a.name == "training_mode"]:
                node.attribute.remove(attribute)
        elif node.op_type == "Dropout" and len(node.input) > _TRAINING_INPUT:
            store.cut_input(node, _TRAINING_INPUT)
