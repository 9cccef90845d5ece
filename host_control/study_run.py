"""One study, from an opened board to its files: what `tune` runs, and `train` where no batch size is given."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import UsageError
from host_control.board import Counters, OperatingPoint
from host_control.console import Console, duration
from host_control.preparation import Built, session_memory
from host_control.run_folder import RunFolder
from host_control.search.forecast import Forecast
from host_control.search.space import MemoryForm, SearchSpace, make_space, memory_budget
from host_control.search.strategies import make_strategy

if TYPE_CHECKING:
    from host_control.boards import DeployedBoard, RecordedBoard
    from host_control.search.strategy import Strategy
    from host_control.study import Study, StudyKey
    from host_control.study_report import StudyReport

STUDY_RECORD = "study.json"
DEFAULT_TIME_BUDGET_S = 1200.0


def study_identity(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that make two commands the same study, as JSON holds them."""
    flags = (
        "model build board target input_shape classes input output init unfold_bn "
        "trainable loss search seed inference max_batch_size memory threads cores"
    )
    values = {name: getattr(args, name) for name in flags.split()}
    return {
        name: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        for name, value in values.items()
    }


def recorded_space(board: RecordedBoard, max_batch_size: int, memory: int | None) -> SearchSpace:
    """The grid sizes of a recorded table, those planned within `memory` bytes; UsageError if there are none."""
    table = set(board.batch_sizes)
    grid = [size for size in make_space(None, None, max_batch_size).sizes if size in table]
    sizes = [size for size in grid if memory is None or board.measure(OperatingPoint(size)).planned_bytes <= memory]
    if not sizes:
        raise UsageError(
            f"{board.name} has no recorded size of 1, 2, 4, 6, ... within the limits. "
            "Raise --max-batch-size or --memory."
        )
    return SearchSpace(tuple(sizes), "memory" if len(sizes) < len(grid) else "max-batch-size")


@dataclass(frozen=True)
class StudyRun:
    """One `tune`: everything it needs, held together."""

    args: argparse.Namespace
    folder: RunFolder
    board: DeployedBoard | RecordedBoard
    built: Built | None
    console: Console

    @property
    def program(self) -> str:
        return "eval" if self.args.inference else "train"

    @property
    def model(self) -> str:
        return str(self.built.manifest.get("model")) if self.built else str(self.args.model or self.board.name)

    def search(self) -> StudyReport:
        """Run the study and write everything it leaves; on Ctrl-C what there is is written first."""
        from host_control.study import Study
        from host_control.study_loop import LoopOptions, StudyLoop, require_stable
        from host_control.study_report import verdict_sentences
        from host_control.study_view import StudyView, print_report

        args, console = self.args, self.console
        with Study(self.folder.path, self._key(), self._space()) as study:
            strategy = make_strategy(args.search, study.space, args.seed)
            budget = strategy.budget
            self.folder.write_json(STUDY_RECORD, study_identity(args) | {"complete": False})
            self._write_environment()
            self._announce(study, strategy)
            options = LoopOptions(time_budget_s=args.time_budget, seconds=args.seconds)
            try:
                with console.live() as region:
                    view = StudyView(console, region, budget, study.trials())
                    complete = StudyLoop(study, strategy, self._measure, view, options).run().complete
            except KeyboardInterrupt:
                self._write(study, budget, complete=False)
                raise KeyboardInterrupt(self._interrupted(study)) from None
            report = self._write(study, budget, complete)
            assert report is not None, "a loop that ended has a measurement"
            print_report(console, report, verdict_sentences(report))
            console.line(f"{self.folder.path}: result.json, trials.csv, throughput.png, study.db, environment.json")
            require_stable(study.trials())
        return report

    def _measure(self, size: int) -> Counters:
        return self.board.measure(OperatingPoint(size, self.program, self.args.threads, self.args.cores))

    def _space(self) -> SearchSpace:
        """From the plan and the board's free memory; of a recorded board, the sizes of its table."""
        from host_control.boards import RecordedBoard

        if isinstance(self.board, RecordedBoard):
            return recorded_space(self.board, self.args.max_batch_size, self.args.memory)
        assert self.built is not None, "a deployed board has a build"
        minimum = 1 if self.args.inference else self.built.minimum_batch
        budget = memory_budget(self.board.facts().memory_available_bytes, self.args.memory)
        return make_space(self._memory, budget, self.args.max_batch_size, minimum)

    @cached_property
    def _memory(self) -> MemoryForm:
        """What a session of the deployed program takes; asked once, for a slow board takes a second to start it."""
        from host_control.boards import RecordedBoard

        assert not isinstance(self.board, RecordedBoard), "a table has no program"
        return session_memory(self.board.info(), self.program, fused=True)

    def _key(self) -> StudyKey:
        from host_control.study import StudyKey

        built, args = self.built, self.args
        return StudyKey(
            model=self.model,
            board=self.board.name,
            build=str(built.manifest.get("build_id") or built.sha256) if built else "",
            program=self.program,
            search=args.search,
            seed=args.seed,
            minimum_batch=built.minimum_batch if built else 1,
            max_batch_size=args.max_batch_size,
            memory=args.memory,
            threads=args.threads,
            cores=args.cores,
        )

    def _announce(self, study: Study, strategy: Strategy) -> None:
        """What will be done, and how long it takes, before the first trial."""
        space, console, limit = study.space, self.console, self.args.time_budget
        forecast = Forecast.of(strategy, study.history(), self.args.seconds)
        end = "the board's memory ends there" if space.limited_by == "memory" else "--max-batch-size"
        if space.minimum_note:
            console.line(space.minimum_note)
        console.line(
            f"{'going on with' if study.resumed else 'searching'} {len(space)} sizes from {space.sizes[0]} to "
            f"{space.bs_max} ({end}); {strategy.budget} of them are measured ({self.args.search})"
        )
        least = "about" if forecast.known else "at least"
        console.line(
            f"forecast: {least} {duration(min(forecast.remaining_s, limit))}, at most {duration(limit)} (--time-budget)"
        )
        console.event(
            "forecast",
            sizes=list(space.sizes),
            bs_max=space.bs_max,
            limited_by=space.limited_by,
            minimum_note=space.minimum_note,
            budget=strategy.budget,
            resumed=study.resumed,
            known=forecast.known,
            remaining_s=forecast.remaining_s,
            time_budget_s=limit,
        )

    def _write(self, study: Study, budget: int, complete: bool) -> StudyReport | None:
        """trials.csv, result.json and throughput.png of what there is; None where nothing was measured."""
        from host_control.study_plot import plot_throughput
        from host_control.study_report import make_report, write_trials

        trials, folder = study.trials(), self.folder.path
        write_trials(folder / "trials.csv", trials)
        if not any(trial.counters for trial in trials):
            return None
        report = make_report(
            trials,
            study.space,
            budget=budget,
            complete=complete,
            program=self.program,
            board=self.board.name,
            model=self.model,
            seed=self.args.seed,
        )
        self.folder.write_json("result.json", {"verb": "tune", **report.result()})
        plot_throughput(folder / "throughput.png", report)
        return report

    def _interrupted(self, study: Study) -> str:
        from host_control.study_view import best_so_far

        done = sum(trial.counters is not None for trial in study.trials())
        return (
            f"interrupted with {done} measurements saved in {self.folder.path} "
            f"({best_so_far(study.trials(), study.space.bs_max)}). "
            f"Go on with {self._again()}."
        )

    def _again(self) -> str:
        """The command that goes on: the same one, which finds a folder under runs/ by itself."""
        same = "the same command"
        return same if self.args.out is None else f"{same} and --out {shlex.quote(str(self.folder.path))}"

    def _write_environment(self) -> None:
        from host_control.boards import DeployedBoard
        from host_control.study_report import environment

        facts = None
        more: dict[str, Any] = {"board_name": self.board.name, "program": self.program}
        if isinstance(self.board, DeployedBoard):
            facts = asdict(self.board.facts())
            more["memory"] = asdict(self._memory)
        if self.built is not None:
            names = ("model", "target", "build_id", "version", "features", "vector_bits")
            more["build"] = {name: self.built.manifest.get(name) for name in names} | {"sha256": self.built.sha256}
        self.folder.write_json("environment.json", environment(sys.argv, facts, **more))
