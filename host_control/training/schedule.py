"""Batches, updates and learning rates of a run before it begins: what the board will do, in the same arithmetic.

An epoch is cut into optimizer steps of `effective_batch` samples, the last one smaller; a step is cut into micro-batches of
`batch_size` rows, the last one smaller. The effective batch may grow from one phase of epochs to the next (adabatch.py).
Where a program needs `minimum` rows (a batch norm over one value is undefined), the micro-batch before gives up what is
missing (native/taste-train/batches.c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cross.graph import Model
from host_control.training.options import TrainOptions


@dataclass(frozen=True)
class Phase:
    """Epochs with one effective batch, up to the next phase; the last has no end. `update`: the first of `epoch`."""

    epoch: int
    update: int
    effective_batch: int
    updates_per_epoch: int


@dataclass(frozen=True)
class Schedule:
    """A run of `options` over `samples` training samples."""

    options: TrainOptions
    samples: int
    minimum: int = 1

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        adabatch, found, epoch, update = self.options.adabatch, [], 0, 0
        for size in adabatch.sizes() if adabatch else (self.options.effective_batch,):
            found.append(Phase(epoch, update, size, -(-self.samples // size)))
            if adabatch:
                epoch += adabatch.interval
                update += adabatch.interval * found[-1].updates_per_epoch
        return tuple(found)

    def phase_of_update(self, update: int) -> Phase:
        return next(phase for phase in reversed(self.phases) if phase.update <= update)

    def phase_of_epoch(self, epoch: float) -> Phase:
        return next(phase for phase in reversed(self.phases) if phase.epoch <= epoch)

    @property
    def updates_per_epoch(self) -> int:
        """Of the first epoch."""
        return self.phases[0].updates_per_epoch

    @cached_property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        if self.options.steps:
            return self.options.steps
        wanted, last = self.options.epochs, self.phase_of_epoch(self.options.epochs)
        return max(1, math.ceil(last.update + (wanted - last.epoch) * last.updates_per_epoch - 1e-9))

    @property
    def epochs(self) -> float:
        last = self.phase_of_update(self.updates)
        return last.epoch + (self.updates - last.update) / last.updates_per_epoch

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
        phase = self.phase_of_update(step)
        epoch = phase.epoch + (step - phase.update) // phase.updates_per_epoch
        if o.adabatch is not None:
            ramp = (step + 1) / warm if step < warm else 1.0
            return o.lr * o.adabatch.rate_factor(epoch, phase.effective_batch) * ramp
        if step < warm:
            return o.lr * (step + 1) / warm
        share = (step - warm) / max(self.updates - warm, 1)
        if o.schedule == "step":
            return o.lr * o.step_gamma ** math.floor(epoch / o.step_every)
        if o.schedule == "cosine":
            return o.lr * 0.5 * (1 + math.cos(math.pi * share))
        return o.lr * (1 - share) if o.schedule == "linear" else o.lr

    def rows(self) -> list[dict[str, Any]]:
        """One row an epoch; `lr` is that of its first update, `updates` those it begins."""
        rows: list[dict[str, Any]] = []
        first = 0
        while first < self.updates:
            phase = self.phase_of_update(first)
            rows.append(
                {
                    "epoch": len(rows),
                    "effective_batch": phase.effective_batch,
                    "batch_size": min(self.options.batch_size, phase.effective_batch),
                    "updates": min(phase.updates_per_epoch, self.updates - first),
                    "lr": self.rate(first),
                }
            )
            first += phase.updates_per_epoch
        return rows

    def interval_rows(self) -> list[dict[str, Any]]:
        """The rows of a growing effective batch with one an interval: `epoch` is its first, `last` its last."""
        found: list[dict[str, Any]] = []
        for row in self.rows():
            if self.options.adabatch is None or row["epoch"] % self.options.adabatch.interval == 0:
                found.append(row | {"updates": 0})
            found[-1] |= {"last": row["epoch"], "updates": found[-1]["updates"] + row["updates"]}
        return found

    def sentences(self, micro: bool = True) -> list[str]:
        """The schedule for people; `micro`: with the micro-batches, where their size is known."""
        o = self.options
        lines = self._growth(micro) if o.adabatch else self._fixed(micro)
        warm = f", warm-up over {self.warmup_updates} updates" if self.warmup_updates else ""
        clip = f", gradients clipped at {o.grad_clip:g}" if o.grad_clip else ""
        momentum = f" momentum {o.momentum:g}" if o.optimizer == "sgd" else ""
        lines.append(f"{o.optimizer}{momentum}, weight decay {o.weight_decay:g}; lr {o.lr:g} {o.schedule}{warm}{clip}")
        return lines

    def _fixed(self, micro: bool) -> list[str]:
        def cut(rows: int) -> str:
            return f"{rows} = {_counted(self.micro_batches(rows))}" if micro else str(rows)

        size = self.options.effective_batch
        last = self.samples % size
        return [
            f"{self.samples} samples, {self.epochs:g} epochs of {self.updates_per_epoch} updates: {self.updates} updates",
            f"effective batch {cut(size)}" + (f"; the last one of an epoch {cut(last)}" if last else ""),
        ]

    def _growth(self, micro: bool) -> list[str]:
        o, plan = self.options, self.options.adabatch
        assert plan is not None
        often = "every epoch" if plan.interval == 1 else f"every {plan.interval} epochs"
        grows, falls = f"effective batch {plan.start}", f"lr times {plan.lr_decay:g} {often}"
        if plan.start < plan.cap:
            falls += ", and times what the effective batch grows by"
            grows += f", times {plan.factor:g} {often}, up to {plan.cap}"
        if micro:
            grows += f"; micro-batches of up to {o.batch_size}"
        return [
            f"{self.samples} samples, {self.epochs:g} epochs: {self.updates} updates",
            f"{grows}; {falls}",
        ]


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
