"""One run of `taste-train train` on a board: send what it needs, follow it, bring the weights home."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cross.errors import CorruptInputError
from host_control.boards import DeployedBoard
from host_control.boards.long_run import LongRun
from host_control.connection import RunResult
from host_control.data import PackedDataSet
from host_control.data.packed import data_sha256
from host_control.training.options import TrainOptions

WEIGHTS = "weights.safetensors"
CHECKPOINT = "checkpoint"


class Steering(Protocol):
    """Moves a run to other operating points: told the run's folder on the board before it starts, then of every event."""

    def arguments(self, folder: str) -> list[str]: ...

    def on_event(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainRun:
    """A run on a board, and the host's folder `out` that its weights come to."""

    run: LongRun
    out: Path
    steering: Steering | None = None

    def begin(
        self,
        options: TrainOptions,
        data: PackedDataSet,
        weights: Path | None,
        record: Mapping[str, Any],
        *,
        goes_on: bool,
    ) -> Callable[[], RunResult]:
        """Send data and `weights` (None: seeded ones) and begin, from the run's checkpoint where it `goes_on`."""
        board, folder = self.run.board, self.run.folder

        def words() -> list[str]:
            words = ["train", "--samples", board.send_file(data.train.path)[0]]
            if data.test is not None:
                words += ["--test", board.send_file(data.test.path)[0]]
            if weights is not None:
                words += ["--weights", board.send_file(weights)[0]]
            words += options.arguments()
            words += ["--checkpoint", f"{folder}/{CHECKPOINT}", "--save", f"{folder}/{WEIGHTS}"]
            if self.steering is not None:
                words += self.steering.arguments(folder)
            return [*words, "--resume"] if goes_on else words

        return self.run.begin(words, record, anew=not goes_on)

    def finish(self, follow: Callable[[], RunResult]) -> dict[str, Any]:
        """The board's result, once it ended. OUT/weights.safetensors then holds the trained weights, checked against the
        hash that the board printed, and the board is rid of the run."""
        result = self.run.finish(follow)
        self._fetch(f"{self.run.folder}/{WEIGHTS}", self.out / WEIGHTS, result)
        self.run.remove()
        return result

    def _fetch(self, path: str, destination: Path, result: Mapping[str, Any]) -> None:
        part = destination.with_name(f".{destination.name}.part")
        self.run.fetch(path, part)
        found = data_sha256(part)
        if result.get("sha256") not in (None, found):
            part.unlink()
            raise CorruptInputError(
                f"the weights arrived with SHA-256 {found[:16]}..., the board says {str(result['sha256'])[:16]}... "
                "Run the same command again: it goes on from the checkpoint."
            )
        part.replace(destination)


def train_run(
    board: DeployedBoard,
    name: str,
    out: Path,
    on_event: Callable[[Mapping[str, Any]], None],
    command_out: Path | None = None,
    steering: Steering | None = None,
) -> TrainRun:
    """The run `name` of a board whose weights come to the folder `out`. `command_out`: the --out of the command to go on
    with, where that is not the run's own folder. A run that is steered does not go on without this process: nobody
    would keep it below its limit."""

    def heard(event: Mapping[str, Any]) -> None:
        on_event(event)
        if steering is not None:
            steering.on_event(event)

    again = f"Go on with the same command and --out {shlex.quote(str(command_out or out))} --resume."
    return TrainRun(LongRun(board, name, "training", again, heard, tied=steering is not None), out, steering)
