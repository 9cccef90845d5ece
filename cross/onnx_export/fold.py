"""Batch norms that `--unfold-bn` put back, folded into the convolutions again with what they have learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cross.errors import UnsupportedModelError
from cross.graph import Model

Array = np.ndarray[Any, np.dtype[Any]]


def fold_batch_norms(model: Model, tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """`tensors` with every unfolded batch norm turned into the weight and bias of its convolution, in double precision.

    y = (conv(x) - mean) / sqrt(var + eps) * gamma + beta is a convolution with the weight scaled an output channel and
    a bias. Also returns {weight: bias [C]} of convolutions that had no bias in the file. UnsupportedModelError where one
    weight is read by two convolutions, which would need two of it.
    """
    folded, added = dict(tensors), dict[str, Array]()
    reads = [name for node in model.nodes for name in node.inputs]
    for entry in model.metadata.get("unfolded_batch_norm", ()):
        weight, prefix = entry["weight"], entry["batch_norm"]
        if reads.count(weight) > 1:
            raise UnsupportedModelError(
                f"{weight!r} is shared by several convolutions, each with a batch norm of its own: they cannot be folded "
                "into one weight. Export with --safetensors, or train with --no-unfold-bn."
            )
        gamma, beta, mean, variance = (
            folded.pop(f"{prefix}.{leaf}").astype(np.float64)
            for leaf in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma / np.sqrt(variance + entry["eps"])
        bias = (beta - mean * scale).astype(np.float32)
        folded[weight] = (folded[weight] * scale.reshape(-1, 1, 1, 1)).astype(np.float32)
        if entry["bias"]:
            folded[entry["bias"]] = bias.reshape(-1, 1, 1)
        else:
            added[weight] = bias
    return folded, added
