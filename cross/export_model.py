"""The way home: trained weights -> an ONNX file with the user's own names and structure, or a fresh one for the zoo."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from cross.errors import FileError, NoSpaceError, TasteError, UnsupportedModelError, UsageError
from cross.graph import Model
from cross.load_model import load_model
from cross.onnx_export.classes import resize_behind
from cross.onnx_export.fold import fold_batch_norms
from cross.onnx_export.inference_form import to_inference_form
from cross.onnx_export.undo import Resized
from cross.onnx_export.write_back import WeightStore, inlined
from cross.onnx_import.evaluate import forward
from cross.onnx_import.read import has_external_data, read_model
from cross.zoo import ZOO

Array = np.ndarray[Any, np.dtype[Any]]

EMBEDDED_BYTES = 16 << 20
"""Weights of a file with external data are embedded below this size."""

_LARGEST_FILE_BYTES = 2_000_000_000
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 3e-2
"""Of the largest logit: weights of a float16 file are rounded to its own width."""


@dataclass(frozen=True)
class Exported:
    """The files written, their bytes, and how many tensors hold trained values."""

    files: tuple[Path, ...]
    size_bytes: int
    tensors: int


def export_model(model: Model, source: str | Path, out: Path, properties: Mapping[str, Any]) -> Exported:
    """Write `model`'s weights into the ONNX file `source` (or the zoo model of that name) as `out`, in inference form.

    `properties` go to the file's metadata, values other than text as JSON. Weights stay beside the file where the
    source keeps them so and they are large. The written file is imported again and must compute what `model` does.
    Raises UsageError where `out` is the source, FileError, NoSpaceError, UnsupportedModelError.
    """
    zoo = str(source) in ZOO
    if not zoo and out.resolve() == Path(source).resolve():
        raise UsageError(f"{out} is the model itself, which later exports need as it is. Choose another name.")
    proto = ZOO[str(source)].build(model.input_shape, model.classes) if zoo else read_model(Path(source))
    written, count = write_weights_into(proto, model)
    set_properties(written, properties)
    beside = not zoo and has_external_data(Path(source)) and written.ByteSize() >= EMBEDDED_BYTES
    with _explained(out), tempfile.TemporaryDirectory(prefix=".export-", dir=_folder(out)) as folder:
        names = _save(written, Path(folder) / out.name, beside or written.ByteSize() > _LARGEST_FILE_BYTES)
        check_same_function(model, Path(folder) / out.name, half=_is_half(written))
        size = sum((Path(folder) / name).stat().st_size for name in names)
        # The data first: the old file with new data, or a new file without data, must not be seen.
        for name in reversed(names):
            shutil.move(Path(folder) / name, out.parent / name)
    return Exported(tuple(out.parent / name for name in names), size, count)


def write_weights_into(proto: onnx.ModelProto, model: Model) -> tuple[onnx.ModelProto, int]:
    """A copy of `proto`, from which `model` was imported, with the weights of `model`; and how many tensors they are."""
    proto = inlined(proto)
    store = WeightStore(proto.graph)
    tensors, added = fold_batch_norms(model, {**model.parameters, **model.states})
    replaced: Mapping[str, int] = model.metadata["replaced"]
    old = int(model.metadata["file_classes"])
    for name, array in tensors.items():
        resized = Resized(replaced[name], old, model.classes) if name in replaced else None
        store.write(name, array, model.origins[name], resized)
    for name, bias in added.items():
        store.add_bias(model.origins[name], f"{name}/bias", bias)
    to_inference_form(store)
    if replaced:
        resize_behind(proto.graph, [model.origins[name] for name in replaced], old, model.classes)
    return proto, len(tensors)


def set_properties(proto: onnx.ModelProto, properties: Mapping[str, Any]) -> None:
    """Put `properties` into metadata_props; what has the same key goes, everything else stays."""
    for entry in [entry for entry in proto.metadata_props if entry.key in properties]:
        proto.metadata_props.remove(entry)
    for key, value in properties.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            proto.metadata_props.append(onnx.StringStringEntryProto(key=key, value=text))


def check_same_function(model: Model, file: Path, *, half: bool = False) -> None:
    """Import the written file and compare logits of two random samples; TasteError where they differ."""
    names = {"input_name": model.metadata["source_input"], "output_name": model.metadata["source_output"]}
    back = load_model(file, input_shape=model.input_shape, **names)
    x = _random_samples(model)
    ours, theirs = _logits(model, x), _logits(back, x)
    limit = (_HALF_TOLERANCE if half else _TOLERANCE) * max(float(np.abs(ours).max()), 1e-6)
    if ours.shape != theirs.shape or not np.abs(ours - theirs).max() <= limit:
        found = f"{np.abs(ours - theirs).max():.2g}" if ours.shape == theirs.shape else f"shape {list(theirs.shape)}"
        raise TasteError(
            f"the exported file does not compute what the model does (difference {found}, limit {limit:.2g}): nothing "
            "was written. Report this as a bug with the model; --safetensors exports the weights alone."
        )


def _random_samples(model: Model) -> Array:
    """Two samples: noise, or tokens where the input is looked up in a table."""
    random, tables = np.random.default_rng(0), [n.inputs[1] for n in model.nodes if n.op == "embedding"]
    if tables:
        return random.integers(0, len(model.parameters[tables[0]]), (2, *model.input_shape)).astype(np.uint8)
    return random.standard_normal((2, *model.input_shape)).astype(np.float32)


def _logits(model: Model, x: Array) -> Array:
    result = x
    for _, _, result in forward(model, x):  # noqa: B007  the last output is what is wanted
        pass
    return result


def with_tensors(model: Model, tensors: Mapping[str, Array]) -> Model:
    """`model` with the parameters and states of `tensors` (all must be there)."""
    missing = [name for name in (*model.parameters, *model.states) if name not in tensors]
    if missing:
        raise UnsupportedModelError(f"{len(missing)} tensors have no trained value, {missing[0]!r} first. Train again.")
    return replace(
        model,
        parameters={name: tensors[name] for name in model.parameters},
        states={name: tensors[name] for name in model.states},
    )


def _is_half(proto: onnx.ModelProto) -> bool:
    halves = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    return any(tensor.data_type in halves for tensor in proto.graph.initializer)


def _save(proto: onnx.ModelProto, path: Path, beside: bool) -> list[str]:
    """Write the file, with its weights beside it where asked; the names of what was written, the file first."""
    if not beside:
        path.write_bytes(proto.SerializeToString())
        return [path.name]
    data = f"{path.name}.data"
    onnx.save_model(proto, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=data)
    return [path.name, data]


def _folder(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.parent


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno == 28 else FileError
        raise kind(f"cannot write {out}: {error.strerror}. Free space, or choose another place.") from error
