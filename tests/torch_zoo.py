"""The zoo as PyTorch modules, written apart from cross/zoo: same state_dict names, the reference for parity tests.

`torch` is a test dependency: import this only from tests marked needs("torch").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from cross.graph import Model


class Mlp(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(prod(input_shape), 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())


class ResidualBlock(nn.Module):
    """ResNet's basic block."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = nn.Sequential()
        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.downsample(x)).relu()


class ResNet18(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int, imagenet: bool) -> None:
        super().__init__()
        stem = (7, 2, 3) if imagenet else (3, 1, 1)
        self.conv1 = nn.Conv2d(input_shape[0], 64, *stem, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if imagenet else nn.Identity()
        self.layer1 = nn.Sequential(ResidualBlock(64, 64, 1), ResidualBlock(64, 64, 1))
        self.layer2 = nn.Sequential(ResidualBlock(64, 128, 2), ResidualBlock(128, 128, 1))
        self.layer3 = nn.Sequential(ResidualBlock(128, 256, 2), ResidualBlock(256, 256, 1))
        self.layer4 = nn.Sequential(ResidualBlock(256, 512, 2), ResidualBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class Stack(nn.Module):
    """ResNet-8's block: the shortcut is projected without batch norm."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        same = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet8(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stacks = nn.Sequential(Stack(16, 16, 1), Stack(16, 32, 2), Stack(32, 64, 2))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stacks(self.bn1(self.conv1(x)).relu()).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        planes = in_channels * expansion
        self.conv1 = nn.Conv2d(in_channels, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, groups=planes, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.residual = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self.bn1(self.conv1(x)))
        y = nn.functional.relu6(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return y + x if self.residual else y


class MobileNetV2(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 32, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        blocks = [InvertedResidual(32, 16, 1, 1)]
        channels = 16
        for width, count, stride in ((24, 2, 1), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)):
            for index in range(count):
                blocks.append(InvertedResidual(channels, width, 6, stride if index == 0 else 1))
                channels = width
        self.layers = nn.Sequential(*blocks)
        self.conv2 = nn.Conv2d(320, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280)
        self.linear = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(nn.functional.relu6(self.bn1(self.conv1(x))))
        return self.linear(nn.functional.relu6(self.bn2(self.conv2(x))).mean((2, 3)))


MODULES: Mapping[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": Mlp,
    "resnet8": ResNet8,
    "resnet18": lambda shape, classes: ResNet18(shape, classes, imagenet=False),
    "resnet18-imagenet": lambda shape, classes: ResNet18(shape, classes, imagenet=True),
    "mobilenetv2": MobileNetV2,
}


def build_torch(
    name: str,
    input_shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    tensors: Mapping[str, np.ndarray] | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The module, in training mode; with `tensors` (canonical arrays by name) their values are loaded."""
    module = MODULES[name](input_shape, classes)
    if tensors is not None:
        load_tensors(module, tensors)
    return module.to(dtype).train()


def load_tensors(module: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """Load canonical arrays by state_dict name; every parameter and running statistic must be there, and nothing more.

    A convolution's bias is [C, 1, 1] in a `Model` and [C] in PyTorch.
    """
    own = {name: value for name, value in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    if own.keys() != tensors.keys():
        raise ValueError(f"names differ: {sorted(own.keys() ^ tensors.keys())}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(torch.from_numpy(np.ascontiguousarray(tensors[name])).reshape(value.shape))


def torch_like(model: Model, name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module of zoo model `name` with the parameters and states of `model`."""
    return build_torch(name, model.input_shape, model.classes, {**model.parameters, **model.states}, dtype)


def named_gradients(module: nn.Module, model: Model) -> dict[str, np.ndarray]:
    """Gradients by name, in the canonical shapes of `model`."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.detach().numpy().reshape(model.parameters[name].shape)
    return found
