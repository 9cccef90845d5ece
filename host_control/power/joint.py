"""Search over batch size x threads x cores x frequency at once, by Optuna's TPE with two objectives, and its Pareto front."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from cross.errors import DoesNotFitError, UsageError
from host_control.run_folder import read_json, write_whole

STUDY_FILE = "joint.json"
_REPEATS_MOST = 200
_STARTUP_SHARE = 4


@dataclass(frozen=True)
class Setting:
    """What can be set of a run: `cores` None for all of them, `frequency_khz` 0 for unchanged."""

    batch_size: int
    threads: int
    cores: tuple[int, ...] | None
    frequency_khz: int


@dataclass(frozen=True)
class Outcome:
    """A setting measured; watts and joules a sample are None where the board has no sensor."""

    setting: Setting
    samples_per_s: float
    spread: float
    watts: float | None
    joules_per_sample: float | None


@dataclass(frozen=True)
class JointSpace:
    """`core_sets`: (cores, threads from 1 up to): all cores, and each group with a clock of its own."""

    batch_sizes: tuple[int, ...]
    core_sets: tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]
    frequencies_khz: tuple[int, ...]

    def __len__(self) -> int:
        threads = sum(len(counts) for _, counts in self.core_sets)
        return len(self.batch_sizes) * threads * len(self.frequencies_khz)

    def __iter__(self) -> Iterator[Setting]:
        for (cores, counts), batch_size, khz in itertools.product(
            self.core_sets, self.batch_sizes, self.frequencies_khz
        ):
            yield from (Setting(batch_size, threads, cores, khz) for threads in counts)

    @property
    def default(self) -> Setting:
        """All threads of all cores at the highest frequency, with a batch size from the middle."""
        cores, counts = self.core_sets[0]
        return Setting(self.batch_sizes[len(self.batch_sizes) // 2], counts[-1], cores, self.frequencies_khz[-1])

    def suggest(self, trial: optuna.Trial) -> Setting:
        """Indices, not categories: those would lose the order. Threads belong to their set of cores."""
        place = trial.suggest_int("cores", 0, len(self.core_sets) - 1)
        cores, counts = self.core_sets[place]
        return Setting(
            self.batch_sizes[trial.suggest_int("batch", 0, len(self.batch_sizes) - 1)],
            counts[trial.suggest_int(f"threads{place}", 0, len(counts) - 1)],
            cores,
            self.frequencies_khz[trial.suggest_int("frequency", 0, len(self.frequencies_khz) - 1)],
        )

    def parameters(self, setting: Setting) -> dict[str, int]:
        """What `suggest` has to be given to yield this setting."""
        place = [cores for cores, _ in self.core_sets].index(setting.cores)
        return {
            "cores": place,
            "batch": self.batch_sizes.index(setting.batch_size),
            f"threads{place}": self.core_sets[place][1].index(setting.threads),
            "frequency": self.frequencies_khz.index(setting.frequency_khz),
        }


def useful_rate(outcome: Outcome, relation: Mapping[int, float] | None) -> float:
    """samples/s over r: what counts for the time to an accuracy."""
    return outcome.samples_per_s / relation[outcome.setting.batch_size] if relation else outcome.samples_per_s


def best(outcomes: Sequence[Outcome], objective: str, relation: Mapping[int, float] | None) -> Outcome:
    """The one with the least energy a sample, or the highest (useful) rate. UsageError: no energy was measured."""
    if objective != "energy":
        return max(outcomes, key=lambda o: useful_rate(o, relation))
    if any(o.joules_per_sample is None for o in outcomes):
        raise UsageError(
            "--objective energy without a power sensor. Use --power-source csv:FILE, command:CMD or model."
        )
    return min(outcomes, key=lambda o: o.joules_per_sample or math.inf)


def front(outcomes: Sequence[Outcome], relation: Mapping[int, float] | None) -> list[Outcome]:
    """Those that no other is better than or equal to in rate and in energy a sample, fastest first."""

    def costs(o: Outcome) -> tuple[float, float]:
        return -useful_rate(o, relation), o.joules_per_sample or 0.0

    kept = [
        o
        for o in outcomes
        if not any(
            costs(q) != costs(o) and all(a <= b for a, b in zip(costs(q), costs(o), strict=True)) for q in outcomes
        )
    ]
    return sorted(kept, key=costs)


class JointStudy:
    """What was measured lies in the folder, written whole after each setting; Optuna's trials are made of it anew."""

    def __init__(self, folder: Path, space: JointSpace, key: Mapping[str, Any], budget: int, seed: int) -> None:
        """UsageError where the folder holds a study of something else. `budget`: distinct settings that are measured."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.budget, self._file = space, min(budget, len(space)), folder / STUDY_FILE
        self._key = json.loads(json.dumps(dict(key)))
        startup = max(self.budget // _STARTUP_SHARE, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(n_startup_trials=startup, multivariate=True, group=True, seed=seed)
        self._study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
        self.known: dict[Setting, Outcome | None] = {}
        stored = read_json(self._file) if self._file.exists() else {"key": self._key, "trials": []}
        if stored["key"] != self._key:
            name = next(n for n in self._key if stored["key"].get(n) != self._key[n])
            raise UsageError(
                f"{folder} holds a study with {name} {stored['key'].get(name)}, not {self._key[name]}. Choose another --out."
            )
        for trial in stored["trials"]:
            self.known[_setting(trial["setting"])] = _outcome(trial)

    def _write(self) -> None:
        trials = [{"setting": asdict(s), "outcome": None if o is None else asdict(o)} for s, o in self.known.items()]
        write_whole(self._file, (json.dumps({"key": self._key, "trials": trials}, indent=1) + "\n").encode())

    @property
    def outcomes(self) -> list[Outcome]:
        """What was measured, in order, without what did not fit."""
        return [outcome for outcome in self.known.values() if outcome is not None]

    def run(
        self,
        measure: Callable[[Setting], Outcome],
        relation: Mapping[int, float] | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Measure until the budget of distinct settings is used up or `is_over`; a space within the budget is measured whole.

        A setting that is proposed again is told what it gave; one that does not fit is told as failed and counts.
        """
        first = list(self.space) if len(self.space) <= self.budget else [self.space.default]
        # Those of an earlier process are proposed again, and told at once.
        # (Not those that a board with less free memory has no room for now.)
        within = set(self.space)
        for setting in dict.fromkeys([*(s for s in self.known if s in within), *first]):
            self._study.enqueue_trial(self.space.parameters(setting))
        repeats = 0
        while len(self.known) < self.budget and repeats < _REPEATS_MOST and not is_over():
            trial = self._study.ask()
            setting = self.space.suggest(trial)
            repeats = repeats + 1 if setting in self.known else 0
            if setting not in self.known:
                try:
                    self.known[setting] = measure(setting)
                except DoesNotFitError:
                    self.known[setting] = None
                self._write()
            outcome = self.known[setting]
            if outcome is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, [useful_rate(outcome, relation), outcome.joules_per_sample or 0.0])


def _setting(record: Mapping[str, Any]) -> Setting:
    cores = None if record["cores"] is None else tuple(record["cores"])
    return Setting(record["batch_size"], record["threads"], cores, record["frequency_khz"])


def _outcome(trial: Mapping[str, Any]) -> Outcome | None:
    record = trial["outcome"]
    return None if record is None else Outcome(**{**record, "setting": _setting(record["setting"])})
