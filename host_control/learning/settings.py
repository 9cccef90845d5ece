"""The settings that `learn` compares: batch sizes, with replay or without."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from host_control.flags import positive

REFERENCE_BATCH = 20
"""The batch size that --lr is given for, and of the setting without replay."""


@dataclass(frozen=True)
class Setting:
    """`name`: as it was asked for: none, auto, max, or a number."""

    name: str
    batch_size: int
    replay: bool = True


def compared(text: str) -> tuple[str, ...]:
    """'none,20,auto': names of settings, each once."""
    names = tuple(word if word in ("none", "auto", "max") else str(positive(word)) for word in text.split(","))
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a setting twice")
    return names


def resolve_setting(name: str, auto: Callable[[], int], largest: Callable[[], int]) -> Setting:
    """`auto` and `largest` are asked only where the name needs them."""
    if name == "none":
        return Setting(name, REFERENCE_BATCH, replay=False)
    if name == "auto":
        return Setting(name, auto())
    return Setting(name, largest() if name == "max" else int(name))
