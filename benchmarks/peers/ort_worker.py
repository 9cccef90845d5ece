"""One point of ONNX Runtime's on-device training, as one JSON line; runs in an environment with onnxruntime-training.

A step is forward, cross-entropy, backward and SGD (its SGD has no momentum, so it moves less memory than the others).
`--prepare MODEL.onnx` makes the training artifacts in --folder instead, in a process of its own: making them takes memory
that would count as the step's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.worker import Row, print_row, timed_row, worker_flags  # noqa: E402  the checkout comes first


def prepare(args: argparse.Namespace) -> Row:
    """Training, evaluation and optimizer models and a checkpoint, from an ONNX file that torch_worker.py exported."""
    import onnx
    from onnxruntime.training import artifacts

    model = onnx.load(str(args.prepare))
    stored = {initializer.name for initializer in model.graph.initializer}
    names = set(json.loads(args.prepare.with_suffix(".json").read_text(encoding="utf-8"))["parameters"])
    # A function of this package prints to stdout: the row must be the only thing there.
    sys.stdout = sys.stderr
    artifacts.generate_artifacts(
        model,
        requires_grad=sorted(stored & names),
        frozen_params=sorted(stored - names),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=str(args.folder),
    )
    sys.stdout = sys.__stdout__
    return {"missing": sorted(names - stored)}


def measure(args: argparse.Namespace) -> Row:
    """The row of one point."""
    import numpy as np
    import onnxruntime
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = args.threads, 1, 3
    state = CheckpointState.load_checkpoint(str(args.folder / "checkpoint"))
    training = str(args.folder / "training_model.onnx")
    module = Module(training, state, None, device="cpu", session_options=options)
    optimizer = Optimizer(str(args.folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(1e-3)
    module.train()
    random = np.random.default_rng(0)
    x = random.standard_normal((args.batch_size, *args.input_shape)).astype("float32")
    y = random.integers(0, args.classes, args.batch_size).astype("int64")

    def step() -> None:
        module(x, y)
        optimizer.step()
        module.lazy_reset_grad()

    row: dict[str, Any] = {"version": onnxruntime.__version__, "parameters": module.get_parameters_size(True)}
    return row | timed_row(step, args, (RuntimeError, ValueError))


def main() -> int:
    parser = worker_flags(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the artifacts")
    parser.add_argument("--prepare", type=Path, metavar="MODEL.onnx")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    print_row(prepare(args) if args.prepare else measure(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
