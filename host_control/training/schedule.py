"""Batches, updates and learning rates of a run before it begins: what the board will do, in the same arithmetic.

An epoch is cut into optimizer steps of `effective_batch` samples, the last one smaller; a step is cut into micro-batches of
`batch_size` rows, the last one smaller. Where a program needs `minimum` rows (a batch norm over one value is undefined),
the micro-batch before gives up what is missing (native/taste-train/batches.c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cross.graph import Model
from host_control.training.options import TrainOptions


@dataclass(frozen=True)
class Schedule:
    """A run of `options` over `samples` training samples."""

    options: TrainOptions
    samples: int
    minimum: int = 1

    @property
    def updates_per_epoch(self) -> int:
        return -(-self.samples // self.options.effective_batch)

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        if self.options.steps:
            return self.options.steps
        return max(1, math.ceil(self.options.epochs * self.updates_per_epoch - 1e-9))

    @property
    def epochs(self) -> float:
        return self.updates / self.updates_per_epoch

    @property
    def warmup_updates(self) -> int:
        return int(self.options.warmup * self.updates + 0.5)

    def micro_batches(self, samples: int) -> list[int]:
        """Rows of the micro-batches of one optimizer step over `samples`."""
        rows: list[int] = []
        while samples > 0:
            take = min(samples, self.options.batch_size)
            rest = samples - take
            missing = self.minimum - rest if 0 < rest < self.minimum else 0
            rows.append(take - missing if take > missing else take)
            samples -= rows[-1]
        return rows

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 0."""
        o, warm = self.options, self.warmup_updates
        if step < warm:
            return o.lr * (step + 1) / warm
        share = (step - warm) / max(self.updates - warm, 1)
        if o.schedule == "step":
            return o.lr * o.step_gamma ** math.floor((step // self.updates_per_epoch) / o.step_every)
        if o.schedule == "cosine":
            return o.lr * 0.5 * (1 + math.cos(math.pi * share))
        return o.lr * (1 - share) if o.schedule == "linear" else o.lr

    def rows(self) -> list[dict[str, Any]]:
        """One row an epoch; `lr` is that of its first update, `updates` those it begins."""
        rows = []
        for epoch, first in enumerate(range(0, self.updates, self.updates_per_epoch)):
            rows.append(
                {
                    "epoch": epoch,
                    "effective_batch": self.options.effective_batch,
                    "batch_size": self.options.batch_size,
                    "updates": min(self.updates_per_epoch, self.updates - first),
                    "lr": self.rate(first),
                }
            )
        return rows

    def sentences(self) -> list[str]:
        """The schedule for people."""
        o, last = self.options, self.samples % self.options.effective_batch
        lines = [
            f"{self.samples} samples, {self.epochs:g} epochs of {self.updates_per_epoch} updates: {self.updates} updates",
            f"effective batch {o.effective_batch} = {_counted(self.micro_batches(o.effective_batch))}"
            + (f"; the last one of an epoch {last} = {_counted(self.micro_batches(last))}" if last else ""),
        ]
        warm = f", warm-up over {self.warmup_updates} updates" if self.warmup_updates else ""
        clip = f", gradients clipped at {o.grad_clip:g}" if o.grad_clip else ""
        momentum = f" momentum {o.momentum:g}" if o.optimizer == "sgd" else ""
        lines.append(f"{o.optimizer}{momentum}, weight decay {o.weight_decay:g}; lr {o.lr:g} {o.schedule}{warm}{clip}")
        return lines


def minimum_rows(model: Model) -> int:
    """Rows that a step needs before anything is built: 2 where a batch norm sees one value a channel and sample."""
    norms = (model.tensors[node.outputs[0]] for node in model.nodes if node.op == "batch_norm")
    return 2 if any(math.prod(norm.shape[2:]) == 1 for norm in norms) else 1


def _counted(rows: list[int]) -> str:
    """[10, 10, 8] as '2 x 10 + 8'."""
    parts = []
    for value in dict.fromkeys(rows):
        count = rows.count(value)
        parts.append(f"{count} x {value}" if count > 1 else str(value))
    return " + ".join(parts) + (" micro-batches" if len(rows) > 1 else " in one micro-batch")
