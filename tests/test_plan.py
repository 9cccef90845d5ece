"""The memory plan against lifetimes worked out again from the calls alone: nothing live is overwritten, little is wasted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cross.load_model import load_model
from cross.lower import LoweredProgram
from cross.plan import Arena, Lifetime, blocks_of, place, plan_memory
from cross.tables import segment_spans
from tests.run_program import lower_model


def spans(program: LoweredProgram, outside: set[str]) -> dict[str, tuple[int, int]]:
    """First and last call of every arena tensor; inputs live from the start, results to the end."""
    found: dict[str, tuple[int, int]] = {}
    for position, call in enumerate(program.calls):
        for name in set(call.arguments) - outside:
            first, _ = found.get(name, (position, position))
            found[name] = (first, position)
    graph = program.stored.graph
    for name in {graph.input, graph.target} & set(found):
        found[name] = (0, found[name][1])
    for name in {graph.output, graph.loss} & set(found):
        found[name] = (found[name][0], len(program.calls))
    return found


def check(arena: Arena, sizes: dict[str, int], lives: dict[str, tuple[int, int]]) -> None:
    names = sorted(arena.offsets)
    for i, a in enumerate(names):
        assert arena.offsets[a] % 64 == 0
        assert arena.offsets[a] + sizes[a] <= arena.size_bytes
        for b in names[i + 1 :]:
            together = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
            apart = arena.offsets[a] + sizes[a] <= arena.offsets[b] or arena.offsets[b] + sizes[b] <= arena.offsets[a]
            assert apart or not together, (a, b)


@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet18", "mobilenetv2"])
def test_no_two_live_tensors_overlap(name: str) -> None:
    kernels = lower_model(load_model(name))
    plan = plan_memory(kernels)
    outside = set(kernels.graph.shared) | set(kernels.scalars)
    for program, placed in zip(kernels.programs, plan.programs, strict=True):
        lives = spans(program, outside)
        assert set(lives) == set(placed.fixed.offsets) | set(placed.batched.offsets)
        for arena in (placed.fixed, placed.batched):
            check(arena, {n: program.storages[n].bytes for n in arena.offsets}, lives)
            assert arena.size_bytes <= 1.05 * arena.lower_bound_bytes


def test_parameters_of_a_block_are_one_segment() -> None:
    kernels = lower_model(load_model("resnet8"))
    plan = plan_memory(kernels)
    ends = sorted((offset, offset + kernels.graph.shared[name].bytes) for name, offset in plan.parameters.items())
    assert ends[0][0] == 0 and ends[-1][1] == plan.parameter_bytes
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))


def test_a_segment_is_decayed_then_other_then_frozen_parameters() -> None:
    kernels = lower_model(load_model("resnet8"))
    training, shared = kernels.graph.training, kernels.graph.shared
    trained = {n: g for n, g in training.gradients.items() if not n.endswith("weight") or "bn" in n or "conv2" in n}
    graph = replace(kernels.graph, training=replace(training, gradients=trained))
    partly = replace(kernels, graph=graph)
    plan = plan_memory(partly)
    block, shapes = blocks_of(partly), {n: training.model.tensors[n].shape for n in plan.parameters}
    seen = set()
    for number, span in enumerate(segment_spans(partly, plan)):
        own = [n for n in plan.parameters if block[n] == number]
        start = span.parameter_offset
        for name in own:
            end = plan.parameters[name] - start + shared[name].bytes
            decayed, updated = name in trained and len(shapes[name]) > 1, name in trained
            assert (end <= span.decayed_bytes, end <= span.updated_bytes) == (decayed, updated), name
            seen.add((decayed, updated))
        assert span.decayed_bytes <= span.updated_bytes <= span.parameter_bytes
    assert seen == {(True, True), (False, True), (False, False)}


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 20)), max_size=25))
def test_any_lifetimes_are_placed_without_overlap(rows: list[tuple[int, int, int]]) -> None:
    tensors = [Lifetime(f"t{i}", 64 * size, first, first + length) for i, (size, first, length) in enumerate(rows)]
    arena = place(tensors)
    check(arena, {t.name: t.size_bytes for t in tensors}, {t.name: (t.first, t.last) for t in tensors})
    assert arena.size_bytes >= arena.lower_bound_bytes
