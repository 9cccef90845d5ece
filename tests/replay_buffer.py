"""The replay buffer once more in Python, as native/include/taste.h describes it: the oracle of the native one."""

from __future__ import annotations

from tests.packed_data import splitmix64

_MASK = 2**64 - 1


def fnv1a64(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value


class ReplayBuffer:
    def __init__(self, policy: str, capacity: int, classes: int, seed: int) -> None:
        self.policy, self.capacity, self.classes = policy, capacity, classes
        self.key, self.draws, self.added = splitmix64(seed ^ fnv1a64("replay")), 0, 0
        self.labels: list[int] = []
        self.samples: list[int] = []
        self.seen = [0] * classes
        self.full: set[int] = set()
        self.ring: dict[int, list[int]] = {}

    def below(self, n: int) -> int:
        bits = splitmix64((self.key + self.draws) & _MASK)
        self.draws += 1
        return bits * n >> 64

    def add(self, sample: int, label: int) -> None:
        self.added += 1
        self.seen[label] += 1
        slot = {"reservoir": self._reservoir, "class-balanced": self._balanced, "ring": self._ring}[self.policy](label)
        if slot is None:
            return
        if slot == len(self.labels):
            self.labels.append(label)
            self.samples.append(sample)
        self.labels[slot], self.samples[slot] = label, sample

    def draw(self, count: int) -> list[int]:
        count = min(count, len(self.labels))
        chosen: list[int] = []
        for j in range(len(self.labels) - count, len(self.labels)):
            t = self.below(j + 1)
            chosen.append(j if t in chosen else t)
        return chosen

    def _reservoir(self, label: int) -> int | None:
        if len(self.labels) < self.capacity:
            return len(self.labels)
        j = self.below(self.added)
        return j if j < self.capacity else None

    def _balanced(self, label: int) -> int | None:
        if len(self.labels) < self.capacity:
            return len(self.labels)
        stored = [self.labels.count(c) for c in range(self.classes)]
        self.full |= {c for c in range(self.classes) if stored[c] == max(stored)}
        if label not in self.full:
            return self._any(stored.index(max(stored)))
        return self._any(label) if self.below(self.seen[label]) < stored[label] else None

    def _any(self, label: int) -> int:
        while True:
            slot = self.below(len(self.labels))
            if self.labels[slot] == label:
                return slot

    def _ring(self, label: int) -> int:
        quota, places = self.capacity // self.classes, self.ring.setdefault(label, [])
        if len(places) < quota:
            places.append(len(self.labels))
            return places[-1]
        return places[(self.seen[label] - 1) % quota]
