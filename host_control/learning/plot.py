"""learn.png: average accuracy over the tasks, and where every setting ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from host_control.figure import new_figure, write_figure
from host_control.learning.outcome import Outcome


def label(outcome: Outcome) -> str:
    """'20', 'auto (14)', 'none (20)'."""
    setting = outcome.setting
    return setting.name if setting.name == str(setting.batch_size) else f"{setting.name} ({setting.batch_size})"


def plot_outcomes(path: Path, outcomes: Sequence[Outcome], title: str) -> Path:
    """Draw means over seeds, with one standard deviation to either side."""
    figure = new_figure(10, 4)
    over, final = figure.subplots(1, 2)
    for number, outcome in enumerate(outcomes):
        means, deviations = ([pair[i] for pair in outcome.curve()] for i in (0, 1))
        tasks, colour = range(1, len(means) + 1), f"C{number % 10}"
        over.plot(tasks, means, "o-", color=colour, markersize=4, label=label(outcome))
        low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
        over.fill_between(tasks, low, high, color=colour, alpha=0.15)
        end = outcome.summary()["final_average_accuracy"]
        if end["mean"] is not None:
            final.errorbar([number], [end["mean"]], yerr=[end["std"]], fmt="o", color=colour, capsize=4)
        else:
            final.annotate("diverged", (number, 0.02), ha="center", color=colour)
    over.set_xlabel("tasks learned")
    over.set_ylabel("average accuracy on them")
    over.legend(title="batch size")
    final.set_xticks(range(len(outcomes)), [label(outcome) for outcome in outcomes])
    final.set_xlim(-0.5, len(outcomes) - 0.5)
    final.set_xlabel("setting")
    final.set_ylabel("final average accuracy")
    for axis in (over, final):
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    return write_figure(path, figure)
