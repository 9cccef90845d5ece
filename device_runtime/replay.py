"""The replay buffer of libtaste: samples as bytes, kept by a reservoir, balanced by class, or the newest of each class."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from device_runtime.errors import DeviceError
from device_runtime.library import Library, text

POLICIES = ("reservoir", "class-balanced", "ring")
"""In the order of taste_replay_policy."""

Array = np.ndarray[Any, Any]


class ReplayBuffer:
    """At most `capacity` samples uint8 [*shape] with their labels; all memory is taken here.

    The same samples and `seed` give the same content and draws on every board (native/include/taste.h says how).
    DeviceError 2: fewer places than classes, or an unknown policy.
    """

    def __init__(
        self,
        library: Library,
        shape: Sequence[int],
        *,
        capacity: int,
        classes: int,
        policy: str = "reservoir",
        seed: int = 0,
    ) -> None:
        if policy not in POLICIES:
            raise DeviceError(f"unknown policy {policy!r}. Use one of {', '.join(POLICIES)}.", 2)
        self.shape, self.capacity = tuple(shape), capacity
        self._ffi, self._c = library.ffi, library.functions
        self._error = self._ffi.new("taste_error *")
        size = int(np.prod(self.shape))
        options = (max(capacity, 0), size, classes, POLICIES.index(policy), seed)
        self._options = self._ffi.new("taste_replay_options *", options)
        self.size_bytes = int(self._c.taste_replay_bytes(self._options))
        if self.size_bytes == 0:
            raise DeviceError(f"a buffer of {capacity} samples for {classes} classes. Keep one a class or more.", 2)
        self._block = self._ffi.from_buffer(mmap.mmap(-1, self.size_bytes), require_writable=True)
        self._open(self._c.taste_replay_init)

    def __len__(self) -> int:
        return int(self._c.taste_replay_count(self._replay))

    def add(self, sample: Array, label: int) -> None:
        """Offer a sample; the policy decides whether it stays."""
        array = self._fitting(sample)
        self._check(self._c.taste_replay_add(self._replay, self._ffi.from_buffer(array), int(label), self._error))

    def draw(self, count: int) -> tuple[Array, Array]:
        """Up to `count` different samples uint8 [n, *shape] and labels int32 [n]."""
        slots = self._ffi.new("uint32_t[]", max(count, 1))
        return self._at([slots[i] for i in range(self._c.taste_replay_draw(self._replay, max(count, 0), slots))])

    def content(self) -> tuple[Array, Array]:
        """Everything that is kept."""
        return self._at(range(len(self)))

    def to_bytes(self) -> bytes:
        """The whole state, random numbers included, for `restore`."""
        return bytes(self._ffi.buffer(self._block)[: self.size_bytes])

    def restore(self, state: bytes) -> None:
        """Go on from a kept state. DeviceError 13: of other options; 14: damaged. Then the buffer is empty."""
        if len(state) != self.size_bytes:
            raise DeviceError(f"a state of {len(state)} bytes, this buffer's has {self.size_bytes}. Use its own.", 13)
        self._ffi.buffer(self._block)[: self.size_bytes] = state
        try:
            self._open(self._c.taste_replay_open)
        except DeviceError:
            self._open(self._c.taste_replay_init)
            raise

    def _open(self, function: Any) -> None:
        out = self._ffi.new("taste_replay **")
        self._check(function(self._options, self._block, self.size_bytes, out, self._error))
        self._replay = out[0]

    def _at(self, slots: Sequence[int]) -> tuple[Array, Array]:
        samples = np.empty((len(slots), *self.shape), np.uint8)
        labels = np.empty(len(slots), np.int32)
        for i, slot in enumerate(slots):
            stored = self._c.taste_replay_sample(self._replay, slot)
            samples[i] = np.frombuffer(self._ffi.buffer(stored, samples[i].size), np.uint8).reshape(self.shape)
            labels[i] = self._c.taste_replay_label(self._replay, slot)
        return samples, labels

    def _fitting(self, sample: Array) -> Array:
        array = np.asarray(sample)
        if array.dtype != np.uint8 or array.shape != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise DeviceError(f"a sample is {array.dtype} {list(array.shape)}, not uint8 [{expected}]. Convert it.", 2)
        return np.ascontiguousarray(array)

    def _check(self, status: int) -> None:
        if status != 0:
            raise DeviceError(text(self._ffi, self._error.text), int(status))
