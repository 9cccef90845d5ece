"""One run of `taste-train learn` on a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_control.boards import DeployedBoard
from host_control.boards.long_run import LongRun
from host_control.data import PackedDataSet
from host_control.learning.options import CHECKPOINT_EVERY_S, LearnOptions
from host_control.learning.settings import Setting


@dataclass(frozen=True)
class LearnRun:
    """`name`: of this `learn` on the board, whose streams have names of their own behind it. `weights`: what to start from,
    None for seeded ones. `record`: what the board keeps for whoever attaches."""

    board: DeployedBoard
    name: str
    options: LearnOptions
    data: PackedDataSet
    weights: Path | None
    goes_on: bool
    record: Mapping[str, Any]

    def learn(
        self, setting: Setting, seed: int, order_seed: int, on_event: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """One stream to its end, going on from its checkpoint where there is one; the board's result.

        Raises what the program's exit code stands for; KeyboardInterrupt once Ctrl-C was saved.
        """
        what = f"learning at batch size {setting.batch_size}"
        again = "The same command with the same --out goes on."
        run = LongRun(self.board, f"{self.name}-{setting.name}-{seed}", what, again, on_event)
        if self.goes_on and run.goes_on_by_itself():
            result = run.finish(run.follow)
        else:
            words = lambda: self._arguments(setting, seed, order_seed, f"{run.folder}/checkpoint")  # noqa: E731
            result = run.finish(run.begin(words, self.record, anew=not self.goes_on))
        run.remove()
        return result

    def _arguments(self, setting: Setting, seed: int, order_seed: int, folder: str) -> list[str]:
        assert self.data.test is not None
        words = ["learn", "--samples", self.board.send_file(self.data.train.path)[0]]
        words += ["--test", self.board.send_file(self.data.test.path)[0]]
        if self.weights is not None:
            words += ["--weights", self.board.send_file(self.weights)[0]]
        words += self.options.arguments(setting, seed, order_seed)
        return [*words, "--checkpoint", folder, "--checkpoint-every", CHECKPOINT_EVERY_S, "--resume"]
