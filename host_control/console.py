"""What a verb says: JSON Lines for scripts, tables and progress for people.

With `--json`, stdout carries JSON Lines only and ends with `{"event": "result", "verb": ...}`. Without it, stdout
carries text: rich tables and live progress on a terminal, plain lines elsewhere. Errors go to stderr in both cases.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress import Progress
from rich.table import Table

from cross.errors import one_line


def finite(value: Any) -> Any:
    """The same value as JSON can say it: NaN and infinities become null, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


_FILE_COLUMNS = 200


class Console:
    """One place where a verb speaks; `json_lines` chooses for whom."""

    def __init__(self, json_lines: bool = False, stream: TextIO | None = None) -> None:
        self.json_lines = json_lines
        self._stream = stream if stream is not None else sys.stdout
        self._rich = RichConsole(file=self._stream, highlight=False, soft_wrap=True)
        if not self._rich.is_terminal:
            # A file or a pipe has no width: cells must not be cut to the 80 columns that rich assumes.
            self._rich.width = _FILE_COLUMNS

    @property
    def interactive(self) -> bool:
        """Whether a person watches: a terminal, and no JSON."""
        return not self.json_lines and self._rich.is_terminal

    def event(self, kind: str, /, **fields: Any) -> None:
        """One JSON line, for scripts only."""
        if self.json_lines:
            print(json.dumps({"event": kind, **finite(fields)}), file=self._stream, flush=True)

    def line(self, text: str = "") -> None:
        """One line of text, for people only."""
        if not self.json_lines:
            self._rich.print(one_line(text), markup=False)
            self._stream.flush()

    def result(self, verb: str, fields: dict[str, Any]) -> None:
        """The last JSON line of a verb; people get what the verb itself prints."""
        self.event("result", verb=verb, **fields)

    def table(
        self, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], title: str | None = None
    ) -> None:
        """A table for people; `columns` are (heading, 'left' or 'right')."""
        if not self.json_lines:
            self._rich.print(make_table(columns, rows, title))

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[str, int, int], None]]:
        """A reporter (stage, done, total) of work that takes a while: a bar on a terminal, a line every quarter elsewhere,
        an event each with --json."""
        if self.interactive:
            with Progress(console=self._rich, transient=True) as bar:
                task = bar.add_task(title)
                yield lambda stage, done, total: bar.update(
                    task, description=f"{title}: {stage}", completed=done, total=total
                )
            return
        said: set[tuple[str, int]] = set()

        def report(stage: str, done: int, total: int) -> None:
            self.event("progress", stage=stage, done=done, total=total)
            quarter = 4 * done // max(total, 1)
            if (stage, quarter) not in said and done < total:
                said.add((stage, quarter))
                self.line(f"{title}: {stage} {done} of {total}")

        yield report

    @contextmanager
    def live(self) -> Iterator[Live | None]:
        """A region that is redrawn in place, or None where no terminal is."""
        if not self.interactive:
            yield None
            return
        with Live(console=self._rich, refresh_per_second=4, transient=True) as region:
            yield region


def make_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """A rich table of plain cells (no markup: names may hold brackets)."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, side in columns:
        table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(one_line(cell).replace("[", r"\[") for cell in row))
    return table


def mib(count: float) -> str:
    """Bytes as '812 MiB' ('0.4 MiB' below ten)."""
    value = count / 2**20
    return f"{value:.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


def duration(seconds: float) -> str:
    """Seconds as '45 s', '12 min', '1 h 5 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def rate(samples_per_s: float) -> str:
    """samples/s with three to four significant digits: '154', '93.4', '7.05'."""
    if samples_per_s >= 99.95:
        return f"{samples_per_s:,.0f}"
    return f"{samples_per_s:.1f}" if samples_per_s >= 9.995 else f"{samples_per_s:.2f}"
