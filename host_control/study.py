"""A study on disk: every trial of a `tune` run in an Optuna study, in SQLite in the run folder.

SQLite, not Optuna's journal file: a torn last line makes a journal unopenable. A trial that was running when the
process died is told FAIL at the next start (a RUNNING one would repel its neighbourhood for ever). One process writes a
study at a time: the run folder's lock sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from cross.errors import CorruptInputError, UsageError
from host_control.board import Counters
from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation

STUDY_FILE = "study.db"
STUDY_NAME = "tune"
INTERRUPTED_NOTE = "interrupted"


@dataclass(frozen=True)
class StudyKey:
    """What makes two runs the same study: all of it must agree for one to go on where the other stopped."""

    model: str
    board: str
    build: str
    program: str
    search: str
    seed: int
    minimum_batch: int
    max_batch_size: int
    memory: int | None = None
    threads: int | None = None
    cores: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """One measurement: `seconds` it took, `started` in UTC (ISO 8601). `counters` is None where it failed: see `note`.

    `plan_error`: the plan said this size fits and the board said it does not.
    """

    number: int
    batch_size: int
    counters: Counters | None
    seconds: float
    started: str
    note: str = ""
    plan_error: bool = False

    def observation(self) -> Observation | None:
        """What a strategy sees of it: nothing of interrupted and discarded trials."""
        if self.counters is not None:
            counters = self.counters
            return Observation(self.batch_size, counters.samples_per_s, counters.spread, counters.tainted)
        return Observation(self.batch_size, None) if self.plan_error else None


class OtherStudyError(UsageError):
    """The folder holds a study of another model, board, build or search."""


class Study:
    """Opens or creates the study in a folder; a context manager."""

    def __init__(self, folder: Path, key: StudyKey, space: SearchSpace) -> None:
        """Raises OtherStudyError where the folder holds another study, CorruptInputError where its file is damaged.

        A study that goes on keeps the space it began with: the board's free memory is never twice the same.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._chosen = _ChosenSampler()
        self._open: dict[int, optuna.Trial] = {}
        url = f"sqlite:///{folder / STUDY_FILE}"
        try:
            self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 10}})
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=STUDY_NAME,
                direction="maximize",
                sampler=self._chosen,
                load_if_exists=True,
            )
        except Exception as error:
            if "malformed" in str(error) or "not a database" in str(error):
                raise CorruptInputError(f"study {folder / STUDY_FILE} is damaged. Choose another --out.") from error
            raise
        self.space = self._agree(folder, key, space)
        self._fail_stale_trials()
        self._trials = [_trial(frozen, self.space) for frozen in self._study.get_trials(deepcopy=False)]
        self.resumed = bool(self._trials)

    def _agree(self, folder: Path, key: StudyKey, space: SearchSpace) -> SearchSpace:
        wanted = {**asdict(key), "cores": None if key.cores is None else list(key.cores)}
        stored = self._study.user_attrs.get("key")
        if stored is None:
            self._study.set_user_attr("optuna", optuna.__version__)
            self._study.set_user_attr("space", asdict(space))
            self._study.set_user_attr("key", wanted)
            return space
        for name, value in wanted.items():
            if stored.get(name) != value:
                raise OtherStudyError(
                    f"run folder {folder} holds a study with {name.replace('_', '-')} {stored.get(name)}, not {value}. "
                    "Choose another --out, or the same flags."
                )
        kept = self._study.user_attrs["space"]
        return SearchSpace(tuple(kept["sizes"]), kept["limited_by"], kept["minimum_note"])

    def _fail_stale_trials(self) -> None:
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def begin(self, batch_size: int) -> int:
        """Open a trial of `batch_size`; returns its number."""
        self._chosen.index = self.space.sizes.index(batch_size)
        trial = self._study.ask({"i": IntDistribution(0, max(len(self.space) - 1, 0))})
        self._open[trial.number] = trial
        return trial.number

    def complete(self, number: int, counters: Counters, seconds: float, note: str = "") -> None:
        """A trial gave a measurement."""
        self._end(number, TrialState.COMPLETE, counters=asdict(counters), seconds=seconds, note=note)

    def fail(self, number: int, note: str, *, plan_error: bool = False, seconds: float = 0.0) -> None:
        """A trial gave nothing; `plan_error`: the plan said it fits and the board said it does not."""
        self._end(number, TrialState.FAIL, note=note, plan_error=plan_error, seconds=seconds)

    def _end(self, number: int, state: TrialState, **record: Any) -> None:
        trial = self._open.pop(number)
        # One attribute: each is a transaction of its own, and a commit waits for the disk.
        trial.set_user_attr("record", record)
        value = record["counters"]["samples_per_s"] if state == TrialState.COMPLETE else None
        self._trials.append(_trial(self._study.tell(trial, value, state=state), self.space))

    def trials(self) -> list[Trial]:
        """Every finished trial, in order."""
        return list(self._trials)

    def history(self) -> list[Observation]:
        """What a strategy is shown."""
        return [seen for trial in self._trials if (seen := trial.observation()) is not None]

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _trial(frozen: FrozenTrial, space: SearchSpace) -> Trial:
    attributes = frozen.user_attrs.get("record", {})
    record = attributes.get("counters") if frozen.state == TrialState.COMPLETE else None
    index = frozen.params.get("i")
    started = frozen.datetime_start
    return Trial(
        number=frozen.number,
        batch_size=0 if index is None else space.sizes[int(index)],
        counters=None if record is None else Counters(**record),
        seconds=float(attributes.get("seconds", 0.0)),
        started="" if started is None else started.astimezone(UTC).isoformat(timespec="seconds"),
        note=str(attributes.get("note", INTERRUPTED_NOTE if record is None else "")),
        plan_error=bool(attributes.get("plan_error", False)),
    )


class _ChosenSampler(BaseSampler):
    """Hands Optuna the index that the strategy chose."""

    index = 0

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.index
