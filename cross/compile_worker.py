"""A process that compiles kernels for `cross.compile_kernels`: reads symbols, one a line, and answers each when it is done.

Usage: python -m cross.compile_worker GRAPH.pickle FOLDER. The file is the parent's own, made for this run.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from cross.compile_kernels import compile_to
from cross.lower import lower


def main(graph: Path, folder: Path) -> int:
    """Serve until standard input ends. An answer other than the symbol itself is the reason why it failed."""
    stored, target, winograd = pickle.loads(graph.read_bytes())
    kernels = lower(stored, target, winograd)
    for line in sys.stdin:
        symbol = line.strip()
        try:
            compile_to(symbol, kernels.builders[symbol](), target, folder / f"{symbol}.o")
        except Exception as error:  # whatever TVM raises goes to the parent, in one line
            print(" ".join(str(error).split())[-300:] or type(error).__name__, flush=True)
            return 1
        print(symbol, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
