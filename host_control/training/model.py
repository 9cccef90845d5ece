"""The model of a run: --model with the channels, size and classes of the data."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cross.errors import UsageError
from host_control.console import Console
from host_control.preparation import UNFOLD_SAMPLES, import_model
from host_control.training.data import check_classes, check_shape, first_samples

if TYPE_CHECKING:
    from cross.graph import Model
    from host_control.data import PackedDataSet


def model_for(args: argparse.Namespace, data: PackedDataSet, console: Console) -> Model:
    """--model with the data's channels, size and classes."""
    check_classes(args, data)
    if args.loss != "cross_entropy":
        raise UsageError(
            f"--loss {args.loss} needs targets like the output, and {data.source} has labels. Leave it out."
        )
    if args.input_shape is not None:
        check_shape(args.input_shape, data)
    samples = first_samples(data, UNFOLD_SAMPLES) if data.kind == "images" else None
    model = import_model(args, console, input_shape=data.shape, classes=len(data.classes), samples=samples)
    check_shape(model.input_shape, data)
    return model
