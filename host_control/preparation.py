"""From flags to a board that can measure: load the model, choose the target, build, send.

TVM and paramiko are imported inside the functions: verbs that need neither start at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import CorruptInputError, UsageError
from cross.zoo import ZOO
from host_control.board import BoardFacts, DeployResult
from host_control.console import Console, mib
from host_control.search.space import MemoryForm

if TYPE_CHECKING:
    import numpy as np

    from cross.build import BuildResult
    from cross.graph import Model
    from cross.target import Target
    from host_control.boards import DeployedBoard, RecordedBoard

    Array = np.ndarray[Any, np.dtype[Any]]

UNFOLD_SAMPLES = 32


@dataclass(frozen=True)
class Built:
    """A build folder and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def sha256(self) -> str:
        return str(self.manifest["files"]["taste-train"]["sha256"])

    @property
    def minimum_batch(self) -> int:
        return int(self.manifest.get("minimum_batch", 1))


def session_memory(info: Mapping[str, Any], program: str, *, fused: bool = False) -> MemoryForm:
    """Closed form of what a session of `program` takes, from `taste-train info`; UsageError if the build lacks it.

    `fused`: of training steps that neither accumulate nor clip, as those that are measured: they run train_fused where the
    build has it.
    """
    programs = info.get("programs", {})
    if fused and f"{program}_fused" in programs:
        program = f"{program}_fused"
    if program not in programs:
        raise UsageError(f"this build holds no program {program!r}, but: {', '.join(programs) or 'none'}.")
    return MemoryForm(int(programs[program]["fixed_bytes"]), int(programs[program]["per_sample_bytes"]))


@contextmanager
def opened_board(args: argparse.Namespace, folder: Path | None = None) -> Iterator[DeployedBoard | RecordedBoard]:
    """The board of --board with the flags that shape a measurement; closed at the end. `folder`: of the run that measures."""
    from host_control.boards import open_board
    from host_control.boards.bench import BenchSettings
    from host_control.training.record import board_record, name_on_board

    settings = BenchSettings(
        seconds=getattr(args, "seconds", 2.0),
        memory_bytes=getattr(args, "memory", None),
        seed=getattr(args, "seed", None),
        owner="" if folder is None else name_on_board(folder),
        record={} if folder is None else board_record(args, folder),
        power_every=getattr(args, "power_every", None),
    )
    with open_board(args.board, settings=settings, remote_dir=args.remote_dir, accept_new=args.accept_new) as board:
        yield board


def deployed(board: Any) -> DeployedBoard:
    """The board, where programs can be sent to it."""
    from host_control.boards import DeployedBoard

    if not isinstance(board, DeployedBoard):
        raise UsageError(f"{board.name} is a table, not a board: nothing can run there. Name another --board.")
    return board


def choose_target(name: str | None, board: str, facts: BoardFacts | None) -> Target:
    """--target, or the emulated board's own, or what the probe of the board suggests."""
    from cross.target import find_target

    if name is not None:
        return find_target(name)
    if (own := emulated_target(board)) is not None:
        return own
    if facts is None:
        raise UsageError("no board to probe. Name what to build for with --target.")
    from cross.probe import target_of

    return target_of(facts)


def emulated_target(board: str) -> Target | None:
    """The target whose CPU an emulated board has, up or not; None for another board."""
    from cross.target import find_target
    from host_control.emulation.catalogue import load_catalogue

    if board.startswith("emulated:"):
        return find_target(board.removeprefix("emulated:"))
    known = load_catalogue()
    return known[board].target if board in known else None


def build_model(args: argparse.Namespace, target: Target, out: Path, console: Console) -> tuple[Built, BuildResult]:
    """Import --model and build it for `target` into `out`."""
    return build_imported(import_model(args, console), args, target, out, console)


def import_model(
    args: argparse.Namespace,
    console: Console,
    *,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    samples: Array | None = None,
) -> Model:
    """--model with --weights. `input_shape` and `classes` come before the flags': those of the data to train on.

    `samples`: float32 [B, C, H, W] that set the statistics of --unfold-bn (default: random ones); where they are given,
    an ONNX file without batch norms gets them back unless --no-unfold-bn says otherwise.
    """
    from cross.load_model import load_model
    from cross.weights.load import load_weights
    from cross.weights.match import match_weights

    console.event("progress", stage="load_model", model=args.model)
    model = load_model(
        args.model,
        input_shape=input_shape or args.input_shape,
        classes=classes or args.classes,
        input_name=args.input,
        output_name=args.output,
        init=args.init,
        seed=args.seed,
    )
    wanted = args.unfold_bn
    if wanted is None:
        normless = not any(node.op == "batch_norm" for node in model.nodes)
        convolves = any(node.op == "conv2d" for node in model.nodes)
        wanted = samples is not None and args.model not in ZOO and normless and convolves
    if wanted:
        model = _with_batch_norms(model, args.seed, samples, console)
    if args.weights is not None:
        model = match_weights(model, load_weights(args.weights), source=str(args.weights), seed=args.seed)
    for note in model.metadata.get("notes", ()):
        console.line(note)
    return model


def build_imported(
    model: Model, args: argparse.Namespace, target: Target, out: Path, console: Console
) -> tuple[Built, BuildResult]:
    """Build a model that is imported already."""
    from cross.build import build

    with console.progress(f"building {model.name} for {target.name}") as progress:
        result = build(
            model,
            target,
            out,
            loss=args.loss,
            trainable=args.trainable,
            seed=args.seed,
            lean=args.lean,
            bn_policy=args.bn_policy,
            recomputation=args.recompute,
            progress=progress,
        )
    console.line(
        f"built {model.name} for {target.name} in {result.build_s:.1f} s: binary {mib(result.binary_bytes)}, "
        f"activations {mib(result.per_sample_bytes)} a sample"
    )
    built = read_build(out)
    if args.trainable != "all":
        console.line(_savings(built.manifest))
    return built, result


def _savings(manifest: Mapping[str, Any]) -> str:
    """What freezing saves, against training everything."""
    full, arena = manifest["full_training"], manifest["programs"]["train"]["per_sample_bytes"]
    return (
        f"trains {manifest['trained_parameters']:,} of {full['trained_parameters']:,} parameters "
        f"({manifest['trainable']}): {manifest['flops'] / full['flops']:.0%} of the arithmetic; a sample takes "
        f"{arena / 1024:,.0f} KiB instead of {full['per_sample_bytes'] / 1024:,.0f}, of them "
        f"{manifest['saved_bytes'] / 1024:,.1f} kept for backward instead of {full['saved_bytes'] / 1024:,.0f}"
    )


def _with_batch_norms(model: Model, seed: int, samples: Array | None, console: Console) -> Model:
    """Batch norms put back; the function is the same whatever samples set their statistics."""
    import numpy as np

    from cross.onnx_import.unfold import unfold_batch_norm

    whose = "samples of the data"
    if samples is None:
        whose = f"random samples (seed {seed})"
        samples = np.random.default_rng(seed).standard_normal((UNFOLD_SAMPLES, *model.input_shape)).astype(np.float32)
    console.line(f"batch norms are put back, scaled by one pass of {len(samples)} {whose}")
    return unfold_batch_norm(model, samples)


def read_build(folder: Path) -> Built:
    """The manifest of a build folder; UsageError where it is none, CorruptInputError where it cannot be read."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise UsageError(f"{folder} is not a build: it has no manifest.json. Run `taste-edge build` first.")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        built = Built(folder, manifest)
        built.sha256, built.minimum_batch  # noqa: B018  both must be there
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptInputError(f"{file} is not a manifest of ours: {error}. Build again.") from error
    return built


def built_for(args: argparse.Namespace, board: DeployedBoard, out: Path, console: Console) -> Built:
    """What --build names, or a build of --model for the board's CPU under `out`."""
    if args.build is not None:
        return read_build(args.build)
    if args.model is None:
        raise UsageError("nothing to run. Name a model with --model, or a build folder with --build.")
    facts = None if args.target is not None else board.facts()
    built, _ = build_model(args, choose_target(args.target, args.board, facts), out, console)
    return built


def send(board: DeployedBoard, built: Built, console: Console, *, python: bool = False) -> DeployResult:
    """Upload a build; says what had to be sent. `python`: with what Python on the board needs of it."""
    from host_control.deploy import PROGRAM_FILES, PYTHON_FILES

    sent = board.deploy(built.folder, files=PYTHON_FILES if python else PROGRAM_FILES)
    what = f"sent {mib(sent.sent_bytes)}" if sent.sent_bytes else "nothing to send, it is there already"
    console.event("deploy", remote_dir=sent.remote_dir, sha256=sent.sha256, sent_bytes=sent.sent_bytes)
    console.line(f"{board.name}: {what} ({sent.remote_dir})")
    return sent
