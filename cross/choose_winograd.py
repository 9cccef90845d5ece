"""Stage 3 of a `--lean` build, before its kernels: the convolutions that take Winograd without a program needing more memory.

A kernel's temporaries of a fixed size are live during its own calls only, so each convolution is looked at alone: the bytes of
the fixed arena that are live where its output is made, with the direct kernel and with Winograd's. No program can do with less than

    need = the most, over its calls, of what is live there with the smaller of the two kernels

and a convolution takes Winograd where what is live with it is no more than that, in `train_fused`, which keeps gradients in its
arena, as in `train`.
"""

from __future__ import annotations

from collections.abc import Iterator

from cross.assign_storage import StoredGraph
from cross.fuse_updates import FUSED, fuse_updates
from cross.lower import Convolutions, Kernels, lower
from cross.plan import MemoryPlan, plan_memory
from cross.target import Target


def choose_winograd(graph: StoredGraph, target: Target) -> Convolutions:
    """For `cross.lower`: the fastest kernels of those that take the least memory."""
    direct, usual = _planned(graph, target, frozenset()), _planned(graph, target, None)
    fitting = {
        (stored.graph.name, stored.graph.nodes[position].outputs[0])
        for stored in graph.programs
        for position in stored.specs
    }
    for without, with_all in zip(_live_bytes(*direct), _live_bytes(*usual), strict=True):
        need = max(min(size, with_all[output]) for output, size in without.items())
        fitting -= {output for output, size in with_all.items() if size > need}
    chosen = frozenset(fitting)
    # What is live together need not be placed without gaps, and statistics of more parts take more of a sample's arena.
    sizes = zip(_arena_bytes(_planned(graph, target, chosen)[1]), _arena_bytes(direct[1]), strict=True)
    return chosen if all(size <= most for size, most in sizes) else frozenset()


def _planned(graph: StoredGraph, target: Target, winograd: Convolutions | None) -> tuple[Kernels, MemoryPlan]:
    kernels = fuse_updates(lower(graph, target, winograd))
    return kernels, plan_memory(kernels)


def _arena_bytes(plan: MemoryPlan) -> list[int]:
    return [arena.size_bytes for program in plan.programs for arena in (program.fixed, program.batched)]


def _live_bytes(kernels: Kernels, plan: MemoryPlan) -> Iterator[dict[tuple[str, str], int]]:
    """Of every program: (program as lowered, output of a node) -> bytes of the fixed arena that are live where it is made."""
    for program, arenas in zip(kernels.programs, plan.programs, strict=True):
        graph, made = program.stored.graph, dict[str, int]()
        for position, call in enumerate(call for call in program.calls if call.kernel):
            for name in call.arguments:
                made.setdefault(name, position)
        lowered = "train" if graph.name == FUSED else graph.name
        outputs = [node.outputs[0] for node in graph.nodes]
        yield {
            (lowered, name): sum(t.size_bytes for t in arenas.fixed.lifetimes if t.first <= made[name] <= t.last)
            for name in outputs
        }
