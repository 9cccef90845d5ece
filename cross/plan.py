"""Stage 4: lifetimes to offsets in one arena, per program.

Two arenas a program, planned alike: tensors of a fixed size, and tensors of so many bytes a sample. The second grows with
the batch as a whole (an offset is a number of bytes a sample too), so a program's memory is fixed + batch * per_sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cross.in_place import in_place
from cross.lower import Kernels, LoweredProgram
from cross.program_graph import TrainingGraph


@dataclass(frozen=True)
class Lifetime:
    """A tensor's bytes (a sample, if batched) and the calls [first, last] during which it must stay intact."""

    name: str
    size_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Offsets in bytes (a sample, if batched); `lower_bound_bytes` is the largest sum of bytes live at one call."""

    offsets: Mapping[str, int]
    size_bytes: int
    lower_bound_bytes: int
    lifetimes: tuple[Lifetime, ...]


@dataclass(frozen=True)
class ProgramPlan:
    fixed: Arena
    batched: Arena


@dataclass(frozen=True)
class MemoryPlan:
    """`parameters`, `states`, `constants`: offsets in bytes in a parameter set's regions; programs in the order of `Kernels`."""

    programs: tuple[ProgramPlan, ...]
    parameters: Mapping[str, int]
    states: Mapping[str, int]
    constants: Mapping[str, int]
    parameter_bytes: int
    state_bytes: int
    constant_bytes: int


def plan_memory(kernels: Kernels) -> MemoryPlan:
    """Place every tensor of every program."""
    model, shared = kernels.graph.training.model, kernels.graph.shared

    def region(names: Iterable[str]) -> tuple[dict[str, int], int]:
        offsets, end = {}, 0
        for name in names:
            offsets[name] = end
            end += shared[name].bytes
        return offsets, end

    def group(name: str) -> int:
        return parameter_group(kernels.graph.training, name)

    parameters, parameter_bytes = region(in_block_order(kernels, sorted(model.parameters, key=group)))
    states, state_bytes = region(in_block_order(kernels, model.states))
    constants, constant_bytes = region(model.constants)
    programs = tuple(_plan_program(program, kernels) for program in kernels.programs)
    return MemoryPlan(programs, parameters, states, constants, parameter_bytes, state_bytes, constant_bytes)


def blocks_of(kernels: Kernels) -> dict[str, int]:
    """The block that each parameter, state and constant belongs to: the first that reads it."""
    found: dict[str, int] = {}
    for node in kernels.graph.training.model.nodes:
        for name in node.inputs:
            found.setdefault(name, node.block)
    return found


def in_block_order(kernels: Kernels, names: Iterable[str]) -> list[str]:
    """So that a segment (the parameters of a block) is contiguous."""
    order = blocks_of(kernels)
    return sorted(names, key=lambda name: order.get(name, 0))


def parameter_group(training: TrainingGraph, name: str) -> int:
    """Place inside a segment: 0 trained, two and more dimensions; 1 trained, fewer (biases, norms); 2 frozen.

    So weight decay, gradients and optimizer state are prefixes of a segment.
    """
    if name not in training.gradients:
        return 2
    return 0 if len(training.model.tensors[name].shape) >= 2 else 1


def outside_arena(program: LoweredProgram, kernels: Kernels) -> frozenset[str]:
    """Tensors that live outside a program's arena: parameters, states, constants, scalars, gradients that it shares."""
    return frozenset(kernels.graph.shared).difference(program.own).union(kernels.scalars)


def _plan_program(program: LoweredProgram, kernels: Kernels) -> ProgramPlan:
    outside = outside_arena(program, kernels)
    lifetimes, heirs = lifetimes_of(program, outside), in_place(program, outside)
    batched = [t for t in lifetimes if program.storages[t.name].batched]
    fixed = [t for t in lifetimes if not program.storages[t.name].batched]
    return ProgramPlan(_place_with_heirs(fixed, heirs), _place_with_heirs(batched, heirs))


def _place_with_heirs(lifetimes: Sequence[Lifetime], heirs: Mapping[str, str]) -> Arena:
    """Tensors that take the place of another (`heirs`: whose) are one tensor to be placed, which lives as long as both."""
    places: dict[str, Lifetime] = {}
    roots: dict[str, str] = {}
    for tensor in sorted(lifetimes, key=lambda t: t.first):
        root = roots[tensor.name] = roots.get(heirs.get(tensor.name, ""), tensor.name)
        places[root] = replace(places[root], last=tensor.last) if root in places else tensor
    arena = place(list(places.values()))
    return replace(arena, offsets={name: arena.offsets[root] for name, root in roots.items()})


def lifetimes_of(program: LoweredProgram, outside: Collection[str]) -> list[Lifetime]:
    """From the first call that touches a tensor to the last; inputs from the start, results to the end.

    An update counts as part of the call before it: it makes no tensor. So a program with updates is laid out as it is without.
    """
    graph = program.stored.graph
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    position = -1
    for call in program.calls:
        position += bool(call.kernel)
        for name in call.arguments:
            first.setdefault(name, position)
            last[name] = position
    for name in (graph.input, graph.target):
        if name in first:
            first[name] = 0
    for name in (graph.output, graph.loss):
        if name in last:
            last[name] = position + 1
    return [
        Lifetime(name, program.storages[name].bytes, first[name], last[name]) for name in first if name not in outside
    ]


CLOSE = 1.02
"""An arena of so many times what is live at once is small enough."""

ROUNDS = 40
"""Of moving what stands highest, at most."""


def place(lifetimes: Sequence[Lifetime]) -> Arena:
    """Offsets without overlap in time and space: greedy best fit in a few orders, the smallest arena wins. While that is not
    close to what is live at once, each order is tried again with the tensors at the top of its arena placed first.

    Only calls at which one of them begins or ends count as time: so an arena is the same whatever else a program calls."""
    times = sorted({time for t in lifetimes for time in (t.first, t.last)})
    count = {time: number for number, time in enumerate(times)}
    orders: tuple[Callable[[Lifetime], tuple[float, ...]], ...] = (
        lambda t: (-t.size_bytes, t.first),
        lambda t: (-t.size_bytes * (count[t.last] - count[t.first] + 1), t.first),
        lambda t: (count[t.first] - count[t.last], -t.size_bytes),
        lambda t: (t.first, -t.size_bytes),
    )
    bound, best, best_size = lower_bound(lifetimes), {}, -1
    queues = [sorted(lifetimes, key=lambda t: (*order(t), t.name)) for order in orders]
    for number in range(len(orders) + ROUNDS):
        queue = queues[number % len(orders)]
        offsets, size = _place_in_order(queue)
        if best_size < 0 or size < best_size:
            best, best_size = offsets, size
        if best_size <= bound or (number + 1 >= len(orders) and best_size <= CLOSE * bound):
            break
        queue.sort(key=lambda t: offsets[t.name] + t.size_bytes < size)
    return Arena(best, max(best_size, 0), bound, tuple(lifetimes))


def _place_in_order(lifetimes: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    placed: list[tuple[int, Lifetime]] = []
    for tensor in lifetimes:
        taken = sorted((offset, offset + other.size_bytes) for offset, other in placed if other.overlaps(tensor))
        placed.append((_best_gap(taken, tensor.size_bytes), tensor))
    end = max((offset + tensor.size_bytes for offset, tensor in placed), default=0)
    return {tensor.name: offset for offset, tensor in placed}, end


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The tightest gap between taken ranges that holds `size`, else the end of the last one."""
    best, best_waste, cursor = -1, 0, 0
    for start, end in taken:
        waste = start - cursor - size
        if waste >= 0 and (best < 0 or waste < best_waste):
            best, best_waste = cursor, waste
        cursor = max(cursor, end)
    return best if best >= 0 else cursor


def lower_bound(lifetimes: Sequence[Lifetime]) -> int:
    """No plan can be smaller than the bytes that are live together at some call."""
    return max((sum(t.size_bytes for t in lifetimes if t.first <= at.first <= t.last) for at in lifetimes), default=0)
