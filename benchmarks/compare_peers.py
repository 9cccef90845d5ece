"""Training throughput against other engines on this machine, side by side.

    python benchmarks/compare_peers.py --model resnet18 --batch-sizes 1,8,32 --peers torch,torch-tuned --threads 2 --json
    python benchmarks/compare_peers.py --merge b1.json b8.json --figure peers.png

Every point is a process of its own; engines take turns within a round, so that what the machine does meanwhile hits all
of them; a figure is the median over rounds of medians over clean windows. With --json, stdout is one object on one line:
`ratio_best_vs_best` (our best rate over the peer's best), `ratio_by_batch_size`, `rows`. Progress goes to stderr.

A peer that is not installed is said at once; the others are measured, its ratio is null, and the exit code is 22.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.exit_code import one_line_errors  # noqa: E402  the checkout comes first
from benchmarks.peers.engines import OURS, PACKAGES, Engine, Row, Work, missing, our_engine, peer_engine  # noqa: E402
from benchmarks.peers.figure import plot  # noqa: E402
from cross.errors import CorruptInputError, FileError, MissingToolError, UsageError  # noqa: E402
from host_control.console import Console, mib, rate  # noqa: E402
from host_control.flags import batch_sizes, input_shape, positive, seconds  # noqa: E402


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    result = merge([_read(path) for path in args.merge]) if args.merge else _measured(args)
    if args.figure is not None:
        plot(args.figure, result)
    if args.json:
        print(json.dumps(result))
    else:
        _print(result, list(result["ratio_best_vs_best"]))
    return MissingToolError.exit_code if result["missing"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a zoo name (default: resnet18)")
    parser.add_argument("--input-shape", type=input_shape, metavar="C,H,W")
    parser.add_argument("--classes", type=positive, default=10)
    parser.add_argument("--batch-sizes", type=batch_sizes, default=(1, 4, 8, 16, 32, 64, 128))
    parser.add_argument("--peers", default="torch", help=f"of {', '.join(PACKAGES)} (default: torch)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=seconds, default=2.0, help="shortest measurement of a point (default: 2)")
    parser.add_argument("--lean", action="store_true", help="ours as `build --lean` makes it")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: put results of --json together"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw throughput over batch size")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _checked_peers(text: str) -> dict[str, str | None]:
    """The peers asked for, and why those that cannot be measured here cannot; UsageError for unknown ones,
    MissingToolError (22) where none is left."""
    peers = list(dict.fromkeys(text.split(",")))
    if unknown := [peer for peer in peers if peer not in PACKAGES]:
        raise UsageError(f"unknown peer {', '.join(map(repr, unknown))}. Known: {', '.join(PACKAGES)}.")
    found = {peer: missing(peer) for peer in peers}
    lines = [f"peer {peer} cannot be measured here: {reason}" for peer, reason in found.items() if reason]
    if len(lines) == len(peers):
        raise MissingToolError(" ".join(lines))
    for line in lines:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return found


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    peers = _checked_peers(args.peers)
    shape = args.input_shape or ((3, 224, 224) if args.model == "resnet18-imagenet" else (3, 32, 32))
    work = Work(args.model, shape, args.classes, args.threads, args.seconds, args.lean)
    ours, parameters = our_engine(work)
    engines = {OURS: ours}
    engines |= {peer: peer_engine(peer, work, parameters) for peer, reason in peers.items() if reason is None}
    rows = measure_all(engines, args.batch_sizes, args.rounds)
    result = compare(rows, list(peers))
    result |= {"model": work.model, "input_shape": list(shape), "threads": work.threads, "lean": work.lean}
    return result | {"rounds": args.rounds, "missing": {peer: reason for peer, reason in peers.items() if reason}}


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


def _read(path: Path) -> dict[str, Any]:
    """A result of --json; FileError (12) or CorruptInputError (14) say which file is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}. Pass what --json printed.") from error
    try:
        result: dict[str, Any] = json.loads(text)
        if {"rows", "model", "input_shape", "threads", "lean"} <= set(result):
            return result
    except (ValueError, TypeError):
        pass
    raise CorruptInputError(f"{path} is no result of compare_peers.py --json. Measure it again.")


def merge(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several of the same work: the median over the runs of a point."""
    facts = ("model", "input_shape", "threads", "lean")
    works = [[result[key] for key in facts] for result in results]
    if works.count(works[0]) != len(works):
        raise UsageError(
            "the results are of different work (model, shape, threads or --lean). Merge what belongs together."
        )
    seen: dict[tuple[str, int], list[Row]] = {}
    for row in (row for result in results for row in result["rows"]):
        seen.setdefault((row["engine"], row["batch_size"]), []).append(row)
    rows = []
    for name, size in sorted(seen, key=lambda point: (point[1], point[0] != OURS)):
        # A disturbed run counts only where there is no other, as a disturbed round does.
        parts = seen[name, size]
        measured = [part for part in parts if part["samples_per_s"] is not None]
        clean = [part for part in measured if not part["tainted"]] or measured
        speed = statistics.median(part["samples_per_s"] for part in clean) if clean else None
        rounds = [one for part in measured for one in part["rounds"]]
        rows.append(clean[-1] | {"samples_per_s": speed, "rounds": rounds} if clean else parts[-1])
    peers = dict.fromkeys(peer for result in results for peer in result["ratio_best_vs_best"])
    absent = {peer: reason for result in results for peer, reason in result["missing"].items()}
    absent = {peer: reason for peer, reason in absent.items() if not any(row["engine"] == peer for row in rows)}
    most = max(len(row.get("rounds", ())) for row in rows)
    return compare(rows, list(peers)) | dict(zip(facts, works[0], strict=True)) | {"rounds": most, "missing": absent}


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
