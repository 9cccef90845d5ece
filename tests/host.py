"""The target of the machine that the tests run on."""

from __future__ import annotations

from functools import cache

from cross.probe import choose_target
from host_control.boards import open_board


@cache
def host_target() -> str:
    with open_board("local") as board:
        return choose_target(board.facts())
