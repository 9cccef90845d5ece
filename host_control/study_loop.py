"""The loop of a study: propose, measure, keep; within a time budget, and with disturbed trials repeated.

Strategy, board and clock are arguments: the same loop runs on a board over SSH, on a recorded table and on a simulated
board whose clock is a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cross.errors import DoesNotFitError, UnstableError
from host_control.board import Counters
from host_control.search.forecast import Forecast
from host_control.search.strategy import Strategy, distinct_sizes
from host_control.study import INTERRUPTED_NOTE, Study, Trial

Measure = Callable[[int], Counters]
"""One measurement of one batch size; raises TasteError kinds."""


class Listener(Protocol):
    """Who is told of what happens, for people and for scripts."""

    def started(self, batch_size: int, forecast: Forecast) -> None: ...

    def finished(self, trial: Trial, forecast: Forecast) -> None: ...

    def waiting(self, seconds: float, reason: str) -> None: ...


@dataclass(frozen=True)
class LoopOptions:
    """time_budget_s: None for no limit. repeats: how often a disturbed trial is measured again, each time after a wait.

    All cool-downs of a study together last at most `cool_down_share` of its time budget: on a machine that is always
    disturbed, waiting does not help.
    """

    time_budget_s: float | None = 1200.0
    repeats: int = 2
    cool_down_s: tuple[float, ...] = (5.0, 20.0)
    cool_down_share: float = 0.1
    seconds: float = 2.0


@dataclass
class Clock:
    """Monotonic time and sleeping, replaceable by a simulated board's."""

    now: Callable[[], float] = lambda: time.monotonic()
    sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds)


@dataclass(frozen=True)
class LoopResult:
    """`complete` is False where the time budget ran out before the sizes' budget was measured."""

    complete: bool
    seconds: float


@dataclass
class StudyLoop:
    """Runs a study to its end, to the end of its time, or to the first error that is not a plan error."""

    study: Study
    strategy: Strategy
    measure: Measure
    listener: Listener
    options: LoopOptions = field(default_factory=LoopOptions)
    clock: Clock = field(default_factory=Clock)
    _cooled_s: float = 0.0

    def run(self) -> LoopResult:
        """Trials until the strategy has no further proposal; every one is told before the next begins.

        Raises what `measure` raises (the trial is told FAIL first), KeyboardInterrupt too, and DoesNotFitError where
        not one size could be measured.
        """
        began = self.clock.now()
        forecast = self._forecast()
        while (size := self.strategy.propose(self.study.history())) is not None:
            spent = self.clock.now() - began
            if self._out_of_time(spent, forecast, size):
                # What is left over the budget are second looks: a finer choice, not a missing part.
                measured = len(distinct_sizes(self.study.history()))
                return LoopResult(measured >= self.strategy.budget, spent)
            self.listener.started(size, forecast)
            self._trial(size)
            forecast = self._forecast()
            self.listener.finished(self.study.trials()[-1], forecast)
        self._require_results()
        return LoopResult(True, self.clock.now() - began)

    def _forecast(self) -> Forecast:
        return Forecast.of(self.strategy, self.study.history(), self.options.seconds)

    def _out_of_time(self, spent: float, forecast: Forecast, size: int) -> bool:
        """Whether the next trial would end after the budget; the first one always runs."""
        if self.options.time_budget_s is None or not self.study.history():
            return False
        return spent + forecast.trial_seconds(size) > self.options.time_budget_s

    def _trial(self, size: int) -> None:
        """One size, until a measurement was not disturbed or the repeats are used up; then it is kept, flagged."""
        for attempt in range(self.options.repeats + 1):
            number = self.study.begin(size)
            started = self.clock.now()
            try:
                counters = self.measure(size)
            except DoesNotFitError as error:
                self.study.fail(number, str(error), plan_error=True, seconds=self.clock.now() - started)
                return
            except BaseException as error:
                note = INTERRUPTED_NOTE if isinstance(error, KeyboardInterrupt) else str(error)
                self.study.fail(number, note, seconds=self.clock.now() - started)
                raise
            seconds = self.clock.now() - started
            reason = counters.taint or "disturbed"
            if counters.tainted and attempt < self.options.repeats and self._cool_down(attempt, reason):
                self.study.fail(number, f"discarded: {reason}", seconds=seconds)
                continue
            self.study.complete(number, counters, seconds, note=reason if counters.tainted else "")
            return

    def _cool_down(self, attempt: int, reason: str) -> bool:
        """Wait for the board to settle; False where the study's share of waiting is used up."""
        wait = self.options.cool_down_s[min(attempt, len(self.options.cool_down_s) - 1)]
        limit = self.options.time_budget_s
        if limit is not None and self._cooled_s + wait > self.options.cool_down_share * limit:
            return False
        self._cooled_s += wait
        self.listener.waiting(wait, reason)
        self.clock.sleep(wait)
        return True

    def _require_results(self) -> None:
        trials = self.study.trials()
        if not any(trial.counters for trial in trials):
            reasons = [trial.note for trial in trials if trial.plan_error]
            raise DoesNotFitError(
                reasons[-1] if reasons else "no batch size could be measured. Free memory on the board."
            )


def require_stable(trials: Sequence[Trial]) -> None:
    """UnstableError (18) where every measurement that was kept is flagged as disturbed."""
    kept = [trial for trial in trials if trial.counters is not None]
    if kept and all(trial.counters.tainted for trial in kept if trial.counters is not None):
        raise UnstableError(
            f"all {len(kept)} measurements were disturbed ({kept[-1].note}). "
            "Stop what else runs on the board or cool it, and measure again with `tune --new`."
        )
