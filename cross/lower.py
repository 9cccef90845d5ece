"""Stage 3: every node becomes a call of a kernel; every distinct kernel is compiled once, to an object file.

A kernel's identity is its operator, the storages and types of its tensors and its attributes, so the sixty convolutions of a
ResNet share the few kernels that they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cross.assign_storage import StoredGraph, StoredProgram
from cross.expression import size
from cross.fuse import domain_of, expressions
from cross.graph import Node, TensorType
from cross.kernels.limit import SYMBOL, multiply_add_limit
from cross.kernels.registry import BUILDERS
from cross.kernels.site import Site, SiteCall
from cross.rules.context import DROPOUT_COUNTER, LABEL_SMOOTHING, LOSS_SCALE
from cross.storage import Storage
from cross.target import Target

PrimFunc = Any


@dataclass(frozen=True)
class Call:
    """One kernel call of a program. `arguments` are tensor names; flops as counted for the direct algorithm.

    `kernel` '': the optimizer's update of the first argument, a parameter, by the second, its gradient.
    """

    kernel: str
    name: str
    arguments: tuple[str, ...]
    phase: str
    block: int
    fixed_flops: int
    per_sample_flops: int


@dataclass(frozen=True)
class LoweredProgram:
    """Calls in order. `storages` covers every tensor they touch, temporaries included.

    `own`: gradients that this program keeps in its arena, where others share them.
    """

    stored: StoredProgram
    calls: tuple[Call, ...]
    storages: Mapping[str, Storage]
    types: Mapping[str, TensorType]
    own: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Kernels:
    """All programs as calls, and the distinct kernels (symbol -> PrimFunc builder, not yet run)."""

    graph: StoredGraph
    target: Target
    lean: bool
    programs: tuple[LoweredProgram, ...]
    builders: Mapping[str, Callable[[], PrimFunc]]

    @property
    def scalars(self) -> tuple[str, ...]:
        """Run-time scalars that some program reads."""
        touched = {name for program in self.programs for call in program.calls for name in call.arguments}
        return tuple(name for name in (LOSS_SCALE, DROPOUT_COUNTER, LABEL_SMOOTHING) if name in touched)


def lower(graph: StoredGraph, target: Target, lean: bool = False) -> Kernels:
    """Choose the kernels of every program for one target; `lean` ones where less memory goes before less time. Nothing is
    compiled here: see `cross.compile_kernels`."""
    builders: dict[str, Callable[[], PrimFunc]] = {SYMBOL: lambda: multiply_add_limit(target)}
    programs = tuple(_lower_program(program, target, lean, builders) for program in graph.programs)
    return Kernels(graph, target, lean, programs, builders)


def _lower_program(
    program: StoredProgram, target: Target, lean: bool, builders: dict[str, Callable[[], PrimFunc]]
) -> LoweredProgram:
    storages, types = dict(program.storages), dict(program.graph.tensors)
    calls: list[Call] = []
    for position, node in enumerate(program.graph.nodes):
        site = Site(node, types, storages, program.specs.get(position), target, lean)
        for part in BUILDERS[node.op](site):
            symbol = _symbol(part, site)
            builders.setdefault(symbol, part.build)
            for name, storage in part.temporaries.items():
                storages[name] = storage
                types[name] = TensorType(storage.shape, storage.dtype)
            label = f"{part.name} {node.outputs[0]}"
            fixed, per_sample = part.flops if part.flops is not None else _map_flops(node, types)
            calls.append(Call(symbol, label, part.arguments, node.phase, node.block, fixed, per_sample))
    return LoweredProgram(program, tuple(calls), storages, types)


def _symbol(part: SiteCall, site: Site) -> str:
    """A name from what the kernel depends on."""
    digest = hashlib.sha256(repr((part.name, part.key, site.target.name)).encode()).hexdigest()
    return f"taste_{part.name}_{digest[:12]}"


def _map_flops(node: Node, types: Mapping[str, TensorType]) -> tuple[int, int]:
    """Arithmetic of an element-wise or summing node: (fixed, a sample)."""
    if node.op not in ("map", "reduce", "sum_batch"):
        return 0, 0
    domain = TensorType(domain_of(types, node))
    work = domain.elements * sum(size(e) + (node.op != "map") for e in expressions(node))
    return (0, work) if domain.batched else (work, 0)
