"""Named blocks and cut points: where exactly one tensor is live, the graph can be cut and run in parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cross.graph import Block, Node
from cross.onnx_import.infer import WEIGHTED

_INDEXED = re.compile(r"^(.*?[._]\d+)/")
_OPERATOR_LEAVES = frozenset(("Conv", "Gemm", "MatMul"))


@dataclass(frozen=True)
class _Span:
    first: int
    end: int


def compute_blocks(
    nodes: Sequence[Node], input_name: str, output_name: str
) -> tuple[tuple[Node, ...], tuple[Block, ...]]:
    """Blocks of a graph in topological order, and its nodes with their block set.

    Each block holds at least one convolution or product and ends as late as it can before the next one, so that batch
    norm, activation and pooling stay with the convolution before them. A residual block is one block, as no tensor
    inside it is the only live one. Neighbours that are one unit to the user (`layers.3/conv1`, `layers.3/conv2`) are
    joined.
    """
    cuts = _cut_points(nodes, input_name, output_name)
    weighted = [i for i, node in enumerate(nodes) if node.op in WEIGHTED]
    ends = []
    for here, following in pairwise(weighted):
        between = [i for i in range(here, following) if i in cuts]
        if between:
            ends.append(between[-1] + 1)
    firsts = [0, *ends]
    spans = _join_units(nodes, [_Span(a, b) for a, b in zip(firsts, [*ends, len(nodes)], strict=True)])
    blocks: list[Block] = []
    placed: list[Node] = []
    taken: set[str] = set()
    tensor = input_name
    for index, span in enumerate(spans):
        output = cuts[span.end - 1] if span.end < len(nodes) else output_name
        name = _unique(_name(nodes[span.first : span.end]), taken)
        blocks.append(Block(name, span.first, span.end, tensor, output))
        placed.extend(replace(node, block=index) for node in nodes[span.first : span.end])
        tensor = output
    return tuple(placed), tuple(blocks)


def _cut_points(nodes: Sequence[Node], input_name: str, output_name: str) -> dict[int, str]:
    """{node: tensor}: after the node, the tensor is the only computed one that is still needed."""
    last_use = {name: i for i, node in enumerate(nodes) for name in node.inputs}
    last_use[output_name] = len(nodes)
    live = {input_name}
    cuts = {}
    for i, node in enumerate(nodes):
        live.update(node.outputs)
        live = {name for name in live if last_use.get(name, -1) > i}
        if len(live) == 1:
            cuts[i] = next(iter(live))
    return cuts


def _join_units(nodes: Sequence[Node], spans: list[_Span]) -> list[_Span]:
    """Join neighbours of one weight each that share an indexed scope."""
    joined: list[_Span] = []
    last = ""
    for span in spans:
        scope = _unit(nodes[span.first : span.end])
        if scope and scope == last:
            joined[-1] = _Span(joined[-1].first, span.end)
        else:
            joined.append(span)
        last = scope
    return joined


def _unit(nodes: Sequence[Node]) -> str:
    """The scope up to its first index, `layers.3` of `layers.3/conv1`, of a span's only weight; else ''."""
    weights = [node for node in nodes if node.op in WEIGHTED]
    match = _INDEXED.match(weights[0].source) if len(weights) == 1 else None
    return match.group(1) if match else ""


def _name(nodes: Sequence[Node]) -> str:
    """What the sources of the weights have in common, or the first of them."""
    paths = [node.source.strip("/").split("/") for node in nodes if node.op in WEIGHTED]
    paths = paths or [nodes[0].source.strip("/").split("/")]
    parts = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        parts.append(level[0])
    parts = parts or paths[0]
    if len(parts) > 1 and parts[-1] in _OPERATOR_LEAVES:
        parts = parts[:-1]
    return "/".join(parts)


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}#{count}"
    taken.add(candidate)
    return candidate
