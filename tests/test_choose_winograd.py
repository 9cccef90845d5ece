"""What `--lean` builds: no choice of kernels has less live at once, and no further convolution could take Winograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cross import choose_winograd as stage
from cross.assign_storage import StoredGraph, assign_storage
from cross.choose_winograd import choose_winograd
from cross.fuse_updates import fuse_updates
from cross.load_model import load_model
from cross.lower import Convolutions, Kernels, lower
from cross.plan import Arena, MemoryPlan, plan_memory
from cross.target import find_target
from cross.training_graph import build_training_graph


def stored(model: str, target: str) -> StoredGraph:
    return assign_storage(build_training_graph(load_model(model), "cross_entropy"), find_target(target))


def arenas(kernels: Kernels) -> list[Arena]:
    """Of train, eval and train_fused, each what is fixed and what a sample takes."""
    return [a for program in plan_memory(fuse_updates(kernels)).programs for a in (program.fixed, program.batched)]


def by_winograd(kernels: Kernels) -> Convolutions:
    """(program, output) of the nodes that call Winograd's kernels."""
    return frozenset(
        (program.stored.graph.name, call.name.rpartition(" ")[2])
        for program in kernels.programs
        for call in program.calls
        if "_winograd_" in call.kernel
    )


@pytest.mark.parametrize(
    ("model", "target", "counts"),
    (
        ("resnet8", "x86-64-avx2", (0, 0)),
        ("vgg16", "bpi-f3", (26, 0)),
        ("resnet18", "rpi4", (36, 0)),
        ("resnet18-imagenet", "x86-64-avx2", (30, 0)),
    ),
)
def test_least_memory_then_most_winograd(model: str, target: str, counts: tuple[int, int]) -> None:
    graph, cpu = stored(model, target), find_target(target)
    chosen = choose_winograd(graph, cpu)
    lean, usual, direct = (lower(graph, cpu, winograd) for winograd in (chosen, None, frozenset()))
    taken, every = by_winograd(lean), by_winograd(usual)
    assert taken == chosen & every and not by_winograd(direct)
    assert tuple(sum(program == name for program, _ in taken) for name in ("train", "eval")) == counts

    placed, other = arenas(lean), arenas(direct)
    assert all(a.size_bytes <= b.size_bytes for a, b in zip(placed, other, strict=True))
    bounds = [arena.lower_bound_bytes for arena in placed]
    random = np.random.default_rng(0)
    picks = (frozenset(key for key in sorted(every) if random.random() < 0.8) for _ in range(2))
    for kernels in (usual, *(lower(graph, cpu, pick) for pick in picks)):
        assert all(bound <= a.lower_bound_bytes for bound, a in zip(bounds, arenas(kernels), strict=True))
    left = sorted(every - taken)
    for key in left[:: max(1, len(left) // 3)]:
        more = [arena.lower_bound_bytes for arena in arenas(lower(graph, cpu, chosen | {key}))]
        assert any(a > bound for a, bound in zip(more, bounds, strict=True)), key


def test_an_arena_that_is_placed_with_gaps_leaves_direct_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cpu = stored("resnet18-imagenet", "x86-64-avx2"), find_target("x86-64-avx2")
    assert by_winograd(lower(graph, cpu, choose_winograd(graph, cpu)))

    def with_gaps(kernels: Kernels) -> MemoryPlan:
        plan = plan_memory(kernels)
        first, *others = plan.programs
        wider = replace(first.fixed, size_bytes=first.fixed.size_bytes + 64 * bool(by_winograd(kernels)))
        return replace(plan, programs=(replace(first, fixed=wider), *others))

    monkeypatch.setattr(stage, "plan_memory", with_gaps)
    assert not by_winograd(lower(graph, cpu, choose_winograd(graph, cpu)))
