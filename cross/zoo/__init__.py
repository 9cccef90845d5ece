"""The models that taste-edge brings: one file each, built as ONNX for the data's channels, size and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from cross.graph import Shape
from cross.zoo import mlp, mobilenetv2, resnet8, resnet18


@dataclass(frozen=True)
class ZooModel:
    """`build(input_shape, classes)` returns the ModelProto; input_shape is [C, H, W]."""

    build: Callable[[Sequence[int], int], onnx.ModelProto]
    default_shape: Shape = (3, 32, 32)


ZOO: Mapping[str, ZooModel] = {
    "resnet18": ZooModel(resnet18.build),
    "resnet18-imagenet": ZooModel(resnet18.build_imagenet, (3, 224, 224)),
    "resnet8": ZooModel(resnet8.build),
    "mobilenetv2": ZooModel(mobilenetv2.build),
    "mlp": ZooModel(mlp.build),
}

DEFAULT_CLASSES = 10
