"""Your own ONNX file as a training program for this machine, and its throughput at three batch sizes.

.venv/bin/python examples/own_model.py my_model.onnx
"""

import sys
from pathlib import Path

from cross.build import build
from cross.load_model import load_model
from cross.probe import choose_target
from cross.target import find_target
from host_control.board import OperatingPoint
from host_control.boards import open_board

model = load_model(sys.argv[1])
with open_board("local") as board:
    target = find_target(choose_target(board.facts()))
    board.deploy(build(model, target, Path("build/own_model")).out)
    for batch_size in (2, 8, 32):
        counters = board.measure(OperatingPoint(batch_size))
        print(f"batch size {batch_size}: {counters.samples_per_s:.1f} samples/s on {target.title}")
