"""Where a kernel is wanted, and the calls that come of it: what the builders of `cross.kernels.registry` take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cross.fuse import domain_of
from cross.graph import Node, TensorType
from cross.kernels import convolution as conv
from cross.storage import Storage
from cross.target import Target


@dataclass(frozen=True)
class Site:
    """Where a kernel is wanted."""

    node: Node
    types: Mapping[str, TensorType]
    storages: Mapping[str, Storage]
    spec: conv.ConvSpec | None
    target: Target
    lean: bool = False
    """Kernels that take the least memory, not the least time."""

    @property
    def vector(self) -> int:
        return self.target.channel_block

    def inputs(self) -> tuple[Storage, ...]:
        return tuple(self.storages[name] for name in self.node.inputs)

    def outputs(self) -> tuple[Storage, ...]:
        return tuple(self.storages[name] for name in self.node.outputs)

    def input_types(self) -> tuple[TensorType, ...]:
        return tuple(self.types[name] for name in self.node.inputs)

    def output_types(self) -> tuple[TensorType, ...]:
        return tuple(self.types[name] for name in self.node.outputs)

    def domain(self) -> tuple[int, ...]:
        return domain_of(self.types, self.node)

    def everything(self) -> tuple[Any, ...]:
        """All that a kernel without extras depends on."""
        attrs = tuple(sorted((k, v) for k, v in self.node.attrs.items() if k not in ("updates", "batch_norm")))
        return attrs, self.inputs(), self.input_types(), self.outputs(), self.output_types()


@dataclass(frozen=True)
class SiteCall:
    """One call: symbol stem, what the kernel depends on, its builder, its argument tensors, and temporaries it needs.

    `flops` is (fixed, a sample); None: counted from the node's expressions.
    """

    name: str
    key: Any
    build: Callable[[], Any]
    arguments: tuple[str, ...]
    flops: tuple[int, int] | None = None
    temporaries: Mapping[str, Storage] = field(default_factory=dict)


def single(site: Site, build: Callable[[], Any], flops: tuple[int, int] | None = None) -> list[SiteCall]:
    """The one call of a kernel without extras."""
    node = site.node
    return [SiteCall(node.op, site.everything(), build, (*node.inputs, *node.outputs), flops)]
