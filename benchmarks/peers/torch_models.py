"""The zoo's models as a PyTorch user writes them: the work that peers are timed on.

Shapes of tensors as in cross/zoo: N x C x H x W activations, O x I x R x S weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution without bias, then batch norm."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut; `projection` is what the shortcut does where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, projection: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(inputs, outputs, 3, stride), nn.ReLU(inplace=True), _convolution(outputs, outputs, 3)
        )
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else projection()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Inverted(nn.Module):
    """MobileNetV2's block: widen, depthwise, narrow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.body = nn.Sequential(
            _convolution(inputs, wide, 1),
            nn.ReLU6(inplace=True),
            _convolution(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(inplace=True),
            _convolution(wide, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


def _pooled(features: nn.Module, channels: int, classes: int) -> nn.Module:
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def mlp(shape: Sequence[int], classes: int) -> nn.Module:
    layers = (nn.Linear(prod(shape), 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes))
    return nn.Sequential(nn.Flatten(), *layers)


def resnet18(shape: Sequence[int], classes: int, imagenet: bool = False) -> nn.Module:
    stem: list[nn.Module] = [_convolution(shape[0], 64, 7, 2) if imagenet else _convolution(shape[0], 64, 3)]
    stem += [nn.ReLU(inplace=True), *([nn.MaxPool2d(3, 2, 1)] if imagenet else [])]
    blocks, inputs = [], 64
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        project = _projection(inputs, outputs, stride)
        blocks.append(_Residual(inputs, outputs, stride, project))
        inputs = outputs
    return _pooled(nn.Sequential(*stem, *blocks), 512, classes)


def _projection(inputs: int, outputs: int, stride: int) -> Callable[[], nn.Module]:
    return lambda: _convolution(inputs, outputs, 1, stride)


def resnet8(shape: Sequence[int], classes: int) -> nn.Module:
    """MLPerf Tiny's: three stacks, shortcuts projected without batch norm."""
    blocks: list[nn.Module] = [_convolution(shape[0], 16, 3), nn.ReLU(inplace=True)]
    for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        blocks.append(_Residual(inputs, outputs, stride, _plain_projection(inputs, outputs, stride)))
    return _pooled(nn.Sequential(*blocks), 64, classes)


def _plain_projection(inputs: int, outputs: int, stride: int) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(inputs, outputs, 1, stride)


def mobilenetv2(shape: Sequence[int], classes: int) -> nn.Module:
    """Its form for small images: stem and second stage at stride 1."""
    blocks: list[nn.Module] = [_convolution(shape[0], 32, 3), nn.ReLU6(inplace=True)]
    inputs = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outputs, count, stride in stages:
        for index in range(count):
            blocks.append(_Inverted(inputs, outputs, expansion, stride if index == 0 else 1))
            inputs = outputs
    blocks += [_convolution(320, 1280, 1), nn.ReLU6(inplace=True)]
    return _pooled(nn.Sequential(*blocks), 1280, classes)


MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": mlp,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet18-imagenet": lambda shape, classes: resnet18(shape, classes, imagenet=True),
    "mobilenetv2": mobilenetv2,
}
"""By the zoo's names; each is called with the shape of one sample and the number of classes."""
