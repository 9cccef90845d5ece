"""Seeded initial values: the same bits in numpy here and in C on the board (native/), on every architecture.

A tensor's values depend only on the seed, its name and its shape, so no weights file is needed to start a training run.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

import numpy as np

from cross.graph import Init, Model, Shape

Array = np.ndarray[Any, np.dtype[Any]]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_CHUNK = 1 << 15


def fnv1a64(text: str) -> int:
    """FNV-1a, 64 bits, of the text in UTF-8."""
    value = _FNV_OFFSET
    for byte in text.encode("utf-8"):
        value = ((value ^ byte) * _FNV_PRIME) & _MASK
    return value


def splitmix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014) on an unsigned 64-bit number."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix_in_place(x: Array, spare: Array) -> None:
    """`splitmix64` of every element of the uint64 array; numpy wraps round as C does. `spare` is as large as `x`."""
    x += np.uint64(_GOLDEN)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(x, np.uint64(shift), out=spare)
        x ^= spare
        x *= np.uint64(factor)
    np.right_shift(x, np.uint64(31), out=spare)
    x ^= spare


def uniform(name: str, shape: Shape, scale: float, seed: int) -> Array:
    """float32 values in [-scale, scale) of tensor `name`; row-major element i is 24 bits of splitmix64(key + i)."""
    key = splitmix64((seed & _MASK) ^ fnv1a64(name))
    values = np.empty(prod(shape), np.float32)
    spare = np.empty(min(_CHUNK, values.size), np.uint64)
    for first in range(0, values.size, _CHUNK):
        chunk = values[first : first + _CHUNK]
        bits = np.arange(first, first + chunk.size, dtype=np.uint64)
        bits += np.uint64(key)
        _mix_in_place(bits, spare[: chunk.size])
        bits >>= np.uint64(40)
        chunk[:] = bits
        chunk *= np.float32(2.0**-23)
        chunk -= np.float32(1)
        chunk *= np.float32(scale)
    return values.reshape(shape)


def initial_value(name: str, shape: Shape, init: Init, seed: int) -> Array:
    """The float32 array that `init` stands for."""
    if init.kind == "uniform":
        return uniform(name, shape, init.scale, seed)
    return np.full(shape, init.scale, np.float32)


def initial_values(model: Model, seed: int) -> dict[str, Array]:
    """Seeded values of every parameter and state of `model`, as the board makes them without a weights file."""
    tensors: Mapping[str, Array] = {**model.parameters, **model.states}
    return {name: initial_value(name, array.shape, model.inits[name], seed) for name, array in tensors.items()}


def default_bound(fan_in: int) -> float:
    """PyTorch's default for weights and biases of convolution and linear layers: 1 / sqrt(fan_in)."""
    return 1.0 / sqrt(max(fan_in, 1))
