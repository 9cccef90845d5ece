"""The models that taste-edge brings: one file each, built as ONNX for the data's channels, size and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from cross.graph import Shape
from cross.zoo import (
    alexnet,
    chartransformer,
    efficientvit,
    mlp,
    mobilenetv2,
    resnet8,
    resnet18,
    resnet20,
    squeezenet,
    vgg,
)


@dataclass(frozen=True)
class ZooModel:
    """`build(input_shape, classes)` returns the ModelProto; input_shape is [C, H, W], or [T] for tokens."""

    build: Callable[[Sequence[int], int], onnx.ModelProto]
    default_shape: Shape = (3, 32, 32)
    default_classes: int = 10
    any_rank: bool = False
    """Whether samples may have another number of dimensions than `default_shape`."""


ZOO: Mapping[str, ZooModel] = {
    "resnet18": ZooModel(resnet18.build),
    "resnet18-imagenet": ZooModel(resnet18.build_imagenet, (3, 224, 224)),
    "resnet8": ZooModel(resnet8.build),
    "resnet20": ZooModel(resnet20.build),
    "mobilenetv2": ZooModel(mobilenetv2.build),
    "vgg16": ZooModel(vgg.build_16),
    "vgg19": ZooModel(vgg.build_19),
    "alexnet": ZooModel(alexnet.build),
    "squeezenet": ZooModel(squeezenet.build),
    "efficientvit-m1": ZooModel(efficientvit.build_m1),
    "chartransformer": ZooModel(chartransformer.build, (64,), 96),
    "mlp": ZooModel(mlp.build, any_rank=True),
}
