"""A PyTorch model as an ONNX file that can be trained: batches of any size, weights beside it.

    .venv/bin/python examples/export_from_torch.py my_model.onnx

Needs PyTorch and onnxscript (`make test` installs both).
"""

import sys

import torch
from torch import nn

model = nn.Sequential(
    *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
).eval()
batch = torch.export.Dim("batch")
torch.onnx.export(model, (torch.zeros(2, 3, 32, 32),), sys.argv[1], dynamic_shapes=({0: batch},), dynamo=True)
print(f"{sys.argv[1]}: train it with examples/own_model.py")
