"""Read an ONNX file that may be broken or hostile: nothing outside its folder is opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx.external_data_helper import load_external_data_for_model

from cross.errors import CorruptInputError, FileError, SecurityError

_EXPORT_HINTS = {
    "PyTorch": (
        (".pt", ".pth", ".ckpt", ".bin"),
        "in Python, torch.onnx.export(model.eval(), (torch.zeros(1, 3, 32, 32),), 'model.onnx')",
    ),
    "Keras or TensorFlow": (
        (".h5", ".keras", ".pb", ".tflite"),
        "python -m tf2onnx.convert --keras FILE --output model.onnx (or --tflite, --graphdef)",
    ),
    "safetensors": ((".safetensors",), "a weights file has no graph: export the model to ONNX, give this to --weights"),
}


def read_model(path: Path) -> onnx.ModelProto:
    """The parsed file, external data loaded.

    Raises CorruptInputError (not ONNX, truncated, external data missing or short), SecurityError (external data
    outside the model's folder), FileError (cannot be read).
    """
    if path.is_dir():
        raise CorruptInputError(f"{path} is a folder, not an ONNX file. Give the .onnx file inside it.")
    _refuse_other_formats(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}. Check its permissions.") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf has errors of its own, some of them RuntimeError
        raise _not_onnx(path, len(data), "it does not parse") from error
    if not model.graph.node or not model.graph.output or not model.opset_import:
        raise _not_onnx(path, len(data), "it holds no graph")
    _load_external_data(model, path)
    return model


def has_external_data(path: Path) -> bool:
    """Whether the readable ONNX file keeps weights in another file."""
    model = onnx.load(str(path), load_external_data=False)
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _tensors(model.graph))


def read_properties(path: Path) -> dict[str, str]:
    """metadata_props of an ONNX file; nothing where it cannot be read, which `read_model` explains."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception:  # noqa: BLE001  protobuf has errors of its own
        return {}
    return {entry.key: entry.value for entry in model.metadata_props}


def _not_onnx(path: Path, size: int, reason: str) -> CorruptInputError:
    return CorruptInputError(f"{path} ({size} bytes) is not a valid ONNX model: {reason}. Copy or export it again.")


def _refuse_other_formats(path: Path) -> None:
    for framework, (suffixes, how) in _EXPORT_HINTS.items():
        if path.suffix.lower() in suffixes:
            raise CorruptInputError(f"{path} is a {framework} file, not ONNX. Export it: {how}.")


def _load_external_data(model: onnx.ModelProto, path: Path) -> None:
    folder = path.parent
    found = False
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_location(tensor, folder, path)
            found = True
    if not found:
        return
    try:
        load_external_data_for_model(model, str(folder))
    except onnx.checker.ValidationError as error:
        raise SecurityError(f"{path}: external data refused: {_first_line(error)}. Export the model again.") from error
    except (OSError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise CorruptInputError(
            f"{path}: external data is broken: {_first_line(error)}. Copy the data file again or export again."
        ) from error


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that may keep its data elsewhere: initializers, and attributes of nodes, in subgraphs too."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _check_location(tensor: onnx.TensorProto, folder: Path, path: Path) -> None:
    """The tensor's data file is a plain file inside the model's folder, and long enough."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location:
        raise CorruptInputError(f"{path}: tensor {tensor.name!r} has no data file. Export the model again.")
    target = folder / location
    outside = Path(location).is_absolute() or ".." in Path(location).parts or "\\" in location or "\0" in location
    if outside or not target.resolve().is_relative_to(folder.resolve()):
        raise SecurityError(
            f"{path}: weights file {location!r} is outside the model's folder. Export with the data beside the model."
        )
    if not target.is_file():
        raise CorruptInputError(f"{path}: its weights file {location} is missing. Copy it beside the model.")
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0"))
    except ValueError as error:
        raise CorruptInputError(
            f"{path}: tensor {tensor.name!r} has a broken offset. Export the model again."
        ) from error
    size = target.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        raise CorruptInputError(
            f"{path}: {tensor.name!r} ends at byte {offset + length} of {location} ({size} bytes). Copy it again."
        )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
