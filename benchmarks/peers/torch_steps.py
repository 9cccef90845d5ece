"""A fixed number of PyTorch's training steps and nothing else, for counting: forward, cross-entropy, backward, SGD.

Runs on the Python and PyTorch of an emulated board (no numpy needed).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def main() -> int:
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
    for _ in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return 0


if __name__ == "__main__":
    sys.exit(main())
