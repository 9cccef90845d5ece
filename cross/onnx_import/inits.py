"""How each parameter and state starts without a weights file."""

from __future__ import annotations

from math import prod

from cross.graph import Init, Node
from cross.initialise import default_bound, relu_bound
from cross.onnx_import.draft import Draft

_RECTIFIERS = frozenset(("relu", "clip", "leaky_relu", "silu", "hard_swish"))
_PRELU_SLOPE = 0.25
_HEAD_SHARE = 0.1


def choose_inits(draft: Draft, *, keep_signal: bool) -> dict[str, Init]:
    """An Init for every parameter and state.

    PyTorch's defaults: weights and biases uniform in 1 / sqrt(fan_in), batch norm 1 and 0, statistics 0 and 1. With
    `keep_signal`, a weight that a rectifier follows with no batch norm between has He's bound: at PyTorch's default a
    VGG of 19 layers passes on a signal of 1e-6 and does not train. The last weight is then drawn ten times smaller:
    logits near zero, the loss at log(classes), and first steps that do not overshoot.
    """
    producers = {node.outputs[0]: node for node in draft.nodes}
    readers = draft.consumers()
    last = next((node for node in reversed(draft.nodes) if node.op in ("conv2d", "dense")), None)
    inits: dict[str, Init] = {}
    for node in draft.nodes:
        if node.op in ("conv2d", "dense"):
            share = _HEAD_SHARE if keep_signal and node is last else 1.0
            inits.setdefault(node.inputs[1], _weight(draft, node, readers, keep_signal, share))
        elif node.op == "batch_norm":
            for name, value in zip(node.inputs[1:], (1.0, 0.0, 0.0, 1.0), strict=True):
                inits[name] = Init("constant", value)
        else:
            for name in node.inputs:
                if name in draft.parameters:
                    inits.setdefault(name, _operand(draft, node, name, producers))
    return inits


def _weight(draft: Draft, node: Node, readers: dict[str, list[Node]], keep_signal: bool, share: float) -> Init:
    fan_in = prod(draft.shapes[node.inputs[1]][1:])
    following = readers.get(node.outputs[0], [])
    if len(following) == 1 and following[0].op == "add" and any(i in draft.parameters for i in following[0].inputs):
        following = readers.get(following[0].outputs[0], [])
    rectified = bool(following) and all(reader.op in _RECTIFIERS for reader in following)
    return Init("uniform", share * (relu_bound(fan_in) if keep_signal and rectified else default_bound(fan_in)))


def _operand(draft: Draft, node: Node, name: str, producers: dict[str, Node]) -> Init:
    """A bias behind its weight, else a shift (0), a scale (1) or a slope."""
    if draft.layouts.get(name) == "slope":
        return Init("constant", _PRELU_SLOPE)
    if node.op == "mul":
        return Init("constant", 1.0)
    for other in node.inputs:
        producer = producers.get(other)
        if producer is not None and producer.op in ("conv2d", "dense"):
            return Init("uniform", default_bound(prod(draft.shapes[producer.inputs[1]][1:])))
    return Init("constant", 0.0)
