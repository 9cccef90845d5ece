"""Instructions of a training step, counted under QEMU: our binaries against each other and against PyTorch.

    python benchmarks/instructions.py --model resnet18 --targets rpi4 --batch-size 4 [--kernels] [--caches] [--json]
    python benchmarks/instructions.py --targets bpi-f3,visionfive2               # ratios to the last target
    python benchmarks/instructions.py --targets rpi4 --torch-root DIR            # PyTorch's aarch64 wheel, in a Debian root
    python benchmarks/instructions.py --targets bpi-f3 --scalar --kernels        # which operators V does not help

A count is that of a second step, one thread: ours is a run of two steps less one of one step; PyTorch, whose start under QEMU
takes longer than its steps, marks the step itself (benchmarks/peers/torch_steps.py). `per MAC/4` divides by a quarter of the
multiply-adds of the direct algorithm, what a core with vectors of four floats needs at least. With --caches, misses of a model
(benchmarks/count_instructions.c) with the target's cache sizes; three times slower. Nothing here is a time. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.counting import (  # noqa: E402  the checkout comes first
    Counts,
    build_plugin,
    by_function,
    check_emulator,
    count,
    read_symbols,
)
from benchmarks.exit_code import one_line_errors  # noqa: E402
from cross.compile_kernels import operator_of  # noqa: E402
from cross.errors import MissingToolError, UsageError  # noqa: E402
from cross.target import Target, find_target  # noqa: E402
from host_control.console import Console  # noqa: E402
from host_control.flags import input_shape, positive, seconds  # noqa: E402

Row = dict[str, Any]
OPERATORS = ("conv2d", "winograd", "dense", "matmul", "weight_transpose", "matrix_transpose")
"""Stems of kernels that multiply matrices, and of what prepares their weights."""

GETSID = 156
"""The system call that marks a step: its number where Linux has its generic table (aarch64, riscv64)."""


@dataclass(frozen=True)
class Work:
    """One step of one model, whoever does it."""

    model: str
    shape: tuple[int, ...]
    classes: int
    batch_size: int
    lean: bool
    caches: bool
    limit_s: float


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    shape = args.input_shape or ((3, 224, 224) if args.model == "resnet18-imagenet" else (3, 32, 32))
    work = Work(args.model, shape, args.classes, args.batch_size, args.lean, args.caches, args.limit)
    result = measure(work, _checked_targets(args), args.scalar, args.torch_root)
    if args.json:
        print(json.dumps(result))
    else:
        _print(result, args.kernels)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a zoo name or an ONNX file (default: resnet18)")
    parser.add_argument("--input-shape", type=input_shape, metavar="C,H,W")
    parser.add_argument("--classes", type=positive, default=10)
    parser.add_argument("--targets", default="rpi4", help="names of docs/boards.md (default: rpi4)")
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--lean", action="store_true", help="kernels that take the least memory, as of `build --lean`")
    parser.add_argument(
        "--scalar", action="store_true", help="also with every kernel compiled without vectors (targets with V)"
    )
    parser.add_argument(
        "--torch-root", type=Path, metavar="DIR", help="a Debian arm64 root with PyTorch in DIR/opt/site"
    )
    parser.add_argument("--caches", action="store_true", help="model the target's caches too")
    parser.add_argument("--kernels", action="store_true", help="a row a kernel")
    parser.add_argument("--limit", type=seconds, default=3600.0, help="longest run of one program (default: 1h)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _checked_targets(args: argparse.Namespace) -> list[Target]:
    targets = [find_target(name) for name in args.targets.split(",")]
    for target in targets:
        check_emulator(target)
    if args.scalar and not any(target.rvv for target in targets):
        raise UsageError(f"--scalar is for targets with V; {args.targets} has none. Leave it out.")
    if args.torch_root is not None:
        if targets[-1].arch != "aarch64":
            raise UsageError(
                f"--torch-root is compared with aarch64 targets; {targets[-1].name} is {targets[-1].arch}."
            )
        _torch_python(args.torch_root)
    return targets


def measure(work: Work, targets: Sequence[Target], scalar: bool, torch_root: Path | None) -> Row:
    """A row for every target (and PyTorch), and the ratio of each to the last."""
    plugin = build_plugin(ROOT / "build" / "benchmarks")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="taste-instructions-") as scratch:
        for target in targets:
            rows.append(_ours(work, target, plugin, Path(scratch)))
            if scalar and target.rvv:
                rows.append(
                    _ours(work, replace(target, scalar_kernels=("*",)), plugin, Path(scratch))
                    | {"engine": "all scalar"}
                )
        if torch_root is not None:
            rows.append(_torch(work, targets[-1], torch_root, plugin, Path(scratch)))
    last = rows[-1]["instructions_per_image"]
    for row in rows:
        row["ratio_to_last"] = row["instructions_per_image"] / last
    return {"model": work.model, "input_shape": list(work.shape), "batch_size": work.batch_size, "rows": rows}


def _ours(work: Work, target: Target, plugin: Path, scratch: Path) -> Row:
    from cross.build import build
    from cross.load_model import load_model

    model = load_model(work.model, input_shape=work.shape, classes=work.classes)
    name = f"{Path(work.model).stem}-{'x'.join(map(str, work.shape))}-{work.classes}-{target.name}"
    name += ("-lean" if work.lean else "") + ("-scalar" if "*" in target.scalar_kernels else "") + "-symbols"
    folder = ROOT / "build" / "benchmarks" / name
    _say(f"building {work.model} for {target.name}")
    build(model, target, folder, lean=work.lean, symbols=True)
    samples = scratch / "samples.safetensors"
    rng = np.random.default_rng(0)
    rows = 2 * work.batch_size
    x = rng.standard_normal((rows, *work.shape)).astype("float32")
    save_file({"x": x, "y": (np.arange(rows) % work.classes).astype("int32")}, samples)
    command = [str(folder / "taste-train"), "train", "--samples", str(samples), "--batch-size", str(work.batch_size)]
    command += ["--lr", "0.01", "--momentum", "0.9", "--threads", "1", "--steps"]
    step = _step_of(work, target, command, plugin, scratch)
    functions = by_function(step, read_symbols(folder / "taste-train"))
    return _row("taste-edge", target, work, step) | {"kernels": _kernels(work, target, functions)}


def _step_of(work: Work, target: Target, command: list[str], plugin: Path, scratch: Path) -> Counts:
    """Counts of one step: two steps less one."""
    runs = []
    for steps in (2, 1):
        _say(
            f"counting {steps} step{'s' if steps > 1 else ''} of {Path(command[0]).name} under {target.qemu[0]} as {target.name}"
        )
        words = [*command, str(steps)]
        out = scratch / "counts.txt"
        runs.append(count(target, words, plugin, out, caches=work.caches, limit_s=work.limit_s))
        _say(f"{runs[-1].instructions:,} instructions")
    return runs[0] - runs[1]


def _row(engine: str, target: Target, work: Work, step: Counts) -> Row:
    macs = _multiply_adds(work, target)
    row: Row = {"engine": engine, "target": target.name, "instructions_per_step": step.instructions}
    row |= {"instructions_per_image": step.instructions / work.batch_size, "multiply_adds_per_image": macs}
    row["instructions_per_mac4"] = step.instructions / work.batch_size / (macs / 4)
    if step.memory is not None:
        names = ("accesses_per_image", "l1_misses_per_image", "l2_misses_per_image")
        row |= {name: value / work.batch_size for name, value in zip(names, step.memory, strict=True)}
    return row


def _lowered(work: Work, target: Target) -> Any:
    from cross.assign_storage import assign_storage
    from cross.choose_winograd import choose_winograd
    from cross.load_model import load_model
    from cross.lower import lower
    from cross.training_graph import build_training_graph

    model = load_model(work.model, input_shape=work.shape, classes=work.classes)
    stored = assign_storage(build_training_graph(model, "cross_entropy"), target)
    kernels = lower(stored, target, choose_winograd(stored, target) if work.lean else None)
    return next(program for program in kernels.programs if program.stored.graph.name == "train")


def _multiply_adds(work: Work, target: Target) -> float:
    """Of the direct algorithm, an image: convolutions and matrix products, forward and backward."""
    calls = [call for call in _lowered(work, target).calls if operator_of(call.kernel).startswith(OPERATORS)]
    return float(sum(call.per_sample_flops + call.fixed_flops / work.batch_size for call in calls) / 2)


def _kernels(work: Work, target: Target, functions: dict[str, int]) -> list[Row]:
    """A row a kernel of the step, and one for all the C of the runtime."""
    calls: dict[str, list[Any]] = {}
    for call in _lowered(work, target).calls:
        calls.setdefault(call.kernel, []).append(call)
    rows, rest = [], 0
    for symbol, instructions in functions.items():
        if symbol not in calls:
            rest += instructions
            continue
        flops = sum(call.fixed_flops + work.batch_size * call.per_sample_flops for call in calls[symbol])
        row = {
            "kernel": symbol,
            "operator": operator_of(symbol),
            "calls": len(calls[symbol]),
            "instructions": instructions,
        }
        rows.append(row | {"flops": flops, "first": calls[symbol][0].name})
    return [
        *rows,
        {"kernel": "", "operator": "runtime and optimizer (C)", "calls": 1, "instructions": rest, "flops": 0},
    ]


def _torch_python(root: Path) -> Path:
    """The interpreter in a Debian root; MissingToolError (22) says what the root lacks."""
    found = sorted((root / "usr" / "bin").glob("python3.[0-9]*"))
    if not found or not (root / "opt" / "site" / "torch").is_dir():
        missing = "no usr/bin/python3" if not found else "no opt/site/torch"
        raise MissingToolError(
            f"{root} is no arm64 root with PyTorch: {missing}. docs/performance.md says how to make one."
        )
    return found[0]


def _torch(work: Work, target: Target, root: Path, plugin: Path, scratch: Path) -> Row:
    """PyTorch's wheel for the same step, in that root's own Python, the second step marked by two calls of getsid."""
    root = root.resolve()
    command = [str(_torch_python(root)), str(ROOT / "benchmarks" / "peers" / "torch_steps.py"), "--model", work.model]
    command += ["--input-shape", ",".join(map(str, work.shape)), "--classes", str(work.classes)]
    command += ["--batch-size", str(work.batch_size), "--steps", "2"]
    path = f"{root / 'opt' / 'site'}:{root / 'usr' / 'lib' / 'python3' / 'dist-packages'}:{ROOT}"
    environment = {"PYTHONPATH": path, "PYTHONHOME": str(root / "usr"), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    flags = ("-L", str(root))
    options = {"caches": work.caches, "mark": GETSID, "limit_s": work.limit_s}
    _say(f"counting the second step of PyTorch under {target.qemu[0]} as {target.name}")
    out = scratch / "counts.txt"
    step = count(target, command, plugin, out, **options, environment=environment, emulator_flags=flags)
    _say(f"{step.instructions:,} instructions")
    return _row("torch", target, work, step)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(result: Row, kernels: bool) -> None:
    console = Console()
    columns = [("engine", "left"), ("target", "left"), ("instructions an image", "right"), ("per MAC/4", "right")]
    columns += [("L1 misses", "right"), ("L2 misses", "right"), ("ratio to the last", "right")]
    cells = []
    for row in result["rows"]:
        misses = [
            f"{row[key] / 1e6:.2f} M" if key in row else "-" for key in ("l1_misses_per_image", "l2_misses_per_image")
        ]
        counted = [f"{row['instructions_per_image'] / 1e6:.1f} M", f"{row['instructions_per_mac4']:.2f}"]
        cells.append([row["engine"], row["target"], *counted, *misses, f"{row['ratio_to_last']:.2f}"])
    console.table(
        columns, cells, title=f"a training step of {result['model']}, batch size {result['batch_size']}, one thread"
    )
    for row in result["rows"] if kernels else ():
        if "kernels" in row:
            _print_kernels(console, row, result["batch_size"])


def _print_kernels(console: Console, row: Row, batch_size: int) -> None:
    """A row an operator."""
    columns = [("operator", "left"), ("calls", "right"), ("M instructions an image", "right"), ("share", "right")]
    columns += [("per MAC/4", "right")]
    cells = []
    for one in by_operator(row["kernels"]):
        share = f"{one['instructions'] / row['instructions_per_step']:.1%}"
        multiplies = one["flops"] and one["operator"].startswith(OPERATORS)
        each = f"{one['instructions'] / (one['flops'] / 8):.2f}" if multiplies else "-"
        millions = f"{one['instructions'] / batch_size / 1e6:.2f}"
        cells.append([one["operator"], str(one["calls"]), millions, share, each])
    console.table(columns, cells, title=f"{row['engine']}, {row['target']}")


def by_operator(kernels: Sequence[Row]) -> list[Row]:
    """Rows of kernels summed by operator, most instructions first."""
    sums: dict[str, Row] = {}
    for one in kernels:
        total = sums.setdefault(
            one["operator"], {"operator": one["operator"], "calls": 0, "instructions": 0, "flops": 0}
        )
        for key in ("calls", "instructions", "flops"):
            total[key] += one[key]
    return sorted(sums.values(), key=lambda total: -total["instructions"])


if __name__ == "__main__":
    sys.exit(main())
