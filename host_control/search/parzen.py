"""Optuna's Tree-structured Parzen Estimator as a pure function of what has been measured.

The parameter is the INDEX into the space, never the size as a category: categories have no order, and TPE over them was
no better than random search (methods.md 1.3). Each proposal comes from a fresh sampler seeded by (seed, number of
observations), so it does not depend on how the process got here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from host_control.search.space import SearchSpace
from host_control.search.strategy import Observation

_SEED_STRIDE = 100_003
"""Prime, so that seeds of neighbouring studies do not walk through the same samplers."""


class ParzenEstimator:
    """Mirrors a history into an in-memory study and asks TPE for the next index."""

    def __init__(self, space: SearchSpace, seed: int, startup_trials: int) -> None:
        self._space = space
        self._seed = seed
        self._startup_trials = startup_trials
        self._distributions: dict[str, BaseDistribution] = {"i": IntDistribution(0, max(len(space) - 1, 0))}
        self._index = {size: index for index, size in enumerate(space.sizes)}
        self._mirrored: list[Observation] = []
        self._study = self._new_study()

    def propose(self, history: Sequence[Observation], draw: int = 0) -> int:
        """The batch size TPE asks for, measured already or not; `draw` gives independent draws from one history."""
        self._mirror(history)
        self._study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=self._startup_trials,
            seed=(self._seed * _SEED_STRIDE + 97 * len(history) + draw) % 2**32,
        )
        trial = self._study.ask(self._distributions)
        # Failed trials are ignored by TPE, a running one would repel its neighbourhood.
        self._study.tell(trial, state=TrialState.FAIL)
        return self._space.sizes[int(trial.params["i"])]

    def _mirror(self, history: Sequence[Observation]) -> None:
        if list(history[: len(self._mirrored)]) != self._mirrored:
            self._mirrored, self._study = [], self._new_study()
        for seen in history[len(self._mirrored) :]:
            self._mirrored.append(seen)
            if seen.samples_per_s is not None:
                self._study.add_trial(
                    create_trial(
                        params={"i": self._index[seen.batch_size]},
                        distributions=self._distributions,
                        value=seen.samples_per_s,
                    )
                )

    @staticmethod
    def _new_study() -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.create_study(direction="maximize")
