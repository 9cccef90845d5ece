"""One point of PyTorch: training throughput of one model at one batch size, as one JSON line.

A step is forward, cross-entropy, backward and SGD with momentum, on float32. `--tuned`: channels last, fused optimizer,
torch.compile where a C++ compiler is found; the caller keeps malloc's pages (MALLOC_ variables, which only a new process
reads).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The row of one point; an `error` in place of a rate where PyTorch refuses it."""
    import torch
    from torch import nn

    from benchmarks.peers.clean_windows import time_steps
    from benchmarks.peers.torch_models import MODELS

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = tuple(int(size) for size in args.input_shape.split(","))
    model = MODELS[args.model](shape, args.classes).train()
    x = torch.randn(args.batch_size, *shape)
    y = torch.randint(0, args.classes, (args.batch_size,))
    compiled = args.tuned and shutil.which("c++") is not None
    if args.tuned and len(shape) == 3:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=args.tuned)
    network = torch.compile(model) if compiled else model
    loss_function = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_function(network(x), y).backward()
        optimizer.step()

    row: dict[str, Any] = {"version": torch.__version__, "compiled": compiled}
    try:
        timing = time_steps(step, args.threads, args.seconds)
    except (RuntimeError, ValueError) as error:
        return row | {"error": " ".join(str(error).split())[:200]}
    return row | {
        "samples_per_s": args.batch_size / timing.step_s,
        "spread": timing.spread,
        "windows": timing.windows,
        "clean_windows": timing.clean,
        "tainted": timing.tainted,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--input-shape", default="3,32,32")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    print(json.dumps(measure(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
