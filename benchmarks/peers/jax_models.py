"""The zoo's models as a JAX user writes them: functions of parameters and running statistics, images as N x H x W x C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
Values = dict[str, Array]


class Layers:
    """One pass over a network: takes parameters by their order, or makes them where `key` is given."""

    def __init__(self, parameters: Values, states: Values, key: Array | None = None) -> None:
        self.parameters, self.states, self.changed, self._key, self._count = parameters, states, Values(), key, 0

    def _named(self, values: Values, make: Callable[[], Array]) -> tuple[str, Array]:
        name = f"{self._count:03}"
        self._count += 1
        if self._key is not None:
            values[name] = make()
        return name, values[name]

    def _weight(self, shape: Sequence[int], fan_in: int) -> Array:
        def make() -> Array:
            self._key, own = jax.random.split(self._key)
            return jax.random.normal(own, shape) * (2 / fan_in) ** 0.5

        return self._named(self.parameters, make)[1]

    def _vector(self, size: int, value: float) -> Array:
        return self._named(self.parameters, lambda: jnp.full(size, value))[1]

    def convolution(self, x: Array, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> Array:
        inputs, pad = x.shape[-1] // groups, kernel // 2
        weight = self._weight((kernel, kernel, inputs, outputs), kernel * kernel * inputs)
        pads, layout = [(pad, pad)] * 2, ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, weight, (stride, stride), pads, dimension_numbers=layout, feature_group_count=groups
        )

    def bias(self, x: Array) -> Array:
        return x + self._vector(x.shape[-1], 0.0)

    def norm(self, x: Array) -> Array:
        """Batch norm over all but the last axis, momentum 0.1."""
        channels, count = x.shape[-1], x.size // x.shape[-1]
        gamma, beta = self._vector(channels, 1.0), self._vector(channels, 0.0)
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        for value, start in ((mean, 0.0), (variance * count / (count - 1), 1.0)):
            name, old = self._named(self.states, lambda start=start: jnp.full(channels, start))  # type: ignore[misc]
            self.changed[name] = 0.9 * old + 0.1 * value
        return (x - mean) * (lax.rsqrt(variance + 1e-5) * gamma) + beta

    def dense(self, x: Array, outputs: int) -> Array:
        return self.bias(x @ self._weight((x.shape[-1], outputs), x.shape[-1]))


@dataclass(frozen=True)
class Network:
    """`layers(pass, x, classes)` gives the logits."""

    layers: Callable[[Layers, Array, int], Array]

    def run(self, parameters: Values, states: Values, x: Array, classes: int) -> tuple[Array, Values]:
        """Logits, and the running statistics after this batch."""
        layers = Layers(parameters, states)
        return self.layers(layers, x, classes), layers.changed


def initial(network: Network, shape: Sequence[int], classes: int) -> tuple[Values, Values]:
    """(parameters, running statistics) for samples of this shape."""
    layers = Layers({}, {}, jax.random.key(0))
    network.layers(layers, jnp.zeros((2, *shape)), classes)
    return layers.parameters, layers.states


def _mlp(p: Layers, x: Array, classes: int) -> Array:
    x = x.reshape(x.shape[0], prod(x.shape[1:]))
    for outputs in (256, 128):
        x = jax.nn.relu(p.dense(x, outputs))
    return p.dense(x, classes)


def _residual(p: Layers, x: Array, outputs: int, stride: int, normed: bool = True) -> Array:
    y = jax.nn.relu(p.norm(p.convolution(x, outputs, 3, stride)))
    y = p.norm(p.convolution(y, outputs, 3))
    if stride != 1 or x.shape[-1] != outputs:
        x = p.convolution(x, outputs, 1, stride)
        x = p.norm(x) if normed else p.bias(x)
    return jax.nn.relu(y + x)


def _resnet18(p: Layers, x: Array, classes: int, imagenet: bool = False) -> Array:
    x = jax.nn.relu(p.norm(p.convolution(x, 64, *((7, 2) if imagenet else (3, 1)))))
    if imagenet:
        pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        x = _residual(p, x, outputs, stride)
    return p.dense(x.mean((1, 2)), classes)


def _resnet8(p: Layers, x: Array, classes: int) -> Array:
    x = jax.nn.relu(p.norm(p.convolution(x, 16, 3)))
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        x = _residual(p, x, outputs, stride, normed=False)
    return p.dense(x.mean((1, 2)), classes)


def _mobilenetv2(p: Layers, x: Array, classes: int) -> Array:
    x = jax.nn.relu6(p.norm(p.convolution(x, 32, 3)))
    stages = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outputs, count, first_stride in stages:
        for index in range(count):
            stride, wide = first_stride if index == 0 else 1, x.shape[-1] * expansion
            y = jax.nn.relu6(p.norm(p.convolution(x, wide, 1)))
            y = jax.nn.relu6(p.norm(p.convolution(y, wide, 3, stride, groups=wide)))
            y = p.norm(p.convolution(y, outputs, 1))
            x = x + y if stride == 1 and x.shape[-1] == outputs else y
    x = jax.nn.relu6(p.norm(p.convolution(x, 1280, 1)))
    return p.dense(x.mean((1, 2)), classes)


MODELS = {
    "mlp": Network(_mlp),
    "resnet8": Network(_resnet8),
    "resnet18": Network(_resnet18),
    "resnet18-imagenet": Network(lambda p, x, classes: _resnet18(p, x, classes, imagenet=True)),
    "mobilenetv2": Network(_mobilenetv2),
}
"""By the zoo's names."""
