"""One run of `taste-train train` on a board: send what it needs, follow it, bring the weights home."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross.errors import INTERRUPTED, CompatibilityError, CorruptInputError, LinkLostError, TasteError
from host_control.boards import DeployedBoard
from host_control.boards.bench import check_exit
from host_control.data import PackedDataSet
from host_control.data.packed import data_sha256
from host_control.training.options import TrainOptions

WEIGHTS = "weights.safetensors"
CHECKPOINT = "checkpoint"
_SIGNALS = 128
"""Exit codes above it stand for a signal that ended the program."""


@dataclass(frozen=True)
class BoardRun:
    """`name`: of the run's folder on the board. `weights`: what to start from, None for seeded ones. `goes_on`: whether
    the run was begun before; a new one takes no checkpoint that lies there. `command_out`: the --out of the command to go on
    with, where that is not the run's own folder."""

    board: DeployedBoard
    name: str
    options: TrainOptions
    data: PackedDataSet
    weights: Path | None
    goes_on: bool = False
    command_out: Path | None = None

    def train(self, out: Path, on_event: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Train to the end, going on from the run's checkpoint where there is one; the board's result.

        OUT/weights.safetensors holds the trained weights, checked against the hash that the board printed. Raises the
        error that the program's exit code stands for; KeyboardInterrupt, with how to go on, once Ctrl-C was saved.
        """
        folder = self.board.run_folder(self.name)
        if not self.goes_on:
            self.board.remove_folder(folder)
            self.board.run_folder(self.name)
        results: list[dict[str, Any]] = []

        def on_line(line: str) -> None:
            event = event_of(line)
            if event is not None:
                on_event(event)
                if event.get("event") == "result":
                    results.append(event)

        again = f"Go on with the same command and --out {shlex.quote(str(self.command_out or out))} --resume."
        try:
            outcome = self.board.follow_program(self._arguments(folder), on_line)
        except LinkLostError as error:
            raise LinkLostError(f"{error} The program there ends and saves where it was. {again}") from error
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted; {self.board.name} has saved where it was. {again}")
        try:
            check_exit(outcome, f"training on {self.board.name}")
        except TasteError as error:
            if outcome.exit_code <= _SIGNALS:
                raise
            raise type(error)(f"{error} Its checkpoints are kept. {again}") from error
        if not results:
            raise CompatibilityError(
                f"taste-train on {self.board.name} ended without a result: not this host's version. Deploy again."
            )
        self._fetch(f"{folder}/{WEIGHTS}", out / WEIGHTS, results[-1])
        self.board.remove_folder(folder)
        return results[-1]

    def _arguments(self, folder: str) -> list[str]:
        words = ["train", "--samples", self.board.send_file(self.data.train.path)[0]]
        if self.data.test is not None:
            words += ["--test", self.board.send_file(self.data.test.path)[0]]
        if self.weights is not None:
            words += ["--weights", self.board.send_file(self.weights)[0]]
        words += self.options.arguments()
        words += ["--checkpoint", f"{folder}/{CHECKPOINT}", "--save", f"{folder}/{WEIGHTS}"]
        return [*words, "--resume"] if self.goes_on else words

    def _fetch(self, path: str, destination: Path, result: Mapping[str, Any]) -> None:
        part = destination.with_name(f".{destination.name}.part")
        self.board.connection.get(path, part)
        found = data_sha256(part)
        if result.get("sha256") not in (None, found):
            part.unlink()
            raise CorruptInputError(
                f"the weights arrived with SHA-256 {found[:16]}..., the board says {str(result['sha256'])[:16]}... "
                "Run the same command again: it goes on from the checkpoint."
            )
        part.replace(destination)


def event_of(line: str) -> dict[str, Any] | None:
    """A JSON object of the program, or None for any other line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None
