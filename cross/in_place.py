"""Element-wise results that take the place of an input.

    dz = map(select(y > 0, dy, 0))      the last call that reads dy; dz is stored like dy: dz lies where dy did

Each element is read and written by one task at one place, so nothing is lost. Results and boundaries of blocks are left alone: a
caller may look at them after the calls of their block, and supplies them where it runs a part of the blocks.
"""

from __future__ import annotations

from collections.abc import Collection

from cross.kernels.access import is_gathered
from cross.lower import LoweredProgram


def in_place(program: LoweredProgram, outside: Collection[str]) -> dict[str, str]:
    """Output -> the input whose memory it takes. `outside`: tensors that are not in the program's arena."""
    graph, storages, types = program.stored.graph, program.storages, program.types
    kept = {graph.input, graph.target, graph.output, graph.loss, *graph.protected, *outside}
    last = {name: position for position, call in enumerate(program.calls) for name in call.arguments}
    first: dict[str, int] = {}
    for position, call in enumerate(program.calls):
        for name in call.arguments:
            first.setdefault(name, position)
    found = {}
    for node in graph.nodes:
        output = node.outputs[0]
        if node.op != "map" or output in outside:
            continue
        if storages[output].kind == "blocked" and any(is_gathered(storages[n], types[n]) for n in node.inputs):
            continue  # such kernels write a lane twice
        for name in node.inputs:
            alike = storages[name] == storages[output] and types[name] == types[output]
            if alike and name not in kept and last[name] == first[output]:
                found[output] = name
                break
    return found
