"""A fixed number of PyTorch's training steps and nothing else, for counting: forward, cross-entropy, backward, SGD.

The last step lies between two calls of getsid, which nothing else here makes: the counting plugin counts what is between them.

Runs on the Python and PyTorch of an emulated board (no numpy needed).
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--input-shape", required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    from benchmarks.peers.torch_models import MODELS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = tuple(int(size) for size in args.input_shape.split(","))
    model = MODELS[args.model](shape, args.classes).train()
    x = torch.randn(args.batch_size, *shape)
    y = torch.arange(args.batch_size) % args.classes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for number in range(args.steps):
        if number == args.steps - 1:
            os.getsid(0)
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    os.getsid(0)
    # Python's end would take minutes under QEMU.
    os._exit(0)


if __name__ == "__main__":
    main()
