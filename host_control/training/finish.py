"""What is left to do once a board trains: follow it, record it, bring the weights home, leave the result.

It needs nothing but options.json of the run, so that whoever attaches later does exactly what the host that began the run
would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import CorruptInputError
from host_control.connection import RunResult
from host_control.console import Console, rate
from host_control.run_folder import RunFolder
from host_control.training.adabatch import AdaBatch
from host_control.training.board_run import Steering, TrainRun, train_run
from host_control.training.options import TrainOptions
from host_control.training.record import RESULT, TRAIN_RECORD, name_on_board
from host_control.training.schedule import Schedule

if TYPE_CHECKING:
    from host_control.boards import DeployedBoard

_MEASURED = ("test_accuracy", "test_loss", "loss", "accuracy", "epochs", "steps", "samples_per_s", "sha256")


@dataclass(frozen=True)
class Finish:
    """A run on `board` and its folder here. `held`: its options.json. `name`: of the run on the board.

    `tags`: fields of every event of a run that is compared, and `command_out` the comparison's folder.
    """

    console: Console
    folder: RunFolder
    board: DeployedBoard
    held: Mapping[str, Any]
    name: str = ""
    tags: Mapping[str, Any] = field(default_factory=dict)
    command_out: Path | None = None
    steering: Steering | None = None

    @property
    def run_name(self) -> str:
        return self.name or name_on_board(self.folder.path)

    def goes_on_by_itself(self) -> bool:
        """Whether the board has the run under way, or its result ready."""
        return train_run(self.board, self.run_name, self.folder.path, lambda _: None).run.goes_on_by_itself()

    def collect(self) -> dict[str, Any]:
        """Follow what was begun before, from its first event on."""
        self.console.line(f"{self.board.name} has run {self.run_name} under way: following it")
        return self.run(lambda run: run.run.follow)

    def run(self, begin: Callable[[TrainRun], Callable[[], RunResult]], goes_on: bool = False) -> dict[str, Any]:
        """Follow a run to its end and leave everything: the fields of its result. `begin` begins it and says what follows it."""
        options, samples = self._options()
        result = self._followed(begin, Schedule(options, samples), goes_on)
        found = self._fields(result, options)
        self.folder.write_json(RESULT, {"verb": "train", **found})
        self.folder.write_json(TRAIN_RECORD, dict(self.held["flags"]) | {"complete": True})
        return found

    def _options(self) -> tuple[TrainOptions, int]:
        try:
            stored = {item.name: self.held["options"][item.name] for item in fields(TrainOptions)}
            cores = tuple(stored["cores"]) if stored["cores"] else None
            grows = AdaBatch(**stored["adabatch"]) if stored["adabatch"] else None
            return TrainOptions(**{**stored, "cores": cores, "adabatch": grows}), int(self.held["data"]["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptInputError(
                f"the options of run {self.run_name} lack or garble {error}: not this version's. Train again."
            ) from error

    def _followed(
        self, begin: Callable[[TrainRun], Callable[[], RunResult]], schedule: Schedule, goes_on: bool
    ) -> dict[str, Any]:
        from host_control.training.curves import plot_curves
        from host_control.training.metrics import Metrics
        from host_control.training.view import TrainView

        folder = self.folder.path
        metrics = Metrics(folder)
        try:
            with self.console.live() as region:
                view = TrainView(self.console, region, schedule, self.board.facts().emulated, goes_on, self.tags)

                def on_event(event: Mapping[str, Any]) -> None:
                    metrics.add(event)
                    view.show(event)

                run = train_run(self.board, self.run_name, folder, on_event, self.command_out, self.steering)
                return run.finish(begin(run))
        finally:
            metrics.close()
            if metrics.records:
                title = f"{self.held['build']['model']} on {self.held['data']['source']}"
                plot_curves(folder / "curves.png", metrics.records, title)

    def _fields(self, result: Mapping[str, Any], options: TrainOptions) -> dict[str, Any]:
        return {name: result.get(name) for name in _MEASURED} | {
            "batch_size": options.batch_size,
            "effective_batch": options.effective_batch,
            "model": self.held["build"]["model"],
            "data": self.held["data"]["source"],
            "classes": len(self.held["data"]["classes"]),
            "board": self.board.name,
            "emulated": self.board.facts().emulated,
            "seed": options.seed,
        }

    def say(self, fields: Mapping[str, Any]) -> None:
        """What came out, for people, and the verb's result."""
        folder, speed = self.folder.path, fields["samples_per_s"]
        if fields["test_accuracy"] is not None:
            self.console.line(f"test accuracy {fields['test_accuracy']:.2%}, loss {fields['test_loss']:.4f}")
        elif fields["loss"] is not None:
            self.console.line(f"training loss {fields['loss']:.4f}; there was nothing to test on")
        if speed:
            self.console.line(f"{rate(speed)}{' emulated' if fields['emulated'] else ''} samples/s")
        self.console.line(
            f"{folder}: weights.safetensors, result.json, metrics.jsonl, metrics.csv, curves.png, options.json"
        )
        self.console.line(f"next: export --run {folder} --onnx trained.onnx, or predict --run {folder} IMAGE")
        self.console.result("train", dict(fields) | {"out": str(folder)})
