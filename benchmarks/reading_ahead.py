"""What reading and augmenting the batches adds to a step: python benchmarks/reading_ahead.py BUILD PACKED --batch-size N
[--pairs 10] [--seconds 2] [--threads T]

BUILD is a folder that `build` made, PACKED one of images that `data pack` made. `bench`, which runs steps on one batch that
stays, and `train`, which reads, permutes, crops, flips and cuts out the batches in a thread beside the step, take turns. Prints one
JSON object: the median of each (samples/s), and `cost`, by how much the second is slower, the median over neighbouring runs.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

WARM_UP = 3


def events(command: list[object]) -> list[dict[str, Any]]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    program = args.build / "taste-train"
    fixed = ["--batch-size", args.batch_size, *([] if args.threads is None else ["--threads", args.threads])]
    train = [program, "train", *fixed, "--samples", args.packed / "train.safetensors", "--augment", "crop-flip-cutout"]
    train += ["--lr", 1e-6, "--momentum", 0.9, "--weight-decay", 5e-4, "--report-rate", 1e9]
    train += ["--weights", args.build / "weights.safetensors"]
    found: dict[str, list[float]] = {"bench": [], "train": []}
    for _ in range(args.pairs):
        result = events([program, "bench", *fixed, "--seconds", args.seconds])[-1]
        found["bench"].append(result["samples_per_s"])
        steps = WARM_UP + max(5, round(args.seconds * result["samples_per_s"] / args.batch_size))
        rates = [e["samples_per_s"] for e in events([*train, "--steps", steps]) if e["event"] == "step"]
        found["train"].append(statistics.median(rates[WARM_UP:]))
    cost = statistics.median(a / b for a, b in zip(found["bench"], found["train"], strict=True)) - 1
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    print(json.dumps({**medians, "cost": cost, "batch_size": args.batch_size}))


if __name__ == "__main__":
    main()
