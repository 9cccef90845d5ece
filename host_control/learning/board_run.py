"""One run of `taste-train learn` on a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross.errors import INTERRUPTED, CompatibilityError, LinkLostError
from host_control.boards import DeployedBoard
from host_control.boards.bench import check_exit
from host_control.data import PackedDataSet
from host_control.learning.options import CHECKPOINT_EVERY_S, LearnOptions
from host_control.learning.settings import Setting
from host_control.training.board_run import event_of


@dataclass(frozen=True)
class LearnRun:
    """`name`: of this `learn`'s folder on the board. `weights`: what to start from, None for seeded ones."""

    board: DeployedBoard
    name: str
    options: LearnOptions
    data: PackedDataSet
    weights: Path | None
    goes_on: bool

    def learn(
        self, setting: Setting, seed: int, order_seed: int, on_event: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """One stream to its end, going on from its checkpoint where there is one; the board's result.

        Raises what the program's exit code stands for; KeyboardInterrupt once Ctrl-C was saved.
        """
        folder = f"{self.board.run_folder(self.name)}/{setting.name}-{seed}"
        if not self.goes_on:
            self.board.remove_folder(folder)
        results: list[dict[str, Any]] = []

        def on_line(line: str) -> None:
            event = event_of(line)
            if event is not None:
                on_event(event)
                if event["event"] == "result":
                    results.append(event)

        again = "The same command with the same --out goes on."
        try:
            outcome = self.board.follow_program(self._arguments(setting, seed, order_seed, folder), on_line)
        except LinkLostError as error:
            raise LinkLostError(f"{error} The program there ends and saves where it was. {again}") from error
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted; {self.board.name} has saved where it was. {again}")
        check_exit(outcome, f"learning at batch size {setting.batch_size} on {self.board.name}")
        if not results:
            raise CompatibilityError(
                f"taste-train on {self.board.name} ended without a result: not this host's version. Deploy again."
            )
        self.board.remove_folder(folder)
        return results[-1]

    def _arguments(self, setting: Setting, seed: int, order_seed: int, folder: str) -> list[str]:
        assert self.data.test is not None
        words = ["learn", "--samples", self.board.send_file(self.data.train.path)[0]]
        words += ["--test", self.board.send_file(self.data.test.path)[0]]
        if self.weights is not None:
            words += ["--weights", self.board.send_file(self.weights)[0]]
        words += self.options.arguments(setting, seed, order_seed)
        return [*words, "--checkpoint", folder, "--checkpoint-every", CHECKPOINT_EVERY_S, "--resume"]
