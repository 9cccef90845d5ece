"""trained weights as an ONNX file (your own, names and structure kept) or as safetensors"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import UsageError
from host_control.console import Console, mib
from host_control.flags import add_model_flags, not_negative
from host_control.preparation import import_model
from host_control.run_folder import RunFolder, write_whole
from host_control.training.record import Run, read_run

if TYPE_CHECKING:
    from cross.graph import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", dest="run_folder", type=Path, metavar="DIR", help="a folder that `train` left")
    add_model_flags(parser, required=False)
    parser.add_argument("--seed", type=not_negative, default=0, help="seed of --init seeded (default: 0)")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--onnx", type=Path, metavar="FILE", help="write an ONNX file")
    kinds.add_argument("--safetensors", type=Path, metavar="FILE", help="write the weights alone")


def run(args: argparse.Namespace) -> int:
    """Import the model with its trained weights and write it; an ONNX file is imported again and compared."""
    console = Console(args.json)
    if (args.run_folder is None) == (args.weights is None):
        raise UsageError("no weights to export. Give --run DIR, or --weights FILE with --model M, not both.")
    if args.run_folder is None and args.model is None:
        raise UsageError("whose weights are these? Give --model M, as it was trained.")
    trained = read_run(args.run_folder) if args.run_folder is not None else None
    if trained is not None:
        wanted = argparse.Namespace(**{**trained.options["flags"], **trained.model_arguments()})
        _check_source(trained)
    else:
        wanted = args
    # What import says of the file was said when it was trained.
    model = import_model(wanted, Console(json_lines=True, stream=io.StringIO()))
    properties = _properties(trained, model)
    files, size, tensors = _write(args, model, str(wanted.model), properties)
    fields: dict[str, Any] = {
        "files": [str(file) for file in files],
        "bytes": size,
        "tensors": tensors,
        "classes": len(trained.classes) if trained else model.classes,
        "softmax": bool(args.onnx and model.metadata["softmax_removed"]),
    }
    console.line(f"{', '.join(map(str, files))}: {tensors} trained tensors, {mib(size)}")
    if args.onnx and model.metadata["softmax_removed"]:
        console.line(f"the file ends with its own {model.metadata['softmax']}, as before: its outputs are not logits")
    if args.out is not None:
        with RunFolder(args.out) as folder:
            folder.write_json("result.json", {"verb": "export", **fields})
    console.result("export", fields)
    return 0


def _write(
    args: argparse.Namespace, model: Model, source: str, properties: dict[str, Any]
) -> tuple[tuple[Path, ...], int, int]:
    """Write the file asked for: the files, their bytes, how many tensors."""
    import json

    from safetensors.numpy import save

    target: Path = args.onnx or args.safetensors
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Name a file to write.")
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is there and not a regular file. Name another.")
    if args.onnx is not None:
        from cross.export_model import export_model

        done = export_model(model, source, args.onnx, properties)
        return done.files, done.size_bytes, done.tensors
    tensors = {**model.parameters, **model.states}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in properties.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, save(tensors, metadata))
    return (target,), target.stat().st_size, len(tensors)


def _properties(run: Run | None, model: Model) -> dict[str, Any]:
    """Class names and normalisation, under keys that `train` reads again."""
    if run is None:
        return {"input_layout": model.metadata["input_layout"]}
    data = run.options["data"]
    known = {"classes": data["classes"]}
    if data["kind"] == "images":
        known |= {"mean": data["mean"], "std": data["std"], "planes": data["planes"]}
        known |= {"input_layout": model.metadata["input_layout"]}
    return known


def _check_source(run: Run) -> None:
    """The user's file must be the one that was trained: its structure is what is written."""
    import hashlib

    known = run.options["model"]
    if known["sha256"] is None:
        return
    path = Path(known["path"])
    if not path.is_file():
        raise UsageError(
            f"{path}, the model that was trained, is not there any more. Put it back, or use --safetensors."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != known["sha256"]:
        raise UsageError(
            f"{path} has changed since it was trained (SHA-256 {found[:16]}..., then {known['sha256'][:16]}...). "
            "Put the old file back, or give --model and --weights."
        )
