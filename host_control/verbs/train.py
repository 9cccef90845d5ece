"""train a model on a board with your data"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import DataError, NonFiniteLossError, UsageError
from cross.zoo import ZOO
from host_control.comparison import run_each
from host_control.console import Console, mib
from host_control.flags import add_board_flags, add_data_flags, add_model_flags, add_running_flags, positive
from host_control.preparation import (
    Built,
    build_imported,
    choose_target,
    deployed,
    opened_board,
    send,
)
from host_control.run_folder import RunFolder
from host_control.training.batch_size import Choice, choose_batch_size
from host_control.training.compare import (
    COMPARISON_PICTURE,
    COMPARISON_TABLE,
    DIVERGED,
    GROWING,
    RUNS,
    SEEDS,
    Outcome,
    compared,
    finished_run,
    plot_comparison,
    setting_flags,
    setting_options,
    summary_table,
    write_table,
)
from host_control.training.data import packed_data
from host_control.training.finish import Finish
from host_control.training.metrics import RECORD, read_records
from host_control.training.model import model_for
from host_control.training.options import (
    TrainOptions,
    add_training_flags,
    default_recipe_of,
    largest_effective_batch,
    resolve_options,
)
from host_control.training.record import (
    OPTIONS,
    RESULT,
    TRAIN_RECORD,
    board_record,
    check_goes_on,
    check_unchanged,
    choose_folder,
    describe_data,
    describe_model,
    name_on_board,
    run_identity,
)
from host_control.training.schedule import Schedule, minimum_rows

if TYPE_CHECKING:
    from cross.graph import Model
    from host_control.boards import DeployedBoard
    from host_control.data import PackedDataSet
    from host_control.training.board_run import Steering

    Steer = Callable[[DeployedBoard, TrainOptions, int], Steering]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_data_flags(parser, required=True)
    add_training_flags(parser)
    add_board_flags(parser)
    add_running_flags(parser, measuring=False, frequency=True)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, or the newest unfinished one"
    )
    parser.add_argument(
        "--compare", type=compared, metavar="LIST",
        help="effective batches side by side, such as fixed:16,fixed:512,adabatch (docs/adabatch.md)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=positive, metavar="N", help="runs of each setting of --compare (default: 3)")
    parser.add_argument("--dry-run", action="store_true", help="print batches, updates and learning rates, and end")


def run(args: argparse.Namespace, steer: Steer | None = None) -> int:
    """Pack, build, choose the batch size, send, train, fetch; interrupted, it goes on from the board's checkpoint.

    `steer` makes what moves the run to other operating points, of the board, the options and the least rows of a step.
    """
    console = Console(args.json)
    if args.compare:
        args = argparse.Namespace(**vars(args) | {"batch_schedule": GROWING})
    elif args.seeds:
        raise UsageError("--seeds is of --compare; one run has one --seed. Leave it out, or give --compare.")
    if args.dry_run:
        return _dry_run(args, console)
    identity = run_identity(args)
    with RunFolder(choose_folder(args, identity)) as folder:
        before = check_goes_on(folder, identity, args.resume)
        data = packed_data(args, console)
        model = model_for(args, data, console)
        check_unchanged(before, describe_model(args, model), describe_data(data))
        # Flags that do not fit together are said before anything is built or measured.
        batch_size = args.batch_size if isinstance(args.batch_size, int) else 1
        options = resolve_options(args, model, data.train.samples, batch_size)
        if args.compare and data.test is None:
            raise DataError(f"{data.source} has nothing to test on. Give a --val-split above 0.")
        for name in args.compare or ():
            setting_options(name, options, data.train.samples)
        with opened_board(args, folder.path) as board:
            training = _Training(args, console, folder, deployed(board), data, model, steer=steer)
            return training.compare(before) if args.compare else training.run(before)


def _dry_run(args: argparse.Namespace, console: Console) -> int:
    data = packed_data(args, console)
    model = model_for(args, data, console)
    samples, known = data.train.samples, isinstance(args.batch_size, int)
    options = resolve_options(args, model, samples, args.batch_size if known else samples)
    why = default_recipe_of(args, model, options.effective_batch).why
    found = []
    for name in args.compare or (None,):
        own = setting_options(name, options, samples) if name else options
        schedule = Schedule(own, samples, minimum_rows(model))
        if name:
            console.line(f"{name}:")
        _print_schedule(console, schedule, why, micro=known)
        # A dry run measures nothing: a batch size that a study finds has no value yet.
        rows = [row if known else row | {"batch_size": None} for row in schedule.rows()]
        _print_rows(console, rows)
        found.append({"schedule": rows, "updates": schedule.updates} | ({"name": name} if name else {}))
    console.result("train", {"dry_run": True, **({"settings": found} if args.compare else found[0])})
    return 0


def _print_schedule(console: Console, schedule: Schedule, why: str, micro: bool = True) -> None:
    for line in schedule.sentences(micro):
        console.line(line)
    console.line(f"defaults are those of {why}; every one has a flag (docs/train.md)")


def _print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    names = ("effective_batch", "batch_size", "updates")
    console.table(
        [(name, "right") for name in ("epoch", "effective batch", "batch size", "updates", "lr")],
        [
            [
                f"{row['epoch']}-{row['last']}" if row.get("last", row["epoch"]) > row["epoch"] else str(row["epoch"]),
                *("auto" if row[name] is None else str(row[name]) for name in names),
                f"{row['lr']:.4g}",
            ]
            for row in rows
        ],
    )


@dataclass(frozen=True)
class _Training:
    """One `train` on an opened board: everything it needs, held together."""

    args: argparse.Namespace
    console: Console
    folder: RunFolder
    board: DeployedBoard
    data: PackedDataSet
    model: Model
    tags: Mapping[str, Any] = field(default_factory=dict)  # of a run that is compared: setting and seed
    steer: Steer | None = None

    def run(self, before: dict[str, Any] | None) -> int:
        """`before`: options.json of the run that goes on."""
        if (finish := self._under_way(before)) is not None:
            finish.say(finish.collect())
            return 0
        built, choice, options = self._prepare(before)
        fields = self._one(options, choice, built, before)
        self._finish({}).say(fields)
        return 0

    def compare(self, before: dict[str, Any] | None) -> int:
        """Every setting with every seed, each in a folder of its own, then all side by side."""
        built, choice, growing = self._prepare(before)
        self._write_options(growing, choice, built)
        samples, seeds = self.data.train.samples, tuple(self.args.seed + i for i in range(self.args.seeds or SEEDS))
        settings = {name: setting_options(name, growing, samples) for name in self.args.compare}
        runs = {
            f"{name} {seed}": partial(self._compared, name, replace(options, seed=seed), choice, built)
            for name, options in settings.items()
            for seed in seeds
        }
        done = run_each(self.folder, RUNS, runs)
        outcomes = [
            Outcome(name, Schedule(options, samples), seeds, tuple(done[f"{name} {seed}"] for seed in seeds))
            for name, options in settings.items()
        ]
        self._leave(outcomes, growing)
        return 0

    def _prepare(self, before: dict[str, Any] | None) -> tuple[Built, Choice, TrainOptions]:
        """Build, send, and choose the batch size."""
        from host_control.boards.runs import refuse_where_busy

        args, console = self.args, self.console
        refuse_where_busy(self.board, self.folder.path)
        facts = None if args.target is not None else self.board.facts()
        target = choose_target(args.target, args.board, facts)
        built, _ = build_imported(self.model, args, target, self.folder.path / "build", console)
        send(self.board, built, console)
        # From here on the folder holds a run; what fails before leaves none to go on with.
        self.folder.write_json(TRAIN_RECORD, run_identity(args) | {"complete": False})
        settled = args
        if before is not None and args.effective_batch is None and args.batch_schedule == "fixed":
            # The default follows the batch size, which may be another one now; what is learned stays the same.
            settled = argparse.Namespace(**{**vars(args), "effective_batch": int(before["options"]["effective_batch"])})
        choice = self._batch_size(settled, built, before)
        return built, choice, resolve_options(settled, self.model, self.data.train.samples, choice.batch_size)

    def _one(
        self, options: TrainOptions, choice: Choice, built: Built, before: dict[str, Any] | None
    ) -> dict[str, Any]:
        """From the plan to the result that is left in the folder, of a run that the board has not under way."""
        self._announce(Schedule(options, self.data.train.samples, built.minimum_batch), built)
        held = self._write_options(options, choice, built)
        seeded = self.args.model in ZOO and self.args.weights is None
        weights = None if seeded else built.folder / "weights.safetensors"
        # A run of a comparison is finished by the comparison's own command; any other one by its options.
        record = board_record(self.args, self._command_out) | ({} if self.tags else {"options": held})
        goes_on = before is not None
        steering = self.steer(self.board, options, built.minimum_batch) if self.steer is not None else None
        return replace(self._finish(held), steering=steering).run(
            lambda run: run.begin(options, self.data, weights, record, goes_on=goes_on), goes_on
        )

    @property
    def _command_out(self) -> Path:
        """The --out of the command that goes on with this run."""
        return self.folder.path.parent if self.tags else self.folder.path

    def _under_way(self, before: dict[str, Any] | None) -> Finish | None:
        """The run that goes on, where the board has it under way or its result ready. One that is steered is tied to us."""
        if before is None or self.steer is not None:
            return None
        finish = self._finish(before)
        return finish if finish.goes_on_by_itself() else None

    def _finish(self, held: Mapping[str, Any]) -> Finish:
        return Finish(self.console, self.folder, self.board, held, tags=self.tags, command_out=self._command_out)

    def _compared(self, name: str, options: TrainOptions, choice: Choice, built: Built) -> dict[str, Any]:
        """One run of a comparison, as `train` alone would do it; it goes on where it was interrupted."""
        path = self.folder.path / f"{name.replace(':', '-')}-{options.seed}"
        args = argparse.Namespace(**vars(self.args) | setting_flags(options) | {"compare": None, "seeds": None})
        self.console.line(f"{name}, seed {options.seed}:")
        with RunFolder(path) as folder:
            stored = folder.read_json(TRAIN_RECORD) or {}
            if stored.get("complete"):
                return finished_run(folder.read_json(RESULT) or {}, read_records(path / RECORD))
            before = folder.read_json(OPTIONS) if stored else None
            folder.write_json(TRAIN_RECORD, run_identity(args) | {"complete": False})
            one = replace(self, args=args, folder=folder, tags={"setting": name, "seed": options.seed})
            try:
                finish = one._under_way(before)
                fields = finish.collect() if finish is not None else one._one(options, choice, built, before)
            except NonFiniteLossError as error:
                self.console.line(f"diverged: {error}")
                self.board.remove_folder(self.board.run_folder(name_on_board(path)))
                return DIVERGED
            return finished_run(fields, read_records(path / RECORD))

    def _leave(self, outcomes: list[Outcome], growing: TrainOptions) -> None:
        """Table, picture, CSV and result of a comparison."""
        path, emulated, plan = self.folder.path, self.board.facts().emulated, growing.adabatch
        assert plan is not None
        summaries = [outcome.summary() for outcome in outcomes]
        write_table(path / COMPARISON_TABLE, outcomes)
        title = f"{self.model.name} on {self.data.source}, lr {growing.lr:g}, interval {plan.interval} epochs"
        plot_comparison(path / COMPARISON_PICTURE, outcomes, title, emulated)
        fields = {
            "settings": summaries,
            "seeds": len(outcomes[0].seeds),
            "epochs": outcomes[0].schedule.epochs,
            "lr": growing.lr,
            "interval": plan.interval,
            "lr_decay": plan.lr_decay,
            "model": self.model.name,
            "data": self.data.source,
            "board": self.board.name,
            "emulated": emulated,
        }
        self.folder.write_json(RESULT, {"verb": "train", **fields})
        self.folder.write_json(TRAIN_RECORD, run_identity(self.args) | {"complete": True})
        self.console.table(*summary_table(summaries, emulated))
        self.console.line(f"{path}: result.json, {COMPARISON_TABLE}, {COMPARISON_PICTURE}, and a run's folder each")
        self.console.result("train", fields | {"out": str(path)})

    def _batch_size(self, args: argparse.Namespace, built: Built, before: dict[str, Any] | None) -> Choice:
        if before is not None and args.batch_size == "auto":
            return Choice(int(before["options"]["batch_size"]), "run")
        largest = largest_effective_batch(args, self.data.train.samples)
        return choose_batch_size(args, self.board, built, largest, self.console)

    def _announce(self, schedule: Schedule, built: Built) -> None:
        """The plan, before the first step."""
        options = schedule.options
        planned = int(self.board.info(options.planning_arguments())["planned_bytes"])
        free = self.board.facts().memory_available_bytes
        _print_schedule(self.console, schedule, default_recipe_of(self.args, self.model, options.effective_batch).why)
        if options.adabatch is not None:
            _print_rows(self.console, schedule.interval_rows())
        self.console.line(f"memory: {mib(planned)} planned, {mib(free)} free on {self.board.name}")
        smallest = min(options.batch_size, options.effective_batch)
        if smallest < 8 and any(node.op == "batch_norm" for node in self.model.nodes):
            self.console.line(
                f"batch norms see {smallest} samples at a time, which is noisy: --batch-size 8 or more, or "
                "--bn-policy frozen, if training is unsteady"
            )
        self.console.event(
            "schedule",
            **self.tags,
            samples=schedule.samples,
            updates=schedule.updates,
            updates_per_epoch=schedule.updates_per_epoch,
            batch_size=options.batch_size,
            effective_batch=options.effective_batch,
            micro_batches=schedule.micro_batches(options.effective_batch),
            lr=options.lr,
            schedule=schedule.rows(),
            planned_bytes=planned,
            free_bytes=free,
        )

    def _write_options(self, options: TrainOptions, choice: Choice, built: Built) -> dict[str, Any]:
        from host_control.study_report import environment

        names = ("model", "target", "build_id", "version")
        held = {
            "flags": run_identity(self.args),
            "options": options.record(),
            "batch_size_from": choice.source,
            "model": describe_model(self.args, self.model),
            "data": describe_data(self.data),
            "board": self.board.name,
            "build": {name: built.manifest.get(name) for name in names} | {"sha256": built.sha256},
        }
        self.folder.write_json(OPTIONS, held)
        facts = asdict(self.board.facts())
        self.folder.write_json("environment.json", environment(sys.argv, facts, board_name=self.board.name))
        return held
