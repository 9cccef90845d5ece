"""batch size and CPU frequency under a power limit: measure, select, train, proxy"""

from __future__ import annotations

import argparse
from pathlib import Path

from host_control.console import Console
from host_control.flags import (
    add_board_flags,
    add_built_flags,
    add_data_flags,
    add_model_flags,
    add_output_flags,
    add_running_flags,
    batch_sizes,
    megahertz,
    positive,
    seconds,
)
from host_control.training.options import AUGMENTATIONS, OPTIMIZERS, above_zero, not_below_zero

_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_measure(actions.add_parser("measure", help="time and power over batch sizes and frequencies"))
    _add_select(actions.add_parser("select", help="the point with the least time to accuracy under a limit"))
    _add_train(actions.add_parser("train", help="train at that point, and move it when the limit or the board changes"))
    _add_proxy(actions.add_parser("proxy", help="how many examples each batch size needs, by training it on the host"))
    for action in actions.choices.values():
        add_output_flags(action)


def _add_measure(parser: argparse.ArgumentParser) -> None:
    add_built_flags(parser)
    add_board_flags(parser)
    add_running_flags(parser, seconds_default=_SECONDS)
    _add_batch_sizes(parser)
    parser.add_argument("--frequencies", type=_megahertz_list, metavar="MHZ,MHZ", help="(default: all of the board)")
    parser.add_argument(
        "--limit-watts",
        type=above_zero,
        metavar="W",
        help="visit only what shows the edge of this limit (pruned profiling)",
    )
    parser.add_argument("--subtract-idle", action="store_true", help="less the power of the idle board, measured first")
    add_power_flags(parser)


def add_power_flags(parser: argparse.ArgumentParser) -> None:
    """Where watts come from; also of `tune`."""
    parser.add_argument(
        "--power-source",
        default="board",
        metavar="SOURCE",
        help="board (its own sensor), csv:FILE or command:CMD (an external meter), model (an estimate) (default: board)",
    )
    parser.add_argument(
        "--power-every", type=above_zero, default=0.1, metavar="S", help="seconds between readings (default: 0.1)"
    )
    parser.add_argument(
        "--meter-offset",
        type=_offset,
        default=0.0,
        metavar="S|auto",
        help="how much the meter's clock shows more than this machine's; auto: found by the steps that a load makes (default: 0)",
    )


def _add_select(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit-watts", type=above_zero, required=True, metavar="W", help="power has to be below it")
    _add_choosing(parser)


def _add_choosing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, required=True, metavar="DIR", help="what `power measure` left")
    parser.add_argument(
        "--relation",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="what `power proxy` left; of several the first decides, and the others show how much that matters "
        "(default: all batch sizes need as many examples)",
    )
    parser.add_argument(
        "--safe-frequency",
        type=megahertz,
        metavar="MHZ",
        help="of the baselines (default: the highest at which the largest batch size is below the limit)",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    from host_control.verbs.train import add_arguments as add_train_arguments

    add_train_arguments(parser)
    limits = parser.add_mutually_exclusive_group(required=True)
    limits.add_argument("--limit-watts", type=above_zero, metavar="W", help="power has to be below it")
    limits.add_argument(
        "--limit-file", type=Path, metavar="FILE", help="holds the limit in watts, read again as training goes on"
    )
    _add_choosing(parser)
    parser.add_argument(
        "--drift-every", type=seconds, metavar="T", help="measure a few points anew this often (default: never)"
    )
    parser.add_argument(
        "--drift-seconds", type=above_zero, default=5.0, metavar="S", help="how long each of them (default: 5)"
    )


def _add_proxy(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_data_flags(parser, required=True)
    add_running_flags(parser, measuring=False)
    _add_batch_sizes(parser)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(default: adam)")
    parser.add_argument("--lr", type=above_zero, help="at batch size 128 (default: adam 5e-4, adamw 1e-3, sgd 0.1)")
    parser.add_argument("--epochs", type=above_zero, help="after which a run has not reached the target (default: 30)")
    parser.add_argument("--weight-decay", type=not_below_zero, help="(default: 5e-4; 0.01 with adamw)")
    parser.add_argument("--augment", choices=AUGMENTATIONS, default="none", help="of training images (default: none)")
    parser.add_argument(
        "--target-accuracy", type=above_zero, required=True, metavar="A", help="a fraction, such as 0.8"
    )
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each batch size (default: 3)")
    parser.set_defaults(board="local", remote_dir=None, accept_new=False)


def _add_batch_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes", type=batch_sizes, metavar="N,N", help="(default: 4,8,16,32,64,128, those that fit)"
    )


def _megahertz_list(text: str) -> tuple[int, ...]:
    return tuple(sorted({megahertz(word) for word in text.split(",")}))


def _offset(text: str) -> float | None:
    """Seconds; None for auto."""
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither seconds nor auto") from None


def run(args: argparse.Namespace) -> int:
    """One of the four actions, each a module of host_control.power."""
    from host_control.power import measure_run, proxy_run, select_run, train_run

    actions = {"measure": measure_run, "select": select_run, "train": train_run, "proxy": proxy_run}
    return int(actions[args.action].run(args, Console(args.json)))
