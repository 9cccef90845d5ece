"""How each parameter and state starts without a weights file: PyTorch's defaults, everywhere."""

from __future__ import annotations

from math import prod

from cross.graph import Init, Node
from cross.initialise import default_bound
from cross.onnx_import.draft import Draft

_PRELU_SLOPE = 0.25
_UNIT_VARIANCE = 3.0**0.5


def choose_inits(draft: Draft) -> dict[str, Init]:
    """An Init for every parameter and state.

    Weights and biases are uniform in 1 / sqrt(fan_in), batch and layer norms 1 and 0, statistics 0 and 1. Tables of
    tokens are uniform with the mean and variance of PyTorch's normal distribution, 0 and 1; positions start at 0.
    """
    producers = {node.outputs[0]: node for node in draft.nodes}
    inits: dict[str, Init] = {}
    for node in draft.nodes:
        if node.op in ("conv2d", "dense"):
            fan_in = prod(draft.shapes[node.inputs[1]][1:])
            inits.setdefault(node.inputs[1], Init("uniform", default_bound(fan_in)))
        elif node.op == "embedding":
            inits.setdefault(node.inputs[1], Init("uniform", _UNIT_VARIANCE))
        elif node.op in ("batch_norm", "layer_norm"):
            for name, value in zip(node.inputs[1:], (1.0, 0.0, 0.0, 1.0), strict=False):
                inits[name] = Init("constant", value)
        else:
            for name in node.inputs:
                if name in draft.parameters:
                    inits.setdefault(name, _operand(draft, node, name, producers))
    return inits


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
