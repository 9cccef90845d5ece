"""AdaBatch (Devarakonda et al., arXiv 1712.02029): the effective batch grows at fixed intervals, and with it the rate.

A fixed effective batch r has its learning rate multiplied by `lr_decay` after every interval. Where the effective batch
grows from r to r' instead, the factor is lr_decay * r'/r: rate over effective batch falls as with the fixed one. Over k
intervals the factors multiply to lr_decay^k * r_k/r_0, which is how the board computes it (native/taste-train/schedule.c).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from cross.errors import UsageError
from host_control.flags import positive
from host_control.training import recipe

BATCH_SCHEDULES = ("fixed", "adabatch")
START, CAP, FACTOR, LR_DECAY = 16, 512, 2.0, 0.375
INTERVALS = 5
"""Of a run, where --interval is left out: the paper's 20 epochs of 100."""

_FLAGS = ("effective_batch_start", "batch_factor", "interval", "effective_batch_cap", "lr_decay")


@dataclass(frozen=True)
class AdaBatch:
    """An effective batch of `start` samples that is multiplied by `factor`, rounded down, every `interval` epochs up to `cap`.

    start == cap: it stays, and the learning rate alone falls.
    """

    start: int
    factor: float
    interval: int
    cap: int
    lr_decay: float

    def sizes(self) -> Iterator[int]:
        """The effective batch of every interval in which it still grows, and of the first at the cap."""
        size = self.start
        while size < self.cap:
            yield size
            size = min(math.floor(size * self.factor), self.cap)
        yield size

    def rate_factor(self, epoch: int, effective: int) -> float:
        """What the learning rate of epoch 0 is multiplied by in an epoch of that effective batch."""
        return float(self.lr_decay ** (epoch // self.interval) * (effective / self.start))

    def arguments(self) -> dict[str, object]:
        """Flags of `taste-train train`, beside --effective-batch."""
        return {
            "interval": self.interval,
            "batch_factor": self.factor,
            "effective_batch_cap": self.cap,
            "lr_decay": self.lr_decay,
        }


def add_adabatch_flags(parser: argparse.ArgumentParser) -> None:
    """An effective batch that grows."""
    group = parser.add_argument_group("growing effective batch (docs/adabatch.md)")
    group.add_argument(
        "--batch-schedule", choices=BATCH_SCHEDULES, default="fixed",
        help="adabatch: the effective batch grows every so many epochs, in place of --effective-batch and --schedule",
    )  # fmt: skip
    group.add_argument(
        "--effective-batch-start", type=positive, metavar="N", help=f"of the first interval (default: {START})"
    )
    group.add_argument(
        "--batch-factor", type=_growing, metavar="F", help=f"by which it grows each time (default: {FACTOR:g})"
    )
    group.add_argument(
        "--interval", type=positive, metavar="EPOCHS", help=f"how often (default: a {INTERVALS}th of the epochs)"
    )
    group.add_argument("--effective-batch-cap", type=positive, metavar="N", help=f"where it ends (default: {CAP})")
    group.add_argument(
        "--lr-decay", type=_decay, metavar="F",
        help=f"of the rate of a fixed batch after each interval; of a growing one times what it grew by ({LR_DECAY:g})",
    )  # fmt: skip


def resolve_adabatch(args: argparse.Namespace, samples: int) -> AdaBatch | None:
    """The schedule that the flags ask for, None for a fixed effective batch. UsageError where they do not fit together."""
    given = [name for name in _FLAGS if getattr(args, name) is not None]
    if args.batch_schedule == "fixed":
        if given:
            flag = _spelled(given[0])
            raise UsageError(f"{flag} is of --batch-schedule adabatch. Give both, or leave {flag} out.")
        return None
    if args.schedule is not None:
        raise UsageError(
            f"--schedule {args.schedule} with --batch-schedule adabatch, which decides the learning rate. Leave one out."
        )
    if args.effective_batch is not None:
        raise UsageError(
            f"--effective-batch {args.effective_batch} with --batch-schedule adabatch. Use --effective-batch-start and "
            "--effective-batch-cap."
        )
    cap = args.effective_batch_cap or max(min(CAP, samples), min(args.effective_batch_start or 0, samples))
    start = args.effective_batch_start or min(START, cap)
    factor, decay = args.batch_factor or FACTOR, args.lr_decay or LR_DECAY
    if cap > samples or start > samples:
        flag, value = ("cap", cap) if args.effective_batch_cap else ("start", start)
        raise UsageError(
            f"--effective-batch-{flag} {value} is more than the {samples} training samples. Use {samples} or less."
        )
    if start > cap:
        raise UsageError(f"--effective-batch-start {start} is above --effective-batch-cap {cap}. Correct one.")
    if start < cap and math.floor(start * factor) <= start:
        raise UsageError(
            f"--effective-batch-start {start} times --batch-factor {factor:g} is {start} again, rounded down. Use a larger "
            "factor or start."
        )
    return AdaBatch(start, factor, _interval(args, samples, start), cap, decay)


def _interval(args: argparse.Namespace, samples: int, start: int) -> int:
    if args.interval:
        return int(args.interval)
    if args.steps:
        raise UsageError("--steps with --batch-schedule adabatch needs --interval. Give it, or --epochs.")
    epochs = args.epochs or recipe.default_epochs(samples, start)
    return max(1, round(epochs / INTERVALS))


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _growing(text: str) -> float:
    value = _number(text)
    if not 1 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 1 (and up to a million)")
    return value


def _decay(text: str) -> float:
    value = _number(text)
    if not 1e-9 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to 1")
    return value
