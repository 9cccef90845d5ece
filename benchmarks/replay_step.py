"""What replay adds to a step: python benchmarks/replay_step.py BUILD PACKED [--batch-size 20] [--repeats 5]

BUILD is a folder that `build` made, PACKED one that `data pack` made. Plain training and learning with replay take turns at
the same batch size, one thread, one step reported at a time; prints one JSON object with both medians (samples/s of a step)
and their ratio. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

WARM_UP, STEPS = 5, 100


def steps(command: list[str], rows: int) -> list[float]:
    """samples/s of every full step but the first few."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    rates = [e["samples_per_s"] for e in events if e["event"] == "step"]
    assert len(rates) > WARM_UP, f"{len(rates)} steps of {rows} rows"
    return rates[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    train, test = (args.packed / f"{split}.safetensors" for split in ("train", "test"))
    fixed = ["--samples", train, "--batch-size", args.batch_size, "--lr", 0.001, "--threads", 1, "--report-rate", 1e9]
    classes = json.loads((args.build / "manifest.json").read_text())["classes"]
    each = -(-STEPS * args.batch_size // 2 // classes)
    stream = ["--test", test, "--task-of", ",".join(["0"] * classes), "--samples-per-class", each]
    commands = {
        "plain": ["train", *fixed, "--steps", STEPS],
        "replay": ["learn", *fixed, *stream, "--buffer", max(classes, 10 * args.batch_size)],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.repeats):
        for name, words in commands.items():
            found[name] += steps([str(args.build / "taste-train"), *map(str, words)], args.batch_size)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    print(json.dumps({**medians, "cost": medians["plain"] / medians["replay"], "batch_size": args.batch_size}))


if __name__ == "__main__":
    main()
