"""Defaults of training: what a model and a data set get where no flag says otherwise.

| model | optimizer | lr at effective batch 128 | weight decay | clipping |
|---|---|---|---|---|
| fresh weights, batch norm | SGD, momentum 0.9 | 0.1 | 5e-4 | none |
| fresh weights, no batch norm | SGD, momentum 0.9 | 0.01 | 5e-4 | 1.0 |
| trained weights (a file's, or --weights), batch norm | SGD, momentum 0.9 | 0.05 | 5e-4 | 1.0 |
| trained weights, no batch norm | SGD, momentum 0.9 | 0.01 | 5e-4 | 1.0 |
| layer norm (transformers) | AdamW, betas 0.9 and 0.999 | 0.001 | 0.01 | 1.0 |

All: cosine over the run, the first tenth of the steps a linear warm-up. Effective batch 128 (Goyal et al. 2017 and common
CIFAR practice), and less for small sets, so that an epoch has at least EPOCH_UPDATES updates; the learning rate then falls
with the square root of the effective batch. Weights from a file are moved less, and clipped: at 0.1 the first steps would
undo what was trained, and a network without batch norm diverges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cross.graph import Model

EFFECTIVE_BATCH = 128
SMALLEST_EFFECTIVE_BATCH = 8
EPOCH_UPDATES = 16
EPOCHS, MOST_EPOCHS = 10.0, 40.0
RUN_UPDATES = 400
WARMUP = 0.1
MOMENTUM = 0.9


@dataclass(frozen=True)
class Recipe:
    """Defaults for one model; `why` is a line for people. `grad_clip` 0: no clipping."""

    optimizer: str
    lr: float
    weight_decay: float
    grad_clip: float
    why: str


def default_effective_batch(samples: int) -> int:
    """128, or the largest power of two that leaves an epoch EPOCH_UPDATES updates, from 8 up; never more than samples."""
    most = max(samples // EPOCH_UPDATES, 1)
    chosen = min(EFFECTIVE_BATCH, max(SMALLEST_EFFECTIVE_BATCH, 2 ** int(math.log2(most))))
    return int(min(chosen, samples))


def default_epochs(samples: int, effective_batch: int) -> float:
    """10, and more for small sets: as many as give RUN_UPDATES updates, at most 40."""
    updates = -(-samples // effective_batch)
    return float(min(max(EPOCHS, -(-RUN_UPDATES // updates)), MOST_EPOCHS))


def default_recipe(model: Model, *, trained: bool, effective_batch: int) -> Recipe:
    """What `model` is trained with; `trained`: its weights come from a file and are worth keeping."""
    operators = {node.op for node in model.nodes}
    if "layer_norm" in operators:
        chosen = Recipe("adamw", 1e-3, 0.01, 1.0, "a model with layer norm")
    elif trained and "batch_norm" in operators:
        chosen = Recipe("sgd", 0.05, 5e-4, 1.0, "weights that come from a file, with batch norm")
    elif trained:
        chosen = Recipe("sgd", 0.01, 5e-4, 1.0, "weights that come from a file, without batch norm")
    elif "batch_norm" in operators:
        chosen = Recipe("sgd", 0.1, 5e-4, 0.0, "fresh weights with batch norm")
    else:
        chosen = Recipe("sgd", 0.01, 5e-4, 1.0, "fresh weights without batch norm")
    share = min(effective_batch / EFFECTIVE_BATCH, 1.0)
    lr = float(f"{chosen.lr * math.sqrt(share):.3g}")
    return Recipe(chosen.optimizer, lr, chosen.weight_decay, chosen.grad_clip, chosen.why)
