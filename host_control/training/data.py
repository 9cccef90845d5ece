"""The data of a run: packed at the size that the model takes, its classes and normalisation, its first samples."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cross.errors import FreeShapeError, TasteError, UsageError
from cross.zoo import ZOO
from host_control.console import Console
from host_control.data import PackedDataSet, PackOptions, packed_for, read_data_set
from host_control.data.packed import is_packed
from host_control.data.read import find_source
from host_control.flags import pack_options

Array = np.ndarray[Any, np.dtype[Any]]

_LOOKED_AT = 32
_NAMED = 5
_NATIVE_LIMIT = 2
"""Images of one size stay as they are up to so many times the zoo model's usual side: photos from one camera do not."""


def packed_data(args: argparse.Namespace, console: Console) -> PackedDataSet:
    """--data as --model takes it, from the cache where it was packed before; says what it is."""
    shape = _shape_of_model(args)
    own = pack_options(args)
    mean, std = (own.mean, own.std) if own.mean else _normalisation_of(args.model)
    image = shape is not None and len(shape) == 3
    options = replace(
        own,
        size=own.size or ((shape[1], shape[2]) if image and shape else _size_for_zoo(args)),
        mean=mean,
        std=std,
        gray=own.gray or bool(image and shape and shape[0] == 1),
        window=shape[0] if shape and len(shape) == 1 else own.window,
    )
    with console.progress("packing the data") as progress:
        packed = packed_for(args.data, options, report=progress)
    data = packed.data
    if shape and shape[:-2] != data.shape[:-2]:
        check_shape(shape, data)  # sizes may be free, planes are not
    _check_packed_as_asked(args, own, data)
    for line in packed.skipped[:_NAMED]:
        console.line(f"left out: {line.partition('. Repair')[0]}")
    if packed.skipped:
        console.line(f"{len(packed.skipped)} bad samples are left out (--skip-bad)")
        console.event("skipped", count=len(packed.skipped), first=packed.skipped[0])
    console.line(describe(data))
    return data


def _check_packed_as_asked(args: argparse.Namespace, own: PackOptions, data: PackedDataSet) -> None:
    """UsageError where a flag asks for what a folder packed before does not have: it is taken as it is."""
    if data.folder.resolve() != Path(args.data).resolve():
        return
    differs = {
        "--size": own.size is not None and tuple(own.size) != data.shape[1:],
        "--mean and --std": own.mean is not None and (tuple(own.mean), own.std) != (tuple(data.mean), tuple(data.std)),
        "--gray": own.gray and data.planes != "gray",
        "--bgr": own.bgr and data.planes != "BGR",
        "--domain": own.domain is not None and not data.domains,
    }
    for flag in (flag for flag, differ in differs.items() if differ):
        raise UsageError(
            f"{args.data} was packed without this {flag} (samples of {'x'.join(map(str, data.shape))}). "
            f"Leave {flag} out, or pack the data again with it."
        )


def describe(data: PackedDataSet) -> str:
    """One line: samples, shape, classes."""
    test = f", {data.test.samples} to test on" if data.test else ", none to test on"
    size = "x".join(map(str, data.shape))
    names = ", ".join(data.classes[:5]) + (", ..." if len(data.classes) > 5 else "")
    what = f"{len(data.classes)} classes ({names})" if data.kind == "images" else f"{len(data.classes)} characters"
    return f"{data.source}: {data.train.samples} samples of {size} to train on{test}; {what}"


def check_classes(args: argparse.Namespace, data: PackedDataSet) -> None:
    """UsageError where --classes is not the data's number of classes."""
    if args.classes is not None and args.classes != len(data.classes):
        raise UsageError(
            f"--classes {args.classes}, but {data.source} has {len(data.classes)}: {', '.join(data.classes[:8])}"
            f"{', ...' if len(data.classes) > 8 else ''}. Leave --classes out."
        )


def check_shape(model_shape: Sequence[int], data: PackedDataSet) -> None:
    """UsageError where the model takes other samples than the data has."""
    if tuple(model_shape) != data.shape:
        if len(model_shape) != len(data.shape):
            remedy = "Choose a model for such data"
        elif tuple(model_shape[:-2]) != data.shape[:-2]:
            remedy = f"Save images of {model_shape[0]} planes, or choose another model"
        else:
            remedy = "Pack it with --size, or give --input-shape"
        raise UsageError(
            f"the model takes samples of {'x'.join(map(str, model_shape))}, {data.source} is packed as "
            f"{'x'.join(map(str, data.shape))}. {remedy}."
        )


def first_samples(data: PackedDataSet, count: int) -> Array:
    """The first training images as the model sees them, float32 [count, C, H, W]."""
    from safetensors import safe_open

    with safe_open(data.train.path, framework="numpy") as file:
        bytes_ = np.asarray(file.get_slice("x")[: min(count, data.train.samples)])
    return normalised(bytes_, data.mean, data.std)


def normalised(images: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """uint8 [N, C, H, W] -> float32 (x / 255 - mean) / std, in the arithmetic of the board."""
    scale = np.array([1 / (255 * s) for s in std], np.float64).astype(np.float32)
    shift = np.array([-m / s for m, s in zip(mean, std, strict=True)], np.float64).astype(np.float32)
    planes = (1, -1, 1, 1)
    return np.asarray(images.astype(np.float32) * scale.reshape(planes) + shift.reshape(planes))


def _shape_of_model(args: argparse.Namespace) -> tuple[int, ...] | None:
    """What --model takes where that is fixed: --input-shape, or what the file says."""
    if args.input_shape is not None:
        return tuple(args.input_shape)
    if args.model in ZOO:
        return None
    from cross.load_model import load_model

    try:
        return load_model(args.model, input_name=args.input, output_name=args.output).input_shape
    except FreeShapeError:
        return None  # the data decides


def _size_for_zoo(args: argparse.Namespace) -> tuple[int, int] | None:
    """None where the images are of one moderate size and stay as they are, else the zoo model's usual size."""
    source = find_source(args.data)
    if args.model not in ZOO or (source.is_dir() and is_packed(source)):
        return None
    default = ZOO[args.model].default_shape
    found = read_data_set(source, PackOptions(val_split=args.val_split, seed=args.seed))
    if found.kind != "images" or len(default) != 3:
        return None
    sizes = {_size_of(found.train.sample(i)) for i in range(0, len(found.train), -(-len(found.train) // _LOOKED_AT))}
    side = max(max(size) for size in sizes)
    return None if len(sizes) == 1 and side <= _NATIVE_LIMIT * max(default[1:]) else (default[1], default[2])


def _size_of(sample: bytes | Array) -> tuple[int, int]:
    if not isinstance(sample, bytes):
        return sample.shape[-2], sample.shape[-1]
    from host_control.data.images import prepare

    try:
        return prepare(sample, PackOptions(), "image").shape[-2:]
    except TasteError:
        return 0, 0  # packing names it


def _normalisation_of(model: str) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """mean and std of an ONNX file's own metadata (as `export` writes them), or None."""
    from cross.onnx_import.read import read_properties

    if model in ZOO or not Path(model).is_file():
        return None, None
    found = read_properties(Path(model))
    try:
        mean, std = (tuple(float(v) for v in json.loads(found[key])) for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError):
        return None, None
    usable = len(mean) == len(std) > 0 and all(map(math.isfinite, mean)) and all(0 < s < math.inf for s in std)
    return (mean, std) if usable else (None, None)
