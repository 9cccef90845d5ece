"""learn new classes on a board as they come, with replay"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import DataError, UsageError
from cross.zoo import ZOO
from host_control.comparison import percent, run_each
from host_control.console import Console, duration, rate
from host_control.flags import add_board_flags, add_data_flags, add_model_flags, add_running_flags
from host_control.learning.options import LearnOptions, add_learning_flags, resolve_options
from host_control.learning.outcome import Outcome, write_table
from host_control.learning.settings import Setting, resolve_setting
from host_control.preparation import (
    Built,
    build_imported,
    choose_target,
    deployed,
    import_model,
    opened_board,
    send,
    session_memory,
)
from host_control.run_folder import RunFolder, default_folder
from host_control.search.space import DEFAULT_MAX_BATCH_SIZE, make_space, memory_budget
from host_control.training.batch_size import choose_batch_size
from host_control.training.data import check_shape, first_samples, packed_data
from host_control.training.record import board_record, describe_data, name_on_board

if TYPE_CHECKING:
    from host_control.boards import DeployedBoard
    from host_control.data import PackedDataSet

RECORD, RUNS, TABLE, PICTURE = "learn.json", "learned.json", "accuracy.csv", "learn.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_data_flags(parser, required=True)
    add_learning_flags(parser)
    add_board_flags(parser)
    add_running_flags(parser, measuring=False)


def run(args: argparse.Namespace) -> int:
    """Pack, build, send, then every setting and seed one after the other; what is finished is not done again."""
    console = Console(args.json)
    if args.classes is not None:
        raise UsageError("--classes: the data says how many there are. Use --max-classes for more outputs.")
    data = packed_data(args, console)
    if data.kind != "images" or data.test is None:
        raise DataError(f"{data.source} has no images to test on. Give images, and a --val-split above 0.")
    options = resolve_options(args, data.classes, data.domains)
    with RunFolder(args.out or default_folder(args.model, args.board)) as folder:
        goes_on = _check_goes_on(folder, _identity(args, data))
        with opened_board(args, folder.path) as board:
            return _Learning(args, console, folder, deployed(board), data, options, goes_on).run()


def _identity(args: argparse.Namespace, data: PackedDataSet) -> dict[str, Any]:
    """What makes two commands the same `learn`."""
    left_out = ("command", "out", "json", "debug", "run", "verb", "threads", "cores", "remote_dir", "accept_new")
    flags = {name: value for name, value in vars(args).items() if name not in left_out and not callable(value)}
    plain = {
        name: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for name, v in flags.items()
    }
    return plain | {"data_sha256": data.sha256}


def _check_goes_on(folder: RunFolder, identity: dict[str, Any]) -> bool:
    """Whether the folder holds this `learn` already; UsageError where it holds another."""
    stored = folder.read_json(RECORD)
    if stored is None:
        folder.write_json(RECORD, identity)
        return False
    differing = [name for name in identity if stored.get(name) != identity[name]]
    if differing:
        name = differing[0]
        raise UsageError(
            f"{folder.path} was begun with {name.replace('_', '-')} {stored.get(name)}, not {identity[name]}. Use the "
            "same flags, or another --out."
        )
    return True


@dataclass(frozen=True)
class _Learning:
    """One `learn` on an opened board: everything it needs, held together."""

    args: argparse.Namespace
    console: Console
    folder: RunFolder
    board: DeployedBoard
    data: PackedDataSet
    options: LearnOptions
    goes_on: bool

    def run(self) -> int:
        from host_control.boards.runs import refuse_where_busy

        args, console = self.args, self.console
        refuse_where_busy(self.board, self.folder.path)
        facts = None if args.target is not None else self.board.facts()
        samples = first_samples(self.data, 32)
        outputs = args.max_classes or len(self.data.classes)
        model = import_model(args, console, input_shape=self.data.shape, classes=outputs, samples=samples)
        check_shape(model.input_shape, self.data)
        target = choose_target(args.target, args.board, facts)
        built, _ = build_imported(model, args, target, self.folder.path / "build", console)
        send(self.board, built, console)
        settings = self._settings(built)
        outcomes = self._outcomes(settings, built)
        self._leave(outcomes)
        return 0

    def _settings(self, built: Built) -> list[Setting]:
        """What was asked for, with numbers in place of auto and max."""
        args = self.args
        names = args.compare or (str(args.batch_size),)
        auto = argparse.Namespace(**vars(args) | {"batch_size": "auto"})

        def largest() -> int:
            budget = memory_budget(self.board.facts().memory_available_bytes, args.memory)
            memory = session_memory(self.board.info(), "train")
            beside = self.options.buffer * (math.prod(self.data.shape) + 64) + 16 * self.data.train.samples
            return make_space(
                memory, None if budget is None else budget - beside, DEFAULT_MAX_BATCH_SIZE, built.minimum_batch
            ).bs_max

        def fastest() -> int:
            return choose_batch_size(auto, self.board, built, DEFAULT_MAX_BATCH_SIZE, self.console).batch_size

        return [resolve_setting(name, fastest, largest) for name in names]

    def _outcomes(self, settings: list[Setting], built: Built) -> list[Outcome]:
        from host_control.learning.board_run import LearnRun

        seeded = self.args.model in ZOO and self.args.weights is None
        weights = None if seeded else built.folder / "weights.safetensors"
        record, name = board_record(self.args, self.folder.path), name_on_board(self.folder.path)
        run = LearnRun(self.board, name, self.options, self.data, weights, self.goes_on, record)
        seeds = tuple(self.args.seed + i for i in range(self.args.seeds))
        runs = {
            f"{setting.name} {setting.batch_size} {seed}": partial(
                self._one, run, setting, seed, self.args.order_seed + number
            )
            for setting in settings
            for number, seed in enumerate(seeds)
        }
        done = run_each(self.folder, RUNS, runs)
        return [
            Outcome(setting, seeds, tuple(done[f"{setting.name} {setting.batch_size} {seed}"] for seed in seeds))
            for setting in settings
        ]

    def _one(self, run: Any, setting: Setting, seed: int, order_seed: int) -> dict[str, Any]:
        what = f"batch size {setting.batch_size}{'' if setting.replay else ' without replay'}, seed {seed}"

        def on_event(event: Mapping[str, Any]) -> None:
            fields = {name: value for name, value in event.items() if name != "event"}
            if event["event"] == "link":
                self.console.line(event["message"])
            if event["event"] in ("task", "step", "eval", "checkpoint", "resume", "link"):
                self.console.event(event["event"], setting=setting.name, seed=seed, **fields)
            if event["event"] == "eval":
                accuracies = " ".join(f"{value:.0%}" for value in event["accuracy"])
                self.console.line(f"{what}: after task {event['task'] + 1} of {self.options.tasks}: {accuracies}")

        result: dict[str, Any] = run.learn(setting, seed, order_seed, on_event)
        if result["diverged"]:
            self.console.line(f"{what}: diverged after {result['updates']} updates")
        return result

    def _leave(self, outcomes: list[Outcome]) -> None:
        """Table, picture, CSV and result."""
        from host_control.learning.plot import label, plot_outcomes
        from host_control.study_report import environment

        path, emulated = self.folder.path, self.board.facts().emulated
        summaries = [outcome.summary() for outcome in outcomes]
        write_table(path / TABLE, outcomes)
        title = f"{self.args.model} on {self.data.source}, {self.options.scenario}, buffer {self.options.buffer}"
        plot_outcomes(path / PICTURE, outcomes, title)
        fields = {
            "settings": summaries,
            "scenario": self.options.scenario,
            "tasks": self.options.tasks,
            "buffer": self.options.buffer,
            "memory_policy": self.options.memory_policy,
            "seeds": self.args.seeds,
            "model": self.args.model,
            "data": self.data.source,
            "board": self.board.name,
            "emulated": emulated,
        }
        self.folder.write_json("options.json", {"options": asdict(self.options), "data": describe_data(self.data)})
        facts = asdict(self.board.facts())
        self.folder.write_json("environment.json", environment(sys.argv, facts, board_name=self.board.name))
        self.folder.write_json("result.json", {"verb": "learn", **fields})
        columns = ("batch size", "replay", "lr", "accuracy", "forgetting", "updates", "time", "samples/s")
        self.console.table(
            [(name, "right") for name in columns],
            [
                [
                    label(outcome),
                    "yes" if s["replay"] else "no",
                    f"{s['lr']:g}",
                    percent(s["final_average_accuracy"]) + (" diverged" if s["diverged"] else ""),
                    percent(s["forgetting"]),
                    str(s["updates"]),
                    duration(s["seconds"]) + (" emulated" if emulated else ""),
                    rate(s["samples_per_s"]),
                ]
                for outcome, s in zip(outcomes, summaries, strict=True)
            ],
        )
        self.console.line(f"{path}: result.json, {TABLE}, {PICTURE}, options.json")
        self.console.result("learn", fields | {"out": str(path)})
