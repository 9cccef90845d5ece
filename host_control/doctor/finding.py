"""One thing that `doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cross.errors import TasteError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`value` is what was found, with its unit; `consequence` and `remedy` are empty where all is well.

    `exit_code` is the process's where this fails: what a command would end with that met it.
    """

    name: str
    value: str
    level: Level = "ok"
    consequence: str = ""
    remedy: str = ""
    exit_code: int = 1

    def fields(self) -> dict[str, Any]:
        """As --json says it."""
        names = ("name", "value", "level", "consequence", "remedy")
        return {name: getattr(self, name) for name in names}


def failed(name: str, value: str, error: TasteError) -> Finding:
    """A finding that fails with what `error` says: its last sentence is the remedy."""
    said = str(error).strip()
    what, stop, remedy = said.removesuffix(".").rpartition(". ")
    return Finding(
        name, value, "fail", what + stop.strip() if what else said, f"{remedy}." if what else "", error.exit_code
    )
