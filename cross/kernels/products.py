"""Runs of multiply-adds, total += scalar * vector: the inner loops of every convolution.

A core that reorders is given each product as it stands, loads and all. An in-order core waits wherever a value is used right
after its load, so there the loads are placed here, ahead of the products, and the compiler keeps that order
(`cross/compile_kernels.py` switches its own scheduler off: it counts registers too carefully to look so far ahead). Each total
is summed in the order in which its products are given, so the results are the same bits either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T

from cross.kernels.loop_nest import Buffer, Expr, add_to, keep_order, lanes, local, settle, spread, store
from cross.kernels.tiles import registers_a_vector
from cross.target import Target

AHEAD = 6
"""Products between a load and its first use: the cycles that a load takes, and a little more."""


STEPS = 4
"""Of a run, where a step has but one product for each total."""


@dataclass(frozen=True)
class Factor:
    """`width` elements of a buffer from (*index, first + lane) on. `key` stands for the index, which cannot be compared:
    factors of a buffer with equal keys lie side by side, each at its lane."""

    key: Hashable
    buffer: Buffer
    index: tuple[Expr, ...]
    first: Expr
    lane: int = 0
    width: int = 1

    def read(self) -> Expr:
        return self.buffer[(*self.index, lanes(self.first + self.lane, self.width))]


@dataclass(frozen=True)
class Product:
    """total[row, vector.lane ..] += scalar * vector."""

    total: Buffer
    row: int
    scalar: Factor
    vector: Factor

    @property
    def place(self) -> tuple[Expr, ...]:
        return self.row, lanes(self.vector.lane, self.vector.width)

    def add(self, scalar: Expr, vector: Expr) -> None:
        add_to(self.total, self.place, spread(scalar, self.vector.width) * vector)


@dataclass
class _Load:
    """A factor that is loaded once for the products `first` to `last`; `value` holds it from then on."""

    factor: Factor
    first: int
    last: int
    value: Buffer = None

    def lane(self, factor: Factor) -> Expr:
        return self.value[lanes(factor.lane - self.factor.lane, factor.width)]


def runs(target: Target, steps: int) -> list[range]:
    """Steps 0, 1, .. cut into runs of products: an in-order core looks ahead through all of them."""
    size = max(1, steps) if target.in_order else 1
    return [range(step, step + size) for step in range(0, steps, size)]


def add_products(target: Target, products: Sequence[Product], totals: int) -> None:
    """A run of products, in this order. `totals` vectors stay in registers all the while."""
    if not target.in_order:
        for product in products:
            product.add(product.scalar.read(), product.vector.read())
        return
    if target.vector_floats == 1:
        products = [replace(p, vector=lane) for p in products for lane in _lanes(p.vector)]
    products = _in_turns(products)
    loads = _loads(target, products)
    pending = sorted({id(load): load for load in loads.values()}.values(), key=lambda load: load.first)
    live: list[_Load] = []
    for number, product in enumerate(products):
        live = [load for load in live if load.last >= number]
        due = _due(target, number, live, pending, totals)
        if due and target.loads_together:
            keep_order(product.total[product.place])
        for load in due:
            load.value = local(load.factor.width)
            store(load.value, (lanes(0, load.factor.width),), load.factor.read())
            if not target.loads_together or load is due[-1]:
                keep_order(load.lane(load.factor))
        scalar, vector = (loads[_place(factor)] for factor in (product.scalar, product.vector))
        product.add(scalar.lane(product.scalar), vector.lane(product.vector))
    if target.loads_together:
        keep_order(products[-1].total[products[-1].place])


def add_steps(target: Target, count: Expr, at: Callable[[Expr, int], Sequence[Product]], totals: int) -> None:
    """The products `at(step, number)` of `count` steps, where `number` tells the steps of a run apart: an in-order core takes
    several steps a run."""
    most = STEPS if target.in_order else 1
    whole = settle(count // most) if most > 1 else count
    with T.serial(whole) as outer:
        add_products(target, [p for number in range(most) for p in at(outer * most + number, number)], totals)
    if most > 1:
        with T.serial(count % most) as rest:
            add_products(target, at(whole * most + rest, 0), totals)


def _in_turns(products: Sequence[Product]) -> list[Product]:
    """One product of each total, then the next of each: none waits for the one before it."""
    counts: Counter[Hashable] = Counter()
    turns = []
    for product in products:
        total = id(product.total), product.row, product.vector.lane
        turns.append((counts[total], product))
        counts[total] += 1
    return [product for _, product in sorted(turns, key=lambda turn: turn[0])]


def _due(target: Target, number: int, live: list[_Load], pending: list[_Load], totals: int) -> list[_Load]:
    """Takes from `pending` what is loaded before this product, and puts it into `live`."""
    due: list[_Load] = []
    needed = bool(pending) and pending[0].first <= number
    while pending and (needed or not target.loads_together):
        load = pending[0]
        if load.first > number and not (
            _fits(target, load, live, totals) and (target.loads_together or load.first <= number + AHEAD)
        ):
            break
        due.append(pending.pop(0))
        live.append(load)
    return due


def _fits(target: Target, load: _Load, live: list[_Load], totals: int) -> bool:
    """Whether a register is left for one more load; with V scalars have registers of their own."""
    if target.rvv and load.factor.width == 1:
        return sum(other.factor.width == 1 for other in live) < target.vector_registers
    others = [other for other in live if not target.rvv or other.factor.width > 1]
    return totals * registers_a_vector(target) + len(others) < target.vector_registers


def _place(factor: Factor) -> Hashable:
    return id(factor.buffer), factor.key, factor.lane, factor.width


def _lanes(vector: Factor) -> list[Factor]:
    return [replace(vector, lane=vector.lane + lane, width=1) for lane in range(vector.width)]


def _loads(target: Target, products: Sequence[Product]) -> dict[Hashable, _Load]:
    """The load of each factor. NEON multiplies by an element of a vector: there, scalars that fill one are loaded as one."""
    loads: dict[Hashable, _Load] = {}
    scalars = {_place(product.scalar) for product in products}
    for number, product in enumerate(products):
        for factor in (product.scalar, product.vector):
            whole = replace(factor, lane=factor.lane // 4 * 4, width=4)
            by_element = target.arch == "aarch64" and factor is product.scalar
            joined = by_element and all(_place(lane) in scalars for lane in _lanes(whole))
            wanted = whole if joined else factor
            load = loads.setdefault(_place(wanted), _Load(wanted, number, number))
            load.last = number
            loads[_place(factor)] = load
    return loads
