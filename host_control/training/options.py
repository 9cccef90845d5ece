"""The flags of `train` that reach the board, and the values they have in one run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cross.errors import UsageError
from cross.graph import Model
from host_control.flags import not_negative, positive, seconds, share
from host_control.training import recipe
from host_control.training.adabatch import AdaBatch, add_adabatch_flags, resolve_adabatch

SCHEDULES = ("constant", "step", "cosine", "linear")
OPTIMIZERS = ("sgd", "adam", "adamw")
AUGMENTATIONS = ("none", "flip", "crop-flip", "crop-flip-cutout")
CHECKPOINT_EVERY = "60"
MOST_EPOCHS = 100_000


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides a run beside model, data and binary; every value is resolved.

    `epochs` may be a fraction, `steps` (0: epochs count) are optimizer steps; `warmup` is a share of all steps;
    `eval_every` counts epochs (0: only at the end); `grad_clip` 0 means none. `adabatch`: how the effective batch grows from
    `effective_batch`, and decides the learning rate in place of `schedule`; None where it stays.
    `frequency` is in kHz (None: unchanged).
    """

    epochs: float
    steps: int
    batch_size: int
    effective_batch: int
    adabatch: AdaBatch | None
    lr: float
    schedule: str
    warmup: float
    step_every: float
    step_gamma: float
    optimizer: str
    momentum: float
    nesterov: bool
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    no_decay_norm: bool
    label_smoothing: float
    grad_clip: float
    eval_every: int
    augment: str
    bn_time_constant: bool
    checkpoint_every: str
    seed: int
    threads: int | None
    cores: tuple[int, ...] | None
    memory: int | None
    frequency: int | None = None

    def arguments(self) -> list[str]:
        """Flags of `taste-train train`."""
        values: dict[str, Any] = asdict(self)
        values.pop("epochs" if self.steps else "steps")
        values.pop("adabatch")
        if self.adabatch is not None:
            values.pop("schedule")
            values |= self.adabatch.arguments()
        if self.schedule != "step":
            values.pop("step_every"), values.pop("step_gamma")
        if self.optimizer == "sgd":
            for name in ("beta1", "beta2", "eps"):
                values.pop(name)
        else:
            values.pop("momentum")
        if not self.grad_clip:
            values.pop("grad_clip")
        return _words(values)

    def planning_arguments(self) -> list[str]:
        """Flags of `taste-train info` that decide which program trains and what it takes."""
        names = ("batch_size", "effective_batch", "optimizer", "threads", "cores", "grad_clip")
        values = {name: getattr(self, name) for name in names}
        return _words(values | ({} if self.adabatch is None else self.adabatch.arguments()))

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "cores": list(self.cores) if self.cores else None,
            "adabatch": asdict(self.adabatch) if self.adabatch else None,
        }


def _words(values: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else _number(value)
            words += [flag, text]
    return words


def _number(value: object) -> str:
    """Floats with as many digits as they have: what is printed is what runs."""
    return repr(value) if isinstance(value, float) else str(value)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """How to train."""
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_epochs, help="passes over the data (default: 10, small sets up to 40)")
    length.add_argument("--steps", type=positive, help="optimizer steps, in place of --epochs")
    group.add_argument(
        "--batch-size", type=_batch_size, default="auto", metavar="N|auto",
        help="samples a step; auto: the fastest that a study found (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--effective-batch", type=positive, metavar="N", help="samples of one optimizer step (default: 128)"
    )
    group.add_argument(
        "--lr", type=above_zero, help="highest learning rate (default: by model, printed before the run)"
    )
    group.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate (default: cosine)")
    group.add_argument("--warmup", type=share, help="share of all steps over which lr rises (0.1; adabatch: 0)")
    group.add_argument("--step-every", type=above_zero, default=30.0, metavar="EPOCHS", help="of --schedule step (30)")
    group.add_argument("--step-gamma", type=above_zero, default=0.1, metavar="F", help="of --schedule step (0.1)")
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="default: sgd, adamw for models with layer norm")
    group.add_argument("--momentum", type=share, default=recipe.MOMENTUM, help="of sgd (default: 0.9)")
    group.add_argument("--nesterov", action="store_true", help="Nesterov's momentum")
    group.add_argument("--beta1", type=share, default=0.9, help="of adam and adamw (default: 0.9)")
    group.add_argument("--beta2", type=share, default=0.999, help="of adam and adamw (default: 0.999)")
    group.add_argument("--eps", type=above_zero, default=1e-8, help="of adam and adamw (default: 1e-8)")
    group.add_argument("--weight-decay", type=not_below_zero, help="default: 5e-4; 0.01 with adamw")
    group.add_argument("--no-decay-norm", action="store_true", help="no weight decay for norms and biases")
    group.add_argument("--label-smoothing", type=share, default=0.0, metavar="S", help="of cross-entropy (default: 0)")
    group.add_argument("--grad-clip", type=not_below_zero, metavar="NORM", help="longest gradient (0: any length)")
    group.add_argument(
        "--eval-every", type=not_negative, default=1, metavar="EPOCHS", help="test this often (default: 1)"
    )
    group.add_argument("--augment", choices=AUGMENTATIONS, default="none", help="of training images (default: none)")
    group.add_argument("--bn-time-constant", action="store_true", help="running statistics as with one effective batch")
    group.add_argument(
        "--checkpoint-every",
        type=_period,
        default=CHECKPOINT_EVERY,
        metavar="T",
        help="a time such as 60s or 5m, or a number of steps such as 100steps (default: 60s)",
    )
    add_adabatch_flags(parser)


def resolve_options(args: argparse.Namespace, model: Model, samples: int, batch_size: int) -> TrainOptions:
    """The run's options: flags where given, else the defaults of recipe.py. UsageError where they do not fit together."""
    adabatch = resolve_adabatch(args, samples)
    largest = largest_effective_batch(args, samples, batch_size)
    effective = adabatch.start if adabatch else largest
    chosen = default_recipe_of(args, model, effective)
    optimizer = args.optimizer or chosen.optimizer
    adaptive = optimizer != "sgd" and chosen.optimizer == "sgd"
    if args.nesterov and (optimizer != "sgd" or not args.momentum):
        raise UsageError(
            "--nesterov is a form of sgd's momentum. Use --optimizer sgd with --momentum, or leave it out."
        )
    return TrainOptions(
        epochs=float(args.epochs or recipe.default_epochs(samples, effective)),
        steps=args.steps or 0,
        batch_size=min(batch_size, largest),
        effective_batch=effective,
        adabatch=adabatch,
        lr=args.lr or (1e-3 if adaptive else chosen.lr),
        schedule="adabatch" if adabatch else args.schedule or "cosine",
        warmup=(0.0 if adabatch else recipe.WARMUP) if args.warmup is None else args.warmup,
        step_every=args.step_every,
        step_gamma=args.step_gamma,
        optimizer=optimizer,
        momentum=args.momentum,
        nesterov=args.nesterov,
        beta1=args.beta1,
        beta2=args.beta2,
        eps=args.eps,
        weight_decay=chosen.weight_decay if args.weight_decay is None else args.weight_decay,
        no_decay_norm=args.no_decay_norm,
        label_smoothing=args.label_smoothing,
        grad_clip=chosen.grad_clip if args.grad_clip is None else args.grad_clip,
        eval_every=args.eval_every,
        augment=args.augment,
        bn_time_constant=args.bn_time_constant,
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
        threads=args.threads,
        cores=args.cores,
        memory=args.memory,
        frequency=getattr(args, "frequency", None),
    )


def largest_effective_batch(args: argparse.Namespace, samples: int, batch_size: int | None = None) -> int:
    """Samples of one optimizer step: the flag's, or the default, which is never below a batch size that was asked for; of
    one that grows, where that ends."""
    adabatch = resolve_adabatch(args, samples)
    if adabatch is not None:
        if isinstance(args.batch_size, int) and adabatch.cap < args.batch_size:
            raise UsageError(
                f"--batch-size {args.batch_size} is above --effective-batch-cap {adabatch.cap}. Correct one."
            )
        return adabatch.cap
    if args.effective_batch is None:
        asked = args.batch_size if isinstance(args.batch_size, int) else 0
        return max(recipe.default_effective_batch(samples), min(asked, samples))
    effective = int(args.effective_batch)
    if effective > samples:
        raise UsageError(
            f"--effective-batch {effective} is more than the {samples} training samples. Use {samples} or less."
        )
    if isinstance(args.batch_size, int) and batch_size is not None and effective < batch_size:
        raise UsageError(f"--effective-batch {effective} is smaller than --batch-size {batch_size}. Correct one.")
    return effective


def default_recipe_of(args: argparse.Namespace, model: Model, effective: int) -> recipe.Recipe:
    """The defaults for this model and where its weights come from."""
    from cross.zoo import ZOO

    from_file = args.weights is not None or (args.model not in ZOO and args.init == "file")
    trained = from_file and not model.metadata.get("untrained", False)
    return recipe.default_recipe(model, trained=trained, effective_batch=effective)


def _period(text: str) -> str:
    """As the board takes it: seconds, or Nsteps."""
    count = text.removesuffix("steps")
    return f"{positive(count)}steps" if count != text else f"{seconds(text):g}"


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    if abs(value) >= 1e30:
        raise argparse.ArgumentTypeError(f"{text} is too large, 1e30 or more")
    return value


def above_zero(text: str) -> float:
    value = _real(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def _epochs(text: str) -> float:
    value = above_zero(text)
    if value > MOST_EPOCHS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_EPOCHS} epochs")
    return value


def not_below_zero(text: str) -> float:
    value = _real(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value
