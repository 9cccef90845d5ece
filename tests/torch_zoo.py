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


class PaddedShortcut(nn.Module):
    """Every `stride`-th pixel, with channels of zeros on both sides: a shortcut without weights (option A)."""

    def __init__(self, stride: int, added: int) -> None:
        super().__init__()
        self.stride, self.half = stride, added // 2

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.half, self.half))


class ResidualBlock(nn.Module):
    """ResNet's basic block, its shortcut projected or `padded`."""

    def __init__(self, in_channels: int, channels: int, stride: int, padded: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Sequential()
        if padded:
            self.downsample = PaddedShortcut(stride, channels - in_channels)
        elif stride != 1 or in_channels != channels:
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


class Vgg(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int, stages: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for width, count in zip((64, 128, 256, 512, 512), stages, strict=True):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class AlexNet(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(input_shape[0], 64, 11, 4, 5), nn.ReLU(), nn.MaxPool2d(2, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2),
        )  # fmt: skip
        self.classifier = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class ResNet20(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = ((16, 16), (16, 32), (32, 64))
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                ResidualBlock(before, width, width // before, padded=True),
                *(ResidualBlock(width, width, 1, padded=True) for _ in range(2)),
            )
            for before, width in stages
        )
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))
        return self.linear(x.mean((2, 3)))


class Fire(nn.Module):
    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x).relu(), self.expand3x3(x).relu()], 1)


class SqueezeNet(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, 2, ceil_mode=True)

        self.features = nn.Sequential(
            nn.Conv2d(input_shape[0], 64, 3, padding=1), nn.ReLU(), pool(),
            Fire(64, 16, 64), Fire(128, 16, 64), pool(),
            Fire(128, 32, 128), Fire(256, 32, 128), pool(),
            Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Identity(), nn.Conv2d(512, classes, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x)).mean((2, 3))


class ConvBn(nn.Module):
    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pw1 = ConvBn(width, 2 * width, 1)
        self.pw2 = ConvBn(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pw2(self.pw1(x).relu())


class CascadedHead(nn.Module):
    def __init__(self, part: int, kernel: int, positions: int) -> None:
        super().__init__()
        self.qkv = ConvBn(part, 32 + part, 1)
        self.dw = ConvBn(16, 16, kernel, groups=16)
        self.bias = nn.Parameter(torch.zeros(positions, positions))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split((16, 16, x.shape[1]), 1)
        scores = self.dw(query).flatten(2).transpose(1, 2) @ key.flatten(2) / 4 + self.bias
        return (value.flatten(2) @ scores.softmax(-1).transpose(1, 2)).reshape(x.shape)


class CascadedAttention(nn.Module):
    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        for head in range(heads):
            setattr(self, f"head{head}", CascadedHead(width // heads, (7, 5, 3)[head], positions))
        self.proj = ConvBn(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for head, part in enumerate(x.chunk(self.heads, 1)):
            outputs.append(getattr(self, f"head{head}")(part + outputs[-1] if outputs else part))
        return x + self.proj(torch.cat(outputs, 1).relu())


class VitBlock(nn.Module):
    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.dw0 = ConvBn(width, width, 3, groups=width)
        self.ffn0 = FeedForward(width)
        self.attn = CascadedAttention(width, heads, positions)
        self.dw1 = ConvBn(width, width, 3, groups=width)
        self.ffn1 = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.ffn0(x + self.dw0(x)))
        return self.ffn1(x + self.dw1(x))


class VitDownsample(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        inner = 4 * before
        self.dw0 = ConvBn(before, before, 3, groups=before)
        self.ffn0 = FeedForward(before)
        self.merge1 = ConvBn(before, inner, 1)
        self.merge2 = ConvBn(inner, inner, 3, 2, groups=inner)
        self.se = nn.ModuleDict({"fc1": nn.Conv2d(inner, inner // 4, 1), "fc2": nn.Conv2d(inner // 4, inner, 1)})
        self.merge3 = ConvBn(inner, after, 1)
        self.dw1 = ConvBn(after, after, 3, groups=after)
        self.ffn1 = FeedForward(after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.merge2(self.merge1(self.ffn0(x + self.dw0(x))).relu()).relu()
        x = x * self.se["fc2"](self.se["fc1"](x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        x = self.merge3(x)
        return self.ffn1(x + self.dw1(x))


class EfficientVitM1(nn.Module):
    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        size = [-(-d // 4) for d in input_shape[1:]]
        widths = (input_shape[0], 16, 32, 64, 128)
        self.stem = nn.ModuleList(ConvBn(widths[i], widths[i + 1], 3, 2 if i < 2 else 1) for i in range(4))
        self.stages = 3
        for stage, (width, depth, heads) in enumerate(((128, 1, 2), (144, 2, 3), (192, 3, 3))):
            if stage:
                setattr(self, f"down{stage}", VitDownsample((128, 144, 192)[stage - 1], width))
                size = [-(-d // 2) for d in size]
            blocks = [VitBlock(width, heads, size[0] * size[1]) for _ in range(depth)]
            setattr(self, f"stage{stage}", nn.Sequential(*blocks))
        self.head = nn.Sequential()
        self.head.add_module("bn", nn.BatchNorm1d(192))
        self.head.add_module("linear", nn.Linear(192, classes))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.stem):
            x = layer(x).relu() if index < 3 else layer(x)
        for stage in range(self.stages):
            x = getattr(self, f"down{stage}")(x) if stage else x
            x = getattr(self, f"stage{stage}")(x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.ln2(x))))


class CharTransformer(nn.Module):
    def __init__(
        self, input_shape: Sequence[int], classes: int, layers: int = 6, width: int = 256, heads: int = 8
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(classes, width)
        self.pos = nn.Parameter(torch.zeros(input_shape[0], width))
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln(self.layers(self.tok(x.long()) + self.pos)))


MODULES: Mapping[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": Mlp,
    "resnet8": ResNet8,
    "resnet18": lambda shape, classes: ResNet18(shape, classes, imagenet=False),
    "resnet18-imagenet": lambda shape, classes: ResNet18(shape, classes, imagenet=True),
    "mobilenetv2": MobileNetV2,
    "resnet20": ResNet20,
    "vgg16": lambda shape, classes: Vgg(shape, classes, (2, 2, 3, 3, 3)),
    "vgg19": lambda shape, classes: Vgg(shape, classes, (2, 2, 4, 4, 4)),
    "alexnet": AlexNet,
    "squeezenet": SqueezeNet,
    "efficientvit-m1": EfficientVitM1,
    "chartransformer": CharTransformer,
    "chartransformer-small": lambda shape, classes: CharTransformer(shape, classes, 2, 32, 4),
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
