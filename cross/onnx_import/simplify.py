"""Clean-up with the function unchanged: padding moves into convolutions; SiLU, GELU and layer norm become one node."""

from __future__ import annotations

from cross.graph import Node
from cross.onnx_import.draft import Draft
from cross.onnx_import.patterns import merge_gelu, merge_layer_norm


def simplify(draft: Draft, output: str) -> tuple[Draft, str]:
    """One pass over the nodes; returns the rewritten graph and its output."""
    producers = {node.outputs[0]: node for node in draft.nodes}
    written = draft.like()
    renamed: dict[str, str] = {}
    for node in draft.nodes:
        node = _merge_pad(node, producers)
        node = _merge_sigmoid(node, producers)
        node = merge_gelu(node, producers, draft)
        node = merge_layer_norm(node, producers, draft)
        node = _merge_reshape(node, producers)
        inputs = tuple(renamed.get(i, i) for i in node.inputs)
        if node.op == "reshape" and written.shapes[inputs[0]] == node.attrs["shape"]:
            renamed[node.outputs[0]] = inputs[0]
            continue
        renamed[node.outputs[0]] = written.emit(
            node.op, inputs, dict(node.attrs), name=node.outputs[0], source=node.source
        )
    output = renamed.get(output, output)
    written.prune(output)
    return written, output


def _merge_pad(node: Node, producers: dict[str, Node]) -> Node:
    """Zero padding of rows and columns in front of a convolution is the convolution's own."""
    before = producers.get(node.inputs[0])
    if node.op != "conv2d" or before is None or before.op != "pad" or before.attrs["value"] != 0.0:
        return node
    pads = before.attrs["pads"]
    if any(map(any, pads[:2])):
        return node
    (above, below), (ahead, behind) = pads[2:]
    top, left, bottom, right = node.attrs["pads"]
    attrs = {**node.attrs, "pads": (top + above, left + ahead, bottom + below, right + behind)}
    return Node(node.op, (before.inputs[0], *node.inputs[1:]), node.outputs, attrs, node.source)


def _merge_sigmoid(node: Node, producers: dict[str, Node]) -> Node:
    if node.op != "mul":
        return node
    for x, gate in (node.inputs, node.inputs[::-1]):
        producer = producers.get(gate)
        if producer is not None and producer.op == "sigmoid" and producer.inputs == (x,):
            return Node("silu", (x,), node.outputs, {}, node.source)
    return node


def _merge_reshape(node: Node, producers: dict[str, Node]) -> Node:
    """A reshape of reshapes is the last one."""
    x = node.inputs[0]
    while node.op == "reshape" and (before := producers.get(x)) is not None and before.op == "reshape":
        x = before.inputs[0]
    return node if x == node.inputs[0] else Node(node.op, (x,), node.outputs, node.attrs, node.source)
