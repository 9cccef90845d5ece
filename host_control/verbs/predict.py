"""classes of images, by a trained model"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cross.errors import UsageError
from host_control.console import Console
from host_control.data import PackOptions, decode_images
from host_control.flags import add_board_flags, positive
from host_control.preparation import deployed, opened_board
from host_control.run_folder import RunFolder
from host_control.training.data import normalised
from host_control.training.inference import evaluator_of_run, probabilities
from host_control.training.record import Run, read_run

_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", dest="run_folder", type=Path, metavar="DIR", required=True, help="a folder that `train` left"
    )
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image files")
    add_board_flags(parser)
    parser.add_argument("--target", metavar="NAME", help="CPU to build for (default: probed from the board)")
    parser.add_argument("--batch-size", type=positive, help="images at a time (default: the run's, at most 16)")
    parser.add_argument("--threads", type=positive, help="threads (default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Prepare the images as the training data were, run them on the board, print the likeliest classes."""
    console = Console(args.json)
    trained = read_run(args.run_folder)
    x = normalised(decode_images(args.images, _pack_options(trained)), *_normalisation(trained))
    with RunFolder(args.out or trained.folder), opened_board(args) as opened:
        evaluator = evaluator_of_run(args, trained, deployed(opened), console)
        shares = probabilities(evaluator.logits(x))
    rows = []
    for path, share in zip(args.images, shares, strict=True):
        order = [int(i) for i in np.argsort(-share, kind="stable")]
        named = [{"class": trained.classes[i], "probability": float(share[i])} for i in order]
        rows.append({"image": str(path), "class": named[0]["class"], "probabilities": named})
        likeliest = ", ".join(f"{item['class']} {item['probability']:.1%}" for item in named[:_SHOWN])
        console.line(f"{path}: {likeliest}")
    console.result("predict", {"predictions": rows})
    return 0


def _pack_options(run: Run) -> PackOptions:
    """How an image becomes a sample of this run."""
    data = run.options["data"]
    if data["kind"] != "images":
        raise UsageError(f"the model of {run.folder} was trained on text: it has no classes of images.")
    return PackOptions(
        size=(data["shape"][1], data["shape"][2]),
        resize=data["resize"],
        bgr=data["planes"] == "BGR",
        gray=data["planes"] == "gray",
    )


def _normalisation(run: Run) -> tuple[list[float], list[float]]:
    return run.options["data"]["mean"], run.options["data"]["std"]
