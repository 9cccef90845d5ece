"""One point of PyTorch: training throughput of one model at one batch size, as one JSON line.

A step is forward, cross-entropy, backward and SGD with momentum, on float32. `--tuned`: channels last, fused optimizer,
torch.compile where a C++ compiler is found; the allocator is the caller's part (variables that only a new process reads).
`--export FILE` writes the model in training mode as ONNX instead, for ONNX Runtime.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.worker import Row, print_row, timed_row, worker_flags  # noqa: E402  the checkout comes first


def measure(args: argparse.Namespace) -> Row:
    """The row of one point; an `error` in place of a rate where PyTorch refuses it."""
    import torch
    from torch import nn

    from benchmarks.peers.torch_models import MODELS

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = args.input_shape
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

    row: Row = {"version": torch.__version__, "compiled": compiled}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return row | timed_row(step, args, (RuntimeError, ValueError))


def export(args: argparse.Namespace) -> Row:
    """The model as ONNX with a free batch, batch norms training, every parameter under its own name."""
    import torch

    from benchmarks.peers.torch_models import MODELS

    torch.manual_seed(0)
    model = MODELS[args.model](args.input_shape, args.classes).train()
    # The exporter that ONNX Runtime's training tools understand is the old one, and says so.
    warnings.simplefilter("ignore")
    torch.onnx.export(
        model,
        (torch.randn(2, *args.input_shape),),
        str(args.export),
        input_names=["x"],
        output_names=["logits"],
        opset_version=17,
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
    )
    return {"parameters": [name for name, _ in model.named_parameters()]}


def main() -> int:
    parser = worker_flags(__doc__)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--export", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    print_row(export(args) if args.export else measure(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
