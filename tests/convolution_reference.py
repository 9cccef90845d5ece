"""Convolution and its gradients in float64 numpy, straight from the definition."""

from __future__ import annotations

import numpy as np

from cross.kernels.convolution import ConvSpec


def _windows(spec: ConvSpec, padded: np.ndarray, r: int, s: int) -> np.ndarray:
    """View of what kernel position (r, s) reads, [N, C, P, Q]."""
    top, left = r * spec.dilations[0], s * spec.dilations[1]
    bottom = top + (spec.out_height - 1) * spec.strides[0] + 1
    right = left + (spec.out_width - 1) * spec.strides[1] + 1
    return padded[:, :, top : bottom : spec.strides[0], left : right : spec.strides[1]]


def _padded(spec: ConvSpec, x: np.ndarray) -> np.ndarray:
    top, left, bottom, right = spec.pads
    return np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))


def _grouped(spec: ConvSpec, array: np.ndarray) -> np.ndarray:
    """[N, channels, ...] as [N, groups, channels of a group, ...]."""
    return array.reshape(array.shape[0], spec.groups, array.shape[1] // spec.groups, *array.shape[2:])


def _weight(spec: ConvSpec, w: np.ndarray) -> np.ndarray:
    return w.astype(np.float64).reshape(spec.groups, spec.out_channels // spec.groups, *w.shape[1:])


def forward(spec: ConvSpec, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y[N, O, P, Q]."""
    y = np.zeros((x.shape[0], spec.out_channels, spec.out_height, spec.out_width))
    padded, weight = _padded(spec, x), _weight(spec, w)
    for r in range(spec.kernel[0]):
        for s in range(spec.kernel[1]):
            window = _grouped(spec, _windows(spec, padded, r, s))
            y += np.einsum("ngchw,goc->ngohw", window, weight[..., r, s], optimize=True).reshape(y.shape)
    return y


def input_gradient(spec: ConvSpec, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    """dx[N, C, H, W]."""
    shape = (dy.shape[0], spec.in_channels, spec.height, spec.width)
    padded, weight = np.zeros_like(_padded(spec, np.zeros(shape))), _weight(spec, w)
    gradient = _grouped(spec, dy.astype(np.float64))
    for r in range(spec.kernel[0]):
        for s in range(spec.kernel[1]):
            window = _windows(spec, padded, r, s)
            window += np.einsum("ngohw,goc->ngchw", gradient, weight[..., r, s], optimize=True).reshape(window.shape)
    top, left = spec.pads[:2]
    return padded[:, :, top : top + spec.height, left : left + spec.width]


def weight_gradient(spec: ConvSpec, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dw[O, C/groups, R, S]."""
    dw = np.zeros(spec.weight_shape)
    padded, gradient = _padded(spec, x), _grouped(spec, dy.astype(np.float64))
    for r in range(spec.kernel[0]):
        for s in range(spec.kernel[1]):
            window = _grouped(spec, _windows(spec, padded, r, s))
            taps = np.einsum("ngohw,ngchw->goc", gradient, window, optimize=True)
            dw[:, :, r, s] = taps.reshape(dw.shape[:2])
    return dw
