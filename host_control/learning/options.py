"""The flags of `learn` that reach the board, and the values they have in one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cross.errors import DataError, FileError, UsageError
from host_control.flags import not_negative, positive, share
from host_control.learning.settings import Setting, compared
from host_control.training.options import AUGMENTATIONS, above_zero, not_below_zero

SCENARIOS = ("cil", "til", "domain")
POLICIES = ("reservoir", "class-balanced", "ring")
RATE_RULES = ("linear", "constant")
CHECKPOINT_EVERY_S = "60"


@dataclass(frozen=True)
class LearnOptions:
    """Everything that decides a stream beside model, data, batch size and seeds; every value is resolved.

    task_of: the task of each class, None where classes are shared out by the order seed. samples_per_class: 0 for all.
    """

    scenario: str
    tasks: int
    task_of: tuple[int, ...] | None
    buffer: int
    memory_policy: str
    replay_ratio: float
    lr: float
    lr_rule: str
    lr_cap: float
    passes: int
    samples_per_class: int
    loss_classes: str
    momentum: float
    grad_clip: float
    weight_decay: float
    augment: str
    threads: int | None
    cores: tuple[int, ...] | None
    memory: int | None

    def arguments(self, setting: Setting, seed: int, order_seed: int) -> list[str]:
        """Flags of `taste-train learn` for one run."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"batch_size": setting.batch_size, "seed": seed, "order_seed": order_seed}
        if not setting.replay:
            values["buffer"] = 0
        if not self.samples_per_class:
            values.pop("samples_per_class")
        words = []
        for name, value in values.items():
            if value is not None:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += ["--" + name.replace("_", "-"), text]
        return words


def add_learning_flags(parser: argparse.ArgumentParser) -> None:
    """The stream, the buffer, and how to learn."""
    stream = parser.add_argument_group("stream")
    stream.add_argument(
        "--scenario", choices=SCENARIOS, default="cil",
        help="cil: new classes, told apart among all; til: among their own task's; domain: same classes elsewhere (cil)",
    )  # fmt: skip
    stream.add_argument("--tasks", type=positive, default=5, help="tasks that come one after the other (default: 5)")
    stream.add_argument(
        "--task-file", type=Path, metavar="FILE", help="JSON list of tasks, each a list of class names or numbers"
    )
    stream.add_argument(
        "--order-seed", type=not_negative, default=0, help="which classes come when; run i uses this + i (default: 0)"
    )
    stream.add_argument("--samples-per-class", type=positive, metavar="N", help="the first N of each class (all)")
    stream.add_argument("--max-classes", type=positive, metavar="N", help="outputs of the model (the data's classes)")
    stream.add_argument("--seeds", type=positive, default=3, help="runs of each setting (default: 3)")
    replay = parser.add_argument_group("replay")
    replay.add_argument(
        "--buffer", type=not_negative, metavar="N", help="samples kept (default: 1000, or 20 a class if more)"
    )
    replay.add_argument(
        "--memory-policy", choices=POLICIES, default="reservoir", help="which stay (default: reservoir)"
    )
    replay.add_argument("--replay-ratio", type=share, default=0.5, metavar="F", help="share of a step's rows (0.5)")
    group = parser.add_argument_group("learning")
    group.add_argument(
        "--batch-size", type=_batch_size, default="auto", metavar="N|auto",
        help="rows of a step, replayed ones included; auto: the fastest that a study found (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--compare", type=compared, metavar="LIST",
        help="settings side by side: none (no replay, batch size 20), auto, max, sizes; such as none,20,auto,max,1024",
    )  # fmt: skip
    group.add_argument("--lr", type=above_zero, default=0.1, help="learning rate at batch size 20 (default: 0.1)")
    group.add_argument(
        "--lr-rule", choices=RATE_RULES, default="linear", help="linear: lr x batch size / 20 (default: linear)"
    )
    group.add_argument("--lr-cap", type=above_zero, default=0.4, help="highest learning rate (default: 0.4)")
    group.add_argument("--passes", type=positive, default=1, help="updates for each rows of the stream (default: 1)")
    group.add_argument(
        "--loss-classes", choices=("all", "seen"), default="all", help="of cil: classes in the loss (default: all)"
    )
    group.add_argument("--momentum", type=share, default=0.0, help="of sgd (default: 0)")
    group.add_argument(
        "--grad-clip", type=not_below_zero, default=1.0, metavar="NORM", help="longest gradient, 0 for any (default: 1)"
    )
    group.add_argument("--weight-decay", type=not_below_zero, default=0.0, help="default: 0")
    group.add_argument("--augment", choices=AUGMENTATIONS, default="none", help="of every row (default: none)")


def resolve_options(args: argparse.Namespace, classes: Sequence[str], domains: Sequence[str]) -> LearnOptions:
    """The run's options. UsageError (2) or DataError (23) where they do not fit the data's classes and domains."""
    task_of = read_task_file(args.task_file, classes) if args.task_file is not None else None
    tasks = max(task_of) + 1 if task_of is not None else args.tasks
    if args.scenario == "domain" and task_of is not None:
        raise UsageError("--task-file tells tasks by class, --scenario domain by domain. Leave one of them out.")
    if args.loss_classes == "seen" and args.scenario != "cil":
        raise UsageError(f"--loss-classes seen with --scenario {args.scenario}: it is of cil. Leave it out.")
    if args.scenario == "domain" and not domains:
        raise DataError("--scenario domain, but the data names no domains. Pack it with --domain, or a CSV's column.")
    shared, what = (len(domains), "domains") if args.scenario == "domain" else (len(classes), "classes")
    if tasks > shared:
        raise DataError(f"{tasks} tasks of {shared} {what}: task {shared} has none. Use --tasks {shared} or fewer.")
    outputs = args.max_classes or len(classes)
    if outputs < len(classes):
        raise UsageError(
            f"--max-classes {outputs}, but the data has {len(classes)} classes. Use {len(classes)} or more."
        )
    buffer = args.buffer if args.buffer is not None else max(1000, 20 * outputs)
    if 0 < buffer < outputs:
        raise UsageError(f"--buffer {buffer} for {outputs} classes. Use {outputs} or more, or 0 for no replay.")
    names = {field.name for field in fields(LearnOptions)}
    values = {name: value for name, value in vars(args).items() if name in names}
    values |= {"task_of": task_of, "tasks": tasks, "buffer": buffer}
    return LearnOptions(**values | {"samples_per_class": args.samples_per_class or 0})


def read_task_file(path: Path, classes: Sequence[str]) -> tuple[int, ...]:
    """The task of each class. DataError (23) for a task without classes, a class in no task, in two, or unknown."""
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}. Write a list of tasks, each a list of classes.") from error
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, list) for task in tasks):
        raise DataError(f"{path} is no list of lists. Write a list of tasks, each a list of classes.")
    found: dict[int, int] = {}
    for number, task in enumerate(tasks):
        if not task:
            raise DataError(f"task {number} of {path} has no classes. Give it some, or leave it out.")
        for name in task:
            index = name if isinstance(name, int) else list(classes).index(name) if name in classes else -1
            if not 0 <= index < len(classes):
                raise DataError(f"{path} names class {name!r}, which the data does not have. Correct it.")
            if index in found:
                raise DataError(f"{path} names class {name!r} twice. A class belongs to one task.")
            found[index] = number
    missing = [name for index, name in enumerate(classes) if index not in found]
    if missing:
        raise DataError(f"class {missing[0]!r} is in no task of {path}. Declare it ({len(missing)} are missing).")
    return tuple(found[index] for index in range(len(classes)))


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else positive(text)
