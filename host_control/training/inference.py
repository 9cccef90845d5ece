"""`taste-train eval` on a board: the forward program of a trained model over samples."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from cross.errors import INTERRUPTED, CompatibilityError
from host_control.boards import DeployedBoard
from host_control.boards.bench import check_exit, last_record
from host_control.console import Console
from host_control.preparation import Built, build_imported, choose_target, import_model, read_build, send
from host_control.training.record import Run

Array = np.ndarray[Any, np.dtype[Any]]

DEFAULT_BATCH_SIZE = 16


@dataclass(frozen=True)
class Evaluator:
    """A deployed build with trained weights, ready to run forward."""

    board: DeployedBoard
    weights: str
    batch_size: int
    threads: int | None = None

    def evaluate(self, samples: str, logits: str | None = None) -> dict[str, Any]:
        """The program's result over a samples file of the board; raises what its exit code stands for."""
        words = ["eval", "--samples", samples, "--weights", self.weights, "--batch-size", str(self.batch_size)]
        words += ["--threads", str(self.threads)] if self.threads else []
        words += ["--logits", logits] if logits else []
        lines: list[str] = []
        outcome = self.board.follow_program(words, lines.append)
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt("interrupted. Run the same command again.")
        check_exit(outcome, f"eval on {self.board.name}")
        result = last_record("\n".join(lines), "result")
        if result is None:
            raise CompatibilityError(
                f"eval on {self.board.name} printed no result: not this host's version. Deploy again."
            )
        return result

    def logits(self, x: Array) -> Array:
        """Outputs float32 [N, classes] for samples float32 [N, C, H, W]."""
        with tempfile.TemporaryDirectory(prefix="taste-") as temporary, scratch(self.board) as remote:
            local = Path(temporary)
            save_file({"x": np.ascontiguousarray(x, np.float32)}, local / "x.safetensors")
            self.board.connection.put(local / "x.safetensors", f"{remote}/x.safetensors")
            self.evaluate(f"{remote}/x.safetensors", f"{remote}/logits.safetensors")
            self.board.connection.get(f"{remote}/logits.safetensors", local / "logits.safetensors")
            return load_file(local / "logits.safetensors")["logits"]


@contextmanager
def scratch(board: DeployedBoard) -> Iterator[str]:
    """A folder on the board for files of this command, removed at its end."""
    path = board.run_folder(f"scratch-{np.random.default_rng().integers(2**63):x}")
    try:
        yield path
    finally:
        board.remove_folder(path)


def evaluator_of_run(args: argparse.Namespace, run: Run, board: DeployedBoard, console: Console) -> Evaluator:
    """The run's own build where it is for this board's CPU, else one for it; sent, with the trained weights."""
    facts = None if args.target is not None else board.facts()
    target = choose_target(args.target, args.board, facts)
    built = _own_build(run, target.name)
    if built is None:
        wanted = argparse.Namespace(**{**run.options["flags"], **run.model_arguments(), "trainable": "all"})
        model = import_model(wanted, console)
        built, _ = build_imported(model, wanted, target, run.folder / f"build-{target.name}", console)
    send(board, built, console)
    batch_size = args.batch_size or min(int(run.options["options"]["batch_size"]), DEFAULT_BATCH_SIZE)
    return Evaluator(board, board.send_file(run.weights)[0], batch_size, args.threads)


def _own_build(run: Run, target: str) -> Built | None:
    if not (run.folder / "build" / "manifest.json").is_file():
        return None
    built = read_build(run.folder / "build")
    return built if built.manifest.get("target") == target else None


def probabilities(logits: Array) -> Array:
    """Softmax of each row, in double precision."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))
