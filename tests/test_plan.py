"""The memory plan against lifetimes worked out again from the calls alone: nothing live is overwritten, little is wasted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cross.fuse_updates import fuse_updates
from cross.load_model import load_model
from cross.lower import Kernels, LoweredProgram
from cross.plan import Arena, Lifetime, blocks_of, place, plan_memory
from cross.tables import segment_spans
from cross.zoo import ZOO
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


def in_place(program: LoweredProgram, lives: dict[str, tuple[int, int]]) -> set[tuple[str, str]]:
    """(input, output) of element-wise calls that may lie in one place: stored alike, one ends where the other begins, both of
    one block, and none that a caller looks at or supplies."""
    graph, found = program.stored.graph, set()
    kept = {graph.input, graph.target, graph.output, graph.loss} | graph.protected
    block = {name: program.calls[first].block for name, (first, _) in lives.items()}
    for position, call in enumerate(program.calls):
        *inputs, output = call.arguments
        if not call.name.startswith("map ") or output not in lives:
            continue
        for name in set(inputs) & set(lives) - kept:
            ends = lives[name][1] == position == lives[output][0] and block[name] == call.block
            if ends and program.storages[name] == program.storages[output]:
                found.add((name, output))
    return found


def check(
    arena: Arena,
    sizes: dict[str, int],
    lives: dict[str, tuple[int, int]],
    may_share: Collection[tuple[str, str]] = frozenset(),
) -> int:
    """Nothing overlaps, but for outputs in place of an input; returns the largest sum of bytes live at one call."""
    names = sorted(arena.offsets)
    if not names:
        return 0
    start, size = (np.array([of[name] for name in names]) for of in (arena.offsets, sizes))
    first, last = np.array([lives[name] for name in names]).T
    assert not (start % 64).any() and (start + size).max() <= arena.size_bytes
    together = (first[:, None] <= last) & (first <= last[:, None])
    apart = (start[:, None] + size[:, None] <= start) | (start + size <= start[:, None])
    found = np.argwhere(np.triu(together & ~apart, 1))
    for a, b in found:
        assert (start[a], size[a]) == (start[b], size[b]), (names[a], names[b])
        assert {(names[a], names[b]), (names[b], names[a])} & set(may_share), (names[a], names[b])
    live = np.cumsum(np.bincount(first, size, last.max() + 2) - np.bincount(last + 1, size, last.max() + 2))
    for output in {output for _, output in may_share} & set(names):
        live[lives[output][0]] -= sizes[output]
    return int(live.max())


@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_two_live_tensors_overlap_and_little_is_wasted(name: str) -> None:
    kernels = fuse_updates(lower_model(load_model(name)))
    plan = plan_memory(kernels)
    outside = set(kernels.graph.shared) | set(kernels.scalars)
    assert [program.stored.graph.name for program in kernels.programs] == ["train", "eval", "train_fused"]
    for program, placed in zip(kernels.programs, plan.programs, strict=True):
        own = set(kernels.graph.training.gradients.values()) if program is kernels.programs[2] else set()
        lives = spans(program, outside - own)
        assert set(lives) == set(placed.fixed.offsets) | set(placed.batched.offsets)
        for arena in (placed.fixed, placed.batched):
            sizes = {n: program.storages[n].bytes for n in arena.offsets}
            bound = check(arena, sizes, lives, in_place(program, lives))
            assert bound <= arena.lower_bound_bytes <= arena.size_bytes <= 1.05 * bound
    check_updates(kernels)
    train, fused = plan.programs[0], plan.programs[2]
    assert fused.batched.size_bytes <= train.batched.size_bytes
    assert fused.fixed.size_bytes <= train.fixed.size_bytes + plan.parameter_bytes


def check_updates(kernels: Kernels) -> None:
    """`train_fused` is `train`, and one update of every trained parameter behind all that touches it or its gradient."""
    train, fused = kernels.programs[0], kernels.programs[2]
    assert [call for call in fused.calls if call.kernel] == list(train.calls)
    updates = {call.arguments: position for position, call in enumerate(fused.calls) if not call.kernel}
    assert updates.keys() == kernels.graph.training.gradients.items()
    for names, position in updates.items():
        assert fused.calls[position].phase == "backward"
        assert not any(set(names) & set(call.arguments) for call in fused.calls[position + 1 :])


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
    bound = check(arena, {t.name: t.size_bytes for t in tensors}, {t.name: (t.first, t.last) for t in tensors})
    assert arena.size_bytes >= arena.lower_bound_bytes == bound
