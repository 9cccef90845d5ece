"""r: how many examples a batch size needs to a target accuracy, from a proxy run (`power proxy`), on disk."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cross.errors import CorruptInputError, UsageError
from host_control.run_folder import write_whole

RELATION = "relation.json"
FORMAT = "taste-relation 1"
RATE_BATCH = 128


@dataclass(frozen=True)
class ProxyRuns:
    """`epochs`: batch size -> epochs to the target accuracy, one a seed; None where a run never reached it."""

    model: str
    data: str
    target_accuracy: float
    optimizer: str
    lr: float
    most_epochs: float
    epochs: Mapping[int, tuple[float | None, ...]] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What has to agree for the runs to go on."""
        return {name: value for name, value in asdict(self).items() if name != "epochs"}

    def relation(self) -> dict[int, float]:
        """r_b = N(b) / max N, over the batch sizes of which every seed reached the target."""
        means = {b: statistics.fmean(n) for b, n in self._reached().items()}
        most = max(means.values(), default=1.0)
        return {b: mean / most for b, mean in means.items()}

    def spread(self) -> dict[int, float]:
        """Standard deviation over the seeds, in units of r."""
        reached = self._reached()
        most = max((statistics.fmean(n) for n in reached.values()), default=1.0)
        return {b: statistics.stdev(n) / most if len(n) > 1 else 0.0 for b, n in reached.items()}

    def _reached(self) -> dict[int, list[float]]:
        whole = {b: [n for n in runs if n is not None] for b, runs in self.epochs.items()}
        return {b: n for b, n in whole.items() if n and len(n) == len(self.epochs[b])}


def scaled_rate(lr: float, batch_size: int) -> float:
    """The learning rate at `batch_size`, from that at 128: with the square root (section 4.1 of the paper)."""
    return lr * math.sqrt(batch_size / RATE_BATCH)


def epochs_to(accuracies: Sequence[tuple[float, float]], target: float) -> float | None:
    """When a run reached `target`, on the line between the two evaluations around it; `accuracies`: (epoch, accuracy)."""
    before = (0.0, 0.0)
    for epoch, accuracy in accuracies:
        if accuracy >= target:
            share = (target - before[1]) / (accuracy - before[1]) if accuracy > before[1] else 1.0
            return before[0] + share * (epoch - before[0])
        before = (epoch, accuracy)
    return None


def write_relation(folder: Path, runs: ProxyRuns) -> None:
    """relation.json: every run, r and its spread."""
    record = {"format": FORMAT, **asdict(runs), "relation": runs.relation(), "spread": runs.spread()}
    write_whole(folder / RELATION, (json.dumps(record, indent=1) + "\n").encode())


def read_runs(path: Path) -> ProxyRuns:
    """The runs in a folder that `power proxy` left, or its relation.json."""
    file = path / RELATION if path.is_dir() else path
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT}")
        epochs = {int(b): tuple(None if n is None else float(n) for n in runs) for b, runs in record["epochs"].items()}
        names = "model data target_accuracy optimizer lr most_epochs".split()
        return ProxyRuns(**{name: record[name] for name in names}, epochs=epochs)
    except FileNotFoundError:
        raise UsageError(f"no relation {file}. Make one with `power proxy --out {path}`.") from None
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptInputError(f"{file} is not a relation: {reason}. Run `power proxy` again.") from error


def read_relation(path: Path) -> dict[int, float]:
    """r of a file; UsageError where no batch size reached the target."""
    found = read_runs(path).relation()
    if not found:
        raise UsageError(f"in {path} no batch size reached the target accuracy. Lower it, or allow more epochs.")
    return found
