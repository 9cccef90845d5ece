"""`power proxy`: trains the host's own build from the same weights at every batch size until a target accuracy."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import INTERRUPTED, NonFiniteLossError, UsageError
from host_control.boards.bench import check_exit
from host_control.boards.deployed import DeployedBoard
from host_control.boards.long_run import event_of
from host_control.console import Console
from host_control.power.relation import RELATION, ProxyRuns, epochs_to, read_runs, scaled_rate, write_relation
from host_control.preparation import build_imported, choose_target, deployed, opened_board, send
from host_control.run_folder import RunFolder, default_folder
from host_control.training.data import packed_data
from host_control.training.model import model_for
from host_control.training.options import TrainOptions, add_training_flags, resolve_options

if TYPE_CHECKING:
    from cross.graph import Model
    from host_control.data import PackedDataSet

RATES = {"adam": 5e-4, "adamw": 1e-3, "sgd": 0.1}
"""At batch size 128: the paper's for Adam and for AdamW."""
MOST_EPOCHS = 30.0
DEFAULT_BATCHES = (4, 8, 16, 32, 64, 128)


class _Reached(Exception):
    """The run is as accurate as it has to be: the rest of it is not wanted."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Every batch size with every seed; interrupted, the same command with --out goes on."""
    if args.target_accuracy > 1:
        raise UsageError(f"--target-accuracy {args.target_accuracy:g} is more than 1: give a fraction, such as 0.8.")
    out: Path = args.out or default_folder(f"{args.model}-proxy", "host")
    with RunFolder(out) as folder, opened_board(args) as opened:
        data = packed_data(args, console)
        if data.test is None:
            raise UsageError(f"{data.source} has nothing to test on. Give --val-split.")
        model = model_for(args, data, console)
        board = deployed(opened)
        target = choose_target(args.target, args.board, None if args.target else board.facts())
        built, _ = build_imported(model, args, target, out / "build", console)
        send(board, built, console)
        runs = _Proxy(args, console, board, data, model, built.folder / "weights.safetensors", out).all()
        fields = {name: getattr(runs, name) for name in ("model", "data", "target_accuracy", "epochs")}
        fields |= {"relation": runs.relation(), "spread": runs.spread(), "out": str(out)}
        folder.write_json("result.json", {"verb": "power", "action": "proxy", **fields})
    _say(console, runs)
    if not runs.relation():
        raise UsageError(
            f"no batch size reached {args.target_accuracy:.1%} within {runs.most_epochs:g} epochs with every seed; the runs are in "
            f"{out}. Lower --target-accuracy or raise --epochs, with another --out."
        )
    console.line(f"{out}: relation.json, result.json; next: power select --relation {out} --table ...")
    console.result("power", {"action": "proxy", **fields})
    return 0


def _say(console: Console, runs: ProxyRuns) -> None:
    relation, spread = runs.relation(), runs.spread()
    rows = [
        [
            str(b),
            ", ".join("not reached" if n is None else f"{n:.2f}" for n in epochs),
            f"{relation[b]:.3f}" if b in relation else "-",
            f"{spread[b]:.3f}" if b in relation else "-",
        ]
        for b, epochs in sorted(runs.epochs.items())
    ]
    columns = [
        ("batch size", "right"),
        (f"epochs to {runs.target_accuracy:.1%}", "left"),
        ("r", "right"),
        ("spread", "right"),
    ]
    console.table(columns, rows, title=f"{runs.model} on {runs.data}, {runs.optimizer}")
    if any(n is not None and n < 1 for epochs in runs.epochs.values() for n in epochs):
        console.line("a target that is reached within the first epoch tells little: choose a higher one")
    if len(relation) < len(runs.epochs):
        console.line("a batch size that did not reach the target with every seed has no r and is not a candidate")


@dataclass(frozen=True)
class _Proxy:
    args: argparse.Namespace
    console: Console
    board: DeployedBoard
    data: PackedDataSet
    model: Model
    weights: Path
    out: Path

    def all(self) -> ProxyRuns:
        args = self.args
        runs = self._begun()
        samples = self.data.train.samples
        sizes = args.batch_sizes or [b for b in DEFAULT_BATCHES if b <= samples]
        if not sizes or max(sizes) > samples:
            raise UsageError(
                f"{self.data.source} has {samples} samples to train on. Give --batch-sizes of at most {samples}."
            )
        for batch_size in sizes:
            done = list(runs.epochs.get(batch_size, ()))
            for seed in range(len(done), args.seeds):
                done.append(self._one(batch_size, args.seed + seed))
                runs = replace(runs, epochs={**runs.epochs, batch_size: tuple(done)})
                write_relation(self.out, runs)
        return runs

    def _begun(self) -> ProxyRuns:
        args = self.args
        wanted = ProxyRuns(
            model=self.model.name,
            data=self.data.source,
            target_accuracy=args.target_accuracy,
            optimizer=args.optimizer,
            lr=args.lr or RATES[args.optimizer],
            most_epochs=args.epochs or MOST_EPOCHS,
        )
        if not (self.out / RELATION).exists():
            return wanted
        stored = read_runs(self.out)
        for name, value in wanted.identity().items():
            if stored.identity()[name] != value:
                raise UsageError(
                    f"{self.out} holds runs with {name.replace('_', '-')} {stored.identity()[name]}, not {value}. "
                    "Choose another --out, or the same flags."
                )
        return stored

    def options(self, batch_size: int, seed: int) -> TrainOptions:
        """A constant rate, scaled with the square root; micro-batch and effective batch are one."""
        args = self.args
        others = argparse.ArgumentParser()
        add_training_flags(others)
        own: dict[str, Any] = {
            "batch_size": batch_size,
            "effective_batch": batch_size,
            "lr": scaled_rate(args.lr or RATES[args.optimizer], batch_size),
            "epochs": args.epochs or MOST_EPOCHS,
            "schedule": "constant",
            "warmup": 0.0,
            "eval_every": 1,
            "seed": seed,
        }
        return resolve_options(
            argparse.Namespace(**{**vars(others.parse_args([])), **vars(args), **own}),
            self.model,
            self.data.train.samples,
            batch_size,
        )

    def _one(self, batch_size: int, seed: int) -> float | None:
        """Epochs to the target, or None where the run ended before."""
        target, curve = self.args.target_accuracy, list[tuple[float, float]]()

        def on_line(line: str) -> None:
            event = event_of(line)
            if event is None or event["event"] not in ("eval", "result"):
                return
            last = event["event"] == "result"
            epoch, accuracy = (event.get(n) for n in (("epochs", "test_accuracy") if last else ("epoch", "accuracy")))
            if accuracy is not None and epoch is not None:
                curve.append((float(epoch), float(accuracy)))
                if accuracy >= target:
                    raise _Reached

        try:
            outcome = self.board.follow_program(list(self._words(batch_size, seed)), on_line)
        except _Reached:
            pass
        else:
            if outcome.exit_code == INTERRUPTED:
                raise KeyboardInterrupt(
                    f"interrupted; finished runs are kept. Go on with the same command and --out {self.out}."
                )
            # One that diverges does not reach the target, which is an answer.
            with contextlib.suppress(NonFiniteLossError):
                check_exit(outcome, f"the proxy run at batch size {batch_size}")
        reached = epochs_to(curve, target)
        best = max((accuracy for _, accuracy in curve), default=0.0)
        self.console.event("proxy", batch_size=batch_size, seed=seed, epochs=reached, best_accuracy=best)
        what = f"{reached:.2f} epochs" if reached is not None else f"not reached, at best {best:.1%}"
        self.console.line(f"batch size {batch_size}, seed {seed}: {what}")
        return reached

    def _words(self, batch_size: int, seed: int) -> Iterable[str]:
        assert self.data.test is not None, "run() refuses data without a test split"
        yield from ("train", "--samples", self.board.send_file(self.data.train.path)[0])
        yield from ("--test", self.board.send_file(self.data.test.path)[0])
        yield from ("--weights", self.board.send_file(self.weights)[0], *self.options(batch_size, seed).arguments())
