"""Runs of multiply-adds, total += scalar * vector: the inner loops of every convolution.

A core that reorders is given each product as it stands, and finds the loads itself. An in-order core waits where a value is used
right after its load, and LLVM's scheduler does not look as far ahead as registers would allow. So for such cores the loads are
placed here, ahead of the products, and held there (`loop_nest.keep_order`). Each total is summed in the order in which its
products are given: the results are the same bits either way.

Where the loads stand best depends on the core (`Target.loads_together`): several at once where a load waits for the multiply-adds
before it, as on Cortex-A53; else between the products, AHEAD of their use, where most of them take no time of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T

from cross.kernels.loop_nest import Buffer, Expr, add_to, address_of, keep_order, lanes, local, settle, spread, store
from cross.kernels.tiles import registers_a_vector
from cross.target import Target

AHEAD = 6
"""Products between a load and its first use: the cycles that a load takes, and a little more."""

VECTOR_LOAD = 3
"""Cycles, thus products, from one load of a vector to the next on cores with V."""

ADDRESSES = 16
"""Addresses of vectors that are computed at a time with V, whose loads take no offset: with more, registers run short."""

STEPS, STEPS_WITH_V = 4, 8
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

    @property
    def place(self) -> Hashable:
        return id(self.buffer), self.key, self.lane, self.width

    def read(self) -> Expr:
        return self.buffer[(*self.index, lanes(self.first + self.lane, self.width))]

    def lanes(self) -> list[Factor]:
        return [replace(self, lane=self.lane + lane, width=1) for lane in range(self.width)]


@dataclass(frozen=True)
class Product:
    """total[row, vector.lane ..] += scalar * vector. The scalar may be a vector too, where cores have them."""

    total: Buffer
    row: int
    scalar: Factor
    vector: Factor

    @property
    def place(self) -> tuple[Expr, ...]:
        return self.row, lanes(self.vector.lane, self.vector.width)

    def add(self, scalar: Expr, vector: Expr) -> None:
        factor = scalar if self.scalar.width > 1 else spread(scalar, self.vector.width)
        add_to(self.total, self.place, factor * vector)


@dataclass
class _Load:
    """A factor that is loaded once, for the products `first` to `last`; `value` holds it from product `placed` on."""

    factor: Factor
    first: int
    last: int
    placed: int = -1
    value: Buffer = None
    is_addressed: bool = False

    @property
    def is_vector(self) -> bool:
        return self.factor.width > 1

    def write(self) -> None:
        self.value = local(self.factor.width)
        store(self.value, (lanes(0, self.factor.width),), self.factor.read())

    def lane(self, factor: Factor) -> Expr:
        return self.value[lanes(factor.lane - self.factor.lane, factor.width)]


def runs(target: Target, steps: int) -> list[range]:
    """Steps 0, 1, .. cut into runs of products: an in-order core looks ahead through all of them."""
    size = max(1, steps) if target.in_order else 1
    return [range(step, step + size) for step in range(0, steps, size)]


def add_products(target: Target, products: Sequence[Product], totals: int) -> None:
    """A run of products. `totals` vectors stay in registers all the while."""
    if target.in_order:
        _add_in_order(target, products, totals)
        return
    for product in products:
        product.add(product.scalar.read(), product.vector.read())


def add_steps(target: Target, count: Expr, at: Callable[[Expr, int], Sequence[Product]], totals: int) -> None:
    """The products `at(step, number)` of `count` steps, where `number` tells the steps of a run apart: an in-order core takes
    several steps a run."""
    if not target.in_order:
        with T.serial(count) as step:
            add_products(target, at(step, 0), totals)
        return
    most = STEPS_WITH_V if target.rvv else STEPS
    whole = settle(count // most)
    with T.serial(whole) as outer:
        add_products(target, [p for number in range(most) for p in at(outer * most + number, number)], totals)
    with T.serial(count % most) as rest:
        add_products(target, at(whole * most + rest, 0), totals)


def _add_in_order(target: Target, products: Sequence[Product], totals: int) -> None:
    if target.vector_floats == 1:
        products = [replace(product, vector=lane) for product in products for lane in product.vector.lanes()]
    products = _in_turns(products)
    loads = _loads(target, products, totals)
    pending = sorted({id(load): load for load in loads.values()}.values(), key=lambda load: load.first)
    placed: list[_Load] = []
    for number, product in enumerate(products):
        placed = [load for load in placed if load.last >= number]
        due = _due(target, number, placed, pending, totals)
        if due and target.loads_together:
            keep_order(product.total[product.place])
        for load in due:
            if target.rvv and load.is_vector and not load.is_addressed:
                _find_addresses([load, *(other for other in pending if other.is_vector)][:ADDRESSES])
            load.write()
            if not target.loads_together or load is due[-1]:
                keep_order(load.lane(load.factor))
        scalar, vector = (loads[factor.place] for factor in (product.scalar, product.vector))
        product.add(scalar.lane(product.scalar), vector.lane(product.vector))
    if target.loads_together:
        keep_order(products[-1].total[products[-1].place])


def _in_turns(products: Sequence[Product]) -> list[Product]:
    """One product of each total, then the next of each: none waits for the one before it."""
    counts: Counter[Hashable] = Counter()
    turns = []
    for product in products:
        total = id(product.total), product.row, product.vector.lane
        turns.append((counts[total], product))
        counts[total] += 1
    return [product for _, product in sorted(turns, key=lambda turn: turn[0])]


def _loads(target: Target, products: Sequence[Product], totals: int) -> dict[Hashable, _Load]:
    """The load of each factor. NEON multiplies by an element of a vector: there scalars that fill one are loaded as one, where
    all that are needed at a time fit into registers."""
    if target.arch == "aarch64":
        scalars = {product.scalar.place: product.scalar for product in products if product.scalar.width == 1}
        wholes = {place: replace(s, lane=s.lane // 4 * 4, width=4) for place, s in scalars.items()}
        joined = {place: w for place, w in wholes.items() if all(lane.place in scalars for lane in w.lanes())}
        loads = _loads_of(products, joined)
        if _most_at_once(loads) + totals <= target.vector_registers:
            return loads
    return _loads_of(products, {})


def _loads_of(products: Sequence[Product], joined: dict[Hashable, Factor]) -> dict[Hashable, _Load]:
    """The load of each factor: of itself, or of the vector that it is joined into."""
    loads: dict[Hashable, _Load] = {}
    for number, product in enumerate(products):
        for factor in (product.scalar, product.vector):
            wanted = joined.get(factor.place, factor)
            load = loads.setdefault(wanted.place, _Load(wanted, number, number))
            load.last = number
            loads[factor.place] = load
    return loads


def _most_at_once(loads: dict[Hashable, _Load]) -> int:
    different = {id(load): load for load in loads.values()}.values()
    return max(sum(other.first <= load.first <= other.last for other in different) for load in different)


def _due(target: Target, number: int, placed: list[_Load], pending: list[_Load], totals: int) -> list[_Load]:
    """Takes from `pending` what is to be loaded before this product, and puts it into `placed`."""
    due: list[_Load] = []
    needed = bool(pending) and pending[0].first <= number
    while pending and (needed or not target.loads_together):
        load = pending[0]
        if load.first > number:
            is_soon = target.loads_together or (load.first <= number + AHEAD and _is_free(target, number, placed, load))
            if not is_soon or not _has_register(target, load, placed, totals):
                break
        load.placed = number
        due.append(pending.pop(0))
        placed.append(load)
    return due


def _is_free(target: Target, number: int, placed: list[_Load], load: _Load) -> bool:
    """Whether the vectors that were loaded before this one have come."""
    if not (target.rvv and load.is_vector):
        return True
    return all(number >= other.placed + VECTOR_LOAD for other in placed if other.is_vector)


def _has_register(target: Target, load: _Load, placed: list[_Load], totals: int) -> bool:
    """Whether a register is left for one more load. With V, scalars have registers of their own."""
    if target.rvv and not load.is_vector:
        return sum(not other.is_vector for other in placed) < target.vector_registers
    held = sum(other.is_vector or not target.rvv for other in placed)
    return totals * registers_a_vector(target) + held < target.vector_registers


def _find_addresses(loads: Sequence[_Load]) -> None:
    """Computes the addresses of loads here, at once: LLVM would do so one by one, between the products."""
    for load in loads:
        load.is_addressed = True
        keep_order(address_of(load.factor.buffer, (*load.factor.index, load.factor.first + load.factor.lane)))
