"""How every benchmark of ours ends: one line on stderr and the exit code of docs/interface.md."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from cross.errors import INTERRUPTED
from host_control.cli import explain

Main = Callable[[Sequence[str] | None], int]


def one_line_errors(main: Main) -> Callable[..., int]:
    """`main`, with its failures turned into a line and a code; `argv` may be left out, as of a program."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except KeyboardInterrupt:
            print("error: interrupted. Nothing is saved.", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:  # noqa: BLE001  every failure becomes one line and a code
            known = explain(error)
            print(f"error: {' '.join(str(known).split())}", file=sys.stderr)
            return known.exit_code

    return guarded
