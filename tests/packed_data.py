"""Packed data as the board reads them, and its order and augmentation once more in Python: the oracle of the native ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

Array = np.ndarray[Any, Any]
MEAN, STD = [0.25, 0.5], [0.3, 0.7]
_MASK = 2**64 - 1


def pack(
    path: Path,
    x: Array,
    y: Array,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    domain: Array | None = None,
) -> Path:
    """A file of the format taste-data 1; the order of its tensors is that of their bytes."""
    tensors = {"x": np.ascontiguousarray(x), "y": np.ascontiguousarray(y)}
    if domain is not None:
        tensors["domain"] = domain
    plain = save(tensors)
    data = plain[8 + int.from_bytes(plain[:8], "little") :]
    metadata = {"format": "taste-data 1", "split": "train", "classes": "[]", "source": "test"}
    metadata |= {"sha256": hashlib.sha256(data).hexdigest()}
    if x.ndim == 4:
        metadata |= {"mean": json.dumps(mean or MEAN), "std": json.dumps(std or STD)}
    path.write_bytes(save(tensors, metadata=metadata))
    return path


def normalised(x: Array) -> Array:
    """u8 * scale + shift, both rounded to float32 once."""
    shape = (-1, 1, 1)
    scale = np.array([1 / (255 * s) for s in STD]).astype(np.float32).reshape(shape)
    shift = np.array([-m / s for m, s in zip(MEAN, STD, strict=True)]).astype(np.float32).reshape(shape)
    return np.asarray(x.astype(np.float32) * scale + shift)


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def key_of(seed: int, name: str, epoch: int) -> int:
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = ((fnv ^ byte) * 0x100000001B3) & _MASK
    return splitmix64((splitmix64(seed ^ fnv) + epoch) & _MASK)


def keyed_order(seed: int, epoch: int, count: int) -> Array:
    """The sample at each position of an epoch."""
    key, half = key_of(seed, "order", epoch), 1
    while 4**half < count:
        half += 1
    mask = 2**half - 1

    def step(at: int) -> int:
        left, right = at >> half, at & mask
        for number in range(6):
            mixed = splitmix64((key + (number << 32) + right) & _MASK) & mask
            left, right = right, left ^ mixed
        return left << half | right

    found = []
    for position in range(count):
        at = step(position)
        while at >= count:
            at = step(at)
        found.append(at)
    return np.array(found)


def augmented(image: Array, level: str, seed: int, epoch: int, position: int) -> Array:
    """Normalised [C, H, W], shifted within a border of zeros, mirrored, with a square of zeros."""
    rank = ["none", "flip", "crop-flip", "crop-flip-cutout"].index(level)
    key = (key_of(seed, "augment", epoch) + 8 * position) & _MASK

    def draw(number: int, count: int) -> int:
        return (splitmix64((key + number) & _MASK) >> 32) * count >> 32

    out = normalised(image)
    _, height, width = out.shape
    if rank >= 2:
        down, right = draw(1, 9), draw(2, 9)
        out = np.pad(out, ((0, 0), (4, 4), (4, 4)))[:, down : down + height, right : right + width].copy()
    if rank >= 1 and draw(0, 2):
        out = out[:, :, ::-1].copy()
    if rank >= 3:
        side = min(height, width) // 2
        top, left = draw(3, height) - side // 2, draw(4, width) - side // 2
        out[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
    return out
