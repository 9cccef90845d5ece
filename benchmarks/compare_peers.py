"""Training throughput against other engines on this machine, side by side.

    python benchmarks/compare_peers.py --model resnet18 --batch-sizes 1,8,32 --peers torch,torch-tuned --threads 2 --json

Every point is a process of its own; engines take turns within a round, so that what the machine does meanwhile hits all
of them; a figure is the median over rounds of medians over clean windows. With --json, stdout is one object on one line:
`ratio_best_vs_best` (our best rate over the peer's best), `ratio_by_batch_size`, `rows`. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cross.errors import INTERRUPTED, MissingToolError, TasteError, UsageError  # noqa: E402  the checkout comes first
from host_control.board import OperatingPoint  # noqa: E402
from host_control.cli import explain  # noqa: E402
from host_control.console import Console, mib, rate  # noqa: E402
from host_control.flags import batch_sizes, input_shape, positive, seconds  # noqa: E402

OURS = "taste-edge"
PEERS = ("torch", "torch-tuned", "ort", "jax")
WORKER_LIMIT_S = 900.0
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35)}
"""glibc's malloc gives large blocks back after every step and takes page faults for them in the next one."""

Row = dict[str, Any]
Engine = Callable[[int], Row]
"""Measures one batch size once: a row with `samples_per_s`, or with `error`."""


@dataclass(frozen=True)
class Work:
    """What every engine does."""

    model: str
    shape: tuple[int, ...]
    classes: int
    threads: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = _parser().parse_args(argv)
        peers = _checked_peers(args.peers)
        shape = args.input_shape or ((3, 224, 224) if args.model == "resnet18-imagenet" else (3, 32, 32))
        work = Work(args.model, shape, args.classes, args.threads, args.seconds)
        with ExitStack() as stack:
            engines: dict[str, Engine] = {OURS: _ours(work, stack)} | {peer: _torch(work, peer) for peer in peers}
            rows = measure_all(engines, args.batch_sizes, args.rounds)
    except KeyboardInterrupt:
        print("error: interrupted. Nothing is saved.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  every failure becomes one line and a code
        known = explain(error)
        print(f"error: {' '.join(str(known).split())}", file=sys.stderr)
        return known.exit_code
    result = compare(rows, peers)
    result |= {"model": work.model, "input_shape": list(shape), "threads": work.threads, "rounds": args.rounds}
    if args.json:
        print(json.dumps(result))
    else:
        _print(result, peers)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a zoo name (default: resnet18)")
    parser.add_argument("--input-shape", type=input_shape, metavar="C,H,W")
    parser.add_argument("--classes", type=positive, default=10)
    parser.add_argument("--batch-sizes", type=batch_sizes, default=(1, 4, 8, 16, 32, 64, 128))
    parser.add_argument("--peers", default="torch", help=f"of {', '.join(PEERS)} (default: torch)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=seconds, default=2.0, help="shortest measurement of a point (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _checked_peers(text: str) -> tuple[str, ...]:
    """The peers asked for; UsageError for unknown ones, MissingToolError (22) for those that cannot run here."""
    peers = tuple(dict.fromkeys(text.split(",")))
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise UsageError(f"unknown peer {', '.join(map(repr, unknown))}. Known: {', '.join(PEERS)}.")
    packages = {"torch": "torch", "torch-tuned": "torch", "ort": "onnxruntime.training", "jax": "jax"}
    for peer in peers:
        package = packages[peer]
        if find_spec(package.partition(".")[0]) is None or not peer.startswith("torch"):
            raise MissingToolError(
                f"peer {peer} cannot be measured here: it needs the Python package {package}"
                + ("" if peer.startswith("torch") else " and a worker in benchmarks/peers")
                + ". Leave it out of --peers."
            )
    return peers


def _ours(work: Work, stack: ExitStack) -> Engine:
    """This project's own program on this machine, built for its CPU."""
    from cross.build import build
    from cross.load_model import load_model
    from host_control.boards import BenchSettings, DeployedBoard, open_board
    from host_control.preparation import choose_target

    board = stack.enter_context(open_board("local", settings=BenchSettings(seconds=work.seconds)))
    assert isinstance(board, DeployedBoard), "local is a machine"
    target = choose_target(None, "local", board.facts())
    shape = "x".join(map(str, work.shape))
    folder = ROOT / "build" / "benchmarks" / f"{Path(work.model).stem}-{shape}-{work.classes}-{target.name}"
    print(f"building {work.model} for {target.name}", file=sys.stderr, flush=True)
    build(load_model(work.model, input_shape=work.shape, classes=work.classes), target, folder)
    board.deploy(folder)

    def measure(batch_size: int) -> Row:
        try:
            counters = board.measure(OperatingPoint(batch_size, threads=work.threads))
        except TasteError as error:
            return {"error": str(error)}
        return {
            "samples_per_s": counters.samples_per_s,
            "spread": counters.spread,
            "tainted": counters.tainted,
            "peak_rss_bytes": counters.peak_rss_bytes,
        }

    return measure


def _torch(work: Work, peer: str) -> Engine:
    """PyTorch as it comes (`torch`), or with what its users are told to turn on (`torch-tuned`)."""
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / "torch_worker.py"), "--model", work.model]
    command += ["--input-shape", ",".join(map(str, work.shape)), "--classes", str(work.classes)]
    command += ["--threads", str(work.threads), "--seconds", str(work.seconds)]
    command += ["--tuned"] if peer == "torch-tuned" else []
    environment = os.environ | (KEEP_PAGES if peer == "torch-tuned" else {})

    def measure(batch_size: int) -> Row:
        run = subprocess.run(
            [*command, "--batch-size", str(batch_size)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WORKER_LIMIT_S,
        )
        if run.returncode != 0:
            said = run.stderr.strip().splitlines()
            return {"error": said[-1] if said else f"exit code {run.returncode}"}
        row: Row = json.loads(run.stdout.splitlines()[-1])
        return row

    return measure


def measure_all(engines: dict[str, Engine], sizes: Sequence[int], rounds: int) -> list[Row]:
    """Every engine at every size, `rounds` times, engines in turn; one row a point with the median of its rounds."""
    seen: dict[tuple[str, int], list[Row]] = {(name, size): [] for size in sizes for name in engines}
    for number in range(rounds):
        for size in sizes:
            # Whoever goes second finds a warmer machine: turns are swapped every round.
            for name in list(engines) if number % 2 == 0 else list(reversed(engines)):
                row = engines[name](size)
                seen[name, size].append(row)
                said = f"{rate(row['samples_per_s'])} samples/s" if "samples_per_s" in row else row["error"]
                print(f"round {number + 1}/{rounds}, batch size {size}, {name}: {said}", file=sys.stderr, flush=True)
    return [_median_row(name, size, rows) for (name, size), rows in seen.items()]


def _median_row(name: str, size: int, rows: list[Row]) -> Row:
    measured = [row for row in rows if "samples_per_s" in row]
    if not measured:
        return {"engine": name, "batch_size": size, "samples_per_s": None, "error": rows[-1]["error"]}
    clean = [row for row in measured if not row["tainted"]] or measured
    rates = sorted(row["samples_per_s"] for row in clean)
    row = dict(clean[-1]) | {"engine": name, "batch_size": size, "samples_per_s": statistics.median(rates)}
    return row | {"rounds": [one["samples_per_s"] for one in measured], "tainted": all(one["tainted"] for one in clean)}


def compare(rows: list[Row], peers: Sequence[str]) -> dict[str, Any]:
    """Our rate over each peer's: best against best, and size by size where both have one; null where one has none."""
    rates = {(row["engine"], row["batch_size"]): row["samples_per_s"] for row in rows if row["samples_per_s"]}
    best = {
        name: max((speed for (engine, _), speed in rates.items() if engine == name), default=0.0)
        for name in (OURS, *peers)
    }
    sizes = sorted({size for _, size in rates})
    by_size = {
        peer: {
            str(size): rates[OURS, size] / rates[peer, size]
            for size in sizes
            if (OURS, size) in rates and (peer, size) in rates
        }
        for peer in peers
    }
    ratios = {peer: best[OURS] / best[peer] if best[OURS] and best[peer] else None for peer in peers}
    return {"ratio_best_vs_best": ratios, "ratio_by_batch_size": by_size, "rows": rows}


def _print(result: dict[str, Any], peers: Sequence[str]) -> None:
    """A table for people."""
    ratios = result["ratio_by_batch_size"]
    columns = [("batch", "right"), ("engine", "left"), ("samples/s", "right"), ("peak", "right"), ("note", "left")]
    rows = []
    for row in result["rows"]:
        size, name = str(row["batch_size"]), row["engine"]
        if row["samples_per_s"] is None:
            rows.append([size, name, "-", "-", row["error"]])
            continue
        ratio = f"ours is {ratios[name][size]:.2f}x" if name in ratios and size in ratios[name] else ""
        note = ", ".join(part for part in (ratio, "disturbed" if row["tainted"] else "") if part)
        rows.append([size, name, rate(row["samples_per_s"]), mib(row["peak_rss_bytes"]), note])
    console = Console()
    console.table(columns, rows, title=f"{result['model']}, {result['threads']} threads, {result['rounds']} rounds")
    for peer in peers:
        ratio = result["ratio_best_vs_best"][peer]
        console.line(f"best against best, {peer}: {'not measured' if ratio is None else f'{ratio:.2f}x'}")


if __name__ == "__main__":
    sys.exit(main())
