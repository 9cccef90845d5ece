"""Which parameters a build trains: `--trainable all | head | last:K | norms | REGEX`.

What is chosen here decides the backward graph: a frozen tensor has no gradient, and backward ends where nothing below it
is trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from cross.classifier import classifier_parameters
from cross.errors import UsageError
from cross.graph import Model

NORMS = ("batch_norm", "layer_norm")
"""Operators whose inputs 1 and 2 are gamma and beta."""

_EXAMPLES = 8


def choose_trainable(model: Model, trainable: str) -> frozenset[str]:
    """Names of the parameters that `trainable` stands for; never none.

    'all'; 'head': the classifier; 'last:K': of the last K blocks; 'norms': gammas and betas of batch and layer norms;
    anything else is a regular expression that is searched in every name. Raises UsageError where nothing matches.
    """
    if trainable == "all":
        return frozenset(model.parameters)
    if trainable == "head":
        return frozenset(classifier_parameters(model))
    if trainable == "norms":
        return _norms(model)
    if trainable.startswith("last:"):
        return _last_blocks(model, trainable.removeprefix("last:"))
    try:
        pattern = re.compile(trainable or "(?!)")  # an empty word names nothing
    except re.error as error:
        raise UsageError(
            f"--trainable {trainable!r} is no regular expression: {error}. Use all, head, last:K, norms or one."
        ) from error
    return _checked(model, (name for name in model.parameters if pattern.search(name)), f"matches {trainable!r}")


def frozen_norms(model: Model, trained: frozenset[str]) -> frozenset[str]:
    """Outputs of the batch norms that keep to their running statistics: those in blocks where nothing is trained.

    In a block that trains, a frozen gamma or beta stays as it is, but statistics follow the convolutions before it.
    """
    live = {node.block for node in model.nodes if trained.intersection(node.inputs)}
    return batch_norms(model) - {output for node in model.nodes if node.block in live for output in node.outputs}


def batch_norms(model: Model) -> frozenset[str]:
    """Outputs of all batch norms."""
    return frozenset(node.outputs[0] for node in model.nodes if node.op == "batch_norm")


def _norms(model: Model) -> frozenset[str]:
    scales = (name for node in model.nodes if node.op in NORMS for name in node.inputs[1:3])
    return _checked(model, (name for name in scales if name in model.parameters), "belongs to a batch or layer norm")


def _last_blocks(model: Model, count: str) -> frozenset[str]:
    blocks = len(model.blocks)
    if not count.isdecimal() or not 1 <= int(count) <= blocks:
        raise UsageError(f"--trainable last:{count}: {model.name} has {blocks} blocks. Give last:1 to last:{blocks}.")
    reads = (name for node in model.nodes if node.block >= blocks - int(count) for name in node.inputs)
    return _checked(model, (name for name in reads if name in model.parameters), f"is in its last {count} blocks")


def _checked(model: Model, names: Iterable[str], what: str) -> frozenset[str]:
    chosen = frozenset(names)
    if not chosen:
        some = ", ".join(list(model.parameters)[:_EXAMPLES])
        more = f" and {len(model.parameters) - _EXAMPLES} more" if len(model.parameters) > _EXAMPLES else ""
        raise UsageError(f"--trainable: no parameter of {model.name} {what}. It has {some}{more}.")
    return chosen
