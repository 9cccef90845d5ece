"""What every peer's worker shares: its flags, and the row that it prints. Nothing here imports a peer, or numpy."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.clean_windows import time_steps  # noqa: E402  the checkout comes first

Row = dict[str, Any]


def worker_flags(description: str | None) -> argparse.ArgumentParser:
    """The flags of one point."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--input-shape", type=_shape, default=(3, 32, 32))
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    return parser


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def timed_row(step: Callable[[], object], args: argparse.Namespace, errors: tuple[type[Exception], ...]) -> Row:
    """Rate, spread and peak memory of `step`; an `error` in place of them where the peer refuses the work with one of
    `errors`. The peak is the process's own: everything the peer loads counts."""
    try:
        timing = time_steps(step, args.threads, args.seconds)
    except errors as error:
        return {"error": " ".join(str(error).split())[:200]}
    return {
        "samples_per_s": args.batch_size / timing.step_s,
        "spread": timing.spread,
        "windows": timing.windows,
        "clean_windows": timing.clean,
        "tainted": timing.tainted,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def print_row(row: Row) -> None:
    print(json.dumps(row), flush=True)
