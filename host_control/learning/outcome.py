"""What the runs of a setting add up to: mean and spread over seeds, a row for each accuracy."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_control.comparison import deviation, spread
from host_control.learning.settings import Setting
from host_control.run_folder import write_whole

COLUMNS = ("setting", "batch_size", "replay", "seed", "after_task", "task", "accuracy")


@dataclass(frozen=True)
class Outcome:
    """A setting and the board's result of each seed, in their order."""

    setting: Setting
    seeds: tuple[int, ...]
    results: tuple[Mapping[str, Any], ...]

    @property
    def diverged(self) -> bool:
        return any(result["diverged"] for result in self.results)

    def summary(self) -> dict[str, Any]:
        """One element of the result's `settings`. A diverged run has no accuracy: null in `values`, not in the mean."""
        return {
            "name": self.setting.name,
            "batch_size": self.setting.batch_size,
            "replay": self.setting.replay,
            "lr": self.results[0]["lr"],
            "final_average_accuracy": spread([r["final_average_accuracy"] for r in self.results]),
            "forgetting": spread([r["forgetting"] for r in self.results]),
            "backward_transfer": spread([r["backward_transfer"] for r in self.results]),
            "updates": self.results[0]["updates"],
            "seconds": statistics.fmean(r["seconds"] for r in self.results),
            "samples_per_s": statistics.fmean(r["samples_per_s"] or 0.0 for r in self.results),
            "diverged": self.diverged,
        }

    def curve(self) -> list[tuple[float, float]]:
        """(mean, standard deviation) of the average accuracy over the tasks so far, after each task."""
        finished = [r["accuracy_matrix"] for r in self.results if not r["diverged"]]
        averages = [[statistics.fmean(row) for row in matrix] for matrix in finished]
        return [(statistics.fmean(values), deviation(values)) for values in zip(*averages, strict=True)]

    def rows(self) -> list[tuple[Any, ...]]:
        """Rows of the table of accuracies, as COLUMNS names them."""
        setting = (self.setting.name, self.setting.batch_size, int(self.setting.replay))
        return [
            (*setting, seed, after, task, accuracy)
            for seed, result in zip(self.seeds, self.results, strict=True)
            for after, row in enumerate(result["accuracy_matrix"])
            for task, accuracy in enumerate(row)
        ]


def write_table(path: Path, outcomes: Sequence[Outcome]) -> Path:
    """accuracy.csv: a row for each setting, seed, task learned and task tested."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in outcomes:
        writer.writerows(outcome.rows())
    return write_whole(path, text.getvalue().encode())
