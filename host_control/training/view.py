"""Progress of a run for people: one line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.live import Live
from rich.text import Text

from host_control.console import Console, duration, mib, rate
from host_control.training.schedule import Schedule

QUIET_S = 10.0
"""Between two plain lines of steps."""


class TrainView:
    """Shows the board's events; with --json they are passed on as they are."""

    def __init__(
        self,
        console: Console,
        region: Live | None,
        schedule: Schedule,
        emulated: bool,
        goes_on: bool = False,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        """`tags`: fields of every event with --json."""
        self._tags = dict(tags or {})
        self._console, self._region, self._schedule = console, region, schedule
        self._speed = "emulated samples/s" if emulated else "samples/s"
        self._said = -QUIET_S
        self._goes_on = goes_on

    def show(self, event: Mapping[str, Any]) -> None:
        """One event of the board."""
        kind = event.get("event")
        if kind not in ("result", "error"):
            fields = {key: value for key, value in event.items() if key != "event"}
            self._console.event(str(kind), **self._tags, **fields)
        if kind == "step":
            if self._goes_on:
                self._console.line("the board has no checkpoint of this run: it begins anew")
                self._goes_on = False
            self._step(event)
        elif kind == "eval":
            self._console.line(
                f"epoch {event.get('epoch', 0):g}: test loss {_real(event.get('loss'))}, "
                f"accuracy {_percent(event.get('accuracy'))} of {event.get('samples', 0)}"
            )
        elif kind == "resume":
            self._goes_on = False
            self._console.line(f"goes on after update {event.get('step')}, epoch {float(event.get('epoch') or 0):.2f}")
        elif kind == "link":
            self._console.line(str(event.get("message")))
        elif kind == "warning":
            self._console.line(f"warning: {event.get('message')}")

    def _step(self, event: Mapping[str, Any]) -> None:
        line = self.line(event)
        if self._region is not None:
            self._region.update(Text(line))
        elif time.monotonic() - self._said >= QUIET_S:
            self._said = time.monotonic()
            self._console.line(line)

    def line(self, event: Mapping[str, Any]) -> str:
        """Where a run stands: epoch, loss, accuracy, speed, time left, and what the board says of itself."""
        epoch, speed = float(event.get("epoch") or 0.0), float(event.get("samples_per_s") or 0.0)
        parts = [
            f"epoch {epoch:.2f} of {self._schedule.epochs:g}",
            f"loss {_real(event.get('loss'))}",
            f"accuracy {_percent(event.get('accuracy'))}",
        ]
        if speed > 0:
            left = max(self._schedule.epochs - epoch, 0.0) * self._schedule.samples / speed
            parts += [f"{rate(speed)} {self._speed}", f"{duration(left)} left"]
        # What comes last is cut off first where a terminal is narrow.
        parts.append(f"lr {float(event.get('lr') or 0.0):.3g}")
        if event.get("temperature_c") is not None:
            parts.append(f"{float(event['temperature_c']):.0f} C")
        if event.get("rss_bytes"):
            parts.append(mib(float(event["rss_bytes"])))
        return ", ".join(parts)


def _real(value: Any) -> str:
    return "-" if value is None else f"{float(value):.4f}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{float(value):.1%}"
