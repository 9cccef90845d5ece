"""How good the search strategies are, on simulated curves whose maximum is known.

    python benchmarks/search_quality.py [--seeds 100] [--searches tpe,random,paper] [--json]

Regret is 1 - true(chosen) / max(true) on the TRUE curve, in percent, averaged over seeds; every measurement carries
2 % noise. `gap` is how much slower bs_opt is than bs_peak (points of the maximum), `minutes` the simulated time of a
study without time budget on a board whose maximum is --peak samples/s (7: ResNet-18 on a Raspberry Pi 4 class board).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from host_control.console import Console  # noqa: E402  the checkout is put on the path first
from host_control.search.quality import Quality, judge  # noqa: E402
from host_control.search.simulated import FAMILIES  # noqa: E402
from host_control.search.strategies import NAMES  # noqa: E402

COLUMNS = [("search", "left"), ("curve", "left"), ("N", "right"), ("budget", "right"), ("regret bs_peak", "right")]
COLUMNS += [("95 %", "right"), ("regret bs_opt", "right"), ("gap", "right"), ("sizes", "right"), ("minutes", "right")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--searches", default="tpe,random")
    parser.add_argument("--sizes", default="17,33,65", help="sizes of the space (N)")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--peak", type=float, default=7.0, help="maximum of every curve, samples/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    searches = args.searches.split(",")
    if unknown := sorted(set(searches) - set(NAMES)):
        parser.error(f"unknown search {', '.join(unknown)}. Known: {', '.join(NAMES)}")
    rows: list[Quality] = []
    for search in searches:
        for family in FAMILIES:
            for count in map(int, args.sizes.split(",")):
                print(f"{search} {family} {count}", file=sys.stderr, flush=True)
                rows.append(judge(search, family, count, args.seeds, noise=args.noise, peak=args.peak))
    if args.json:
        print(json.dumps({"seeds": args.seeds, "noise": args.noise, "rows": [row.as_dict() for row in rows]}))
    else:
        Console().table(COLUMNS, [row.cells() for row in rows], title=f"{args.seeds} seeds, {args.noise:.0%} noise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
