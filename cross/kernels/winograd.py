"""Winograd's convolution F(2x2, 3x3): what its kernels share. 16 products make the 2 x 2 outputs of a 3x3 kernel, not 36.

Outputs are taken in tiles of 2 x 2, each from a tile of 4 x 4 inputs (Lavin and Gray 2015, section 4.1; the sign of the last
row of B^T and of A is turned, so that no value is negated alone):

    Y  = A^T [ (G g G^T) . (B^T d B) ] A      summed over input channels: 16 matrix products, one a place of the tile
    dg = G^T [ (A dY A^T) . (B^T d B) ] G     summed over tiles

Tiles are numbered over the whole batch, so a matrix product runs across samples where images are small, and only the last
register tile of a batch computes what nobody reads. A chunk of tiles is transformed at a time, into a tensor of fixed size:
what a kernel needs does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cross.kernels.arithmetic import constant, keep
from cross.kernels.convolution import ConvSpec, convolution_class
from cross.kernels.loop_nest import Expr, settle
from cross.target import Target

PLACES = 16
"""Of a transformed tile: 4 rows x 4 columns."""

TILE_PIXELS = 4
"""Outputs of a tile."""

PAIR = 2
"""Channel blocks that are worked on together: inputs and outputs fill them whole."""

FEWEST_TILES = 4
"""Of a sample: with fewer most batches would take the direct kernels."""

GROUP = 48
"""Tiles that a task multiplies at a time: whole register tiles of 3, 4, 6 or 8."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of one sample."""

    rows: int
    columns: int

    @property
    def count(self) -> int:
        return self.rows * self.columns

    def place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """(sample, first output row, first output column) of a tile of the batch."""
        tile = settle(tile)
        inside = settle(tile % self.count)
        return settle(tile // self.count), settle(inside // self.columns * 2), settle(inside % self.columns * 2)


def suits_winograd(spec: ConvSpec, target: Target) -> bool:
    """A 3x3 kernel with stride 1 over whole tiles, whose channels fill pairs of blocks: with fewer the transforms weigh more
    than the products that they save."""
    pair = PAIR * target.channel_block
    even = (spec.height, spec.width, spec.out_height, spec.out_width)
    return (
        convolution_class(spec, target) == "direct"
        and spec.groups == 1
        and spec.kernel == (3, 3)
        and spec.strides == spec.dilations == (1, 1)
        and all(extent % 2 == 0 for extent in even)
        and max(spec.pads) <= 2
        and min(output_tiles(spec).count, input_tiles(spec).count) >= FEWEST_TILES
        and spec.in_channels % pair == spec.out_channels % pair == 0
    )


def output_tiles(spec: ConvSpec) -> Tiles:
    """Tiles of y: of the forward pass and the weight gradient."""
    return Tiles(spec.out_height // 2, spec.out_width // 2)


def input_tiles(spec: ConvSpec) -> Tiles:
    """Tiles of x: of the input gradient."""
    return Tiles(spec.height // 2, spec.width // 2)


Line = Callable[[Sequence[Expr]], Sequence[Expr]]


def _half(value: Expr) -> Expr:
    return value * constant(0.5, value)


def input_line(d: Sequence[Expr]) -> Sequence[Expr]:
    """B^T."""
    return d[0] - d[2], d[1] + d[2], d[2] - d[1], d[3] - d[1]


def gradient_line(y: Sequence[Expr]) -> Sequence[Expr]:
    """A."""
    return y[0], y[0] + y[1], y[0] - y[1], y[1]


def output_line(m: Sequence[Expr]) -> Sequence[Expr]:
    """A^T."""
    return m[0] + m[1] + m[2], m[1] - m[2] + m[3]


def weight_line(g: Sequence[Expr]) -> Sequence[Expr]:
    """G."""
    ends = keep(g[0] + g[2])
    return g[0], _half(ends + g[1]), _half(ends - g[1]), g[2]


def weight_gradient_line(u: Sequence[Expr]) -> Sequence[Expr]:
    """G^T."""
    middle = keep(_half(u[1] + u[2]))
    return u[0] + middle, _half(u[1] - u[2]), u[3] + middle


def both_ways(line: Line, read: Callable[[int, int], Expr], extent: int) -> list[list[Expr]]:
    """L D L^T of the `extent` x `extent` values that `read(row, column)` gives."""
    columns = [[keep(value) for value in line([keep(read(i, j)) for i in range(extent)])] for j in range(extent)]
    return [list(line([column[i] for column in columns])) for i in range(len(columns[0]))]


def chunk_tiles(target: Target, channels: int, caches: int, bounds: tuple[int, int], parts: int = 1) -> int:
    """Tiles of a chunk, whole groups between `bounds`: transformed they take so many second-level caches. Where that cache is the
    last before memory, the chunks of all parts together take half of it."""
    size = caches * target.l2_kib * 1024 if target.l3_kib else target.l2_kib * 512 // parts
    fitting = size // (PLACES * channels * 4)
    return max(bounds[0], min(bounds[1], fitting) // GROUP * GROUP)
