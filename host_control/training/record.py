"""What a run folder knows of its run: options.json for people and for `eval`, `predict`, `export`; train.json to go on."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross.errors import CompatibilityError, CorruptInputError, UsageError
from cross.graph import Model
from cross.zoo import ZOO
from host_control.data import PackedDataSet
from host_control.run_folder import RUNS, RunFolder, default_folder, find_resumable, now_utc, read_json

OPTIONS, TRAIN_RECORD, RESULT, WEIGHTS = "options.json", "train.json", "result.json", "weights.safetensors"

_MODEL_FLAGS = "model input_shape classes input output init unfold_bn trainable loss seed target"
_RUN_FLAGS = (
    "data size resize val_split mean std bgr gray skip_bad window board epochs steps effective_batch lr schedule warmup step_every "
    "step_gamma optimizer momentum nesterov beta1 beta2 eps weight_decay no_decay_norm label_smoothing grad_clip "
    "eval_every augment bn_policy bn_time_constant weights batch_schedule effective_batch_start batch_factor interval "
    "effective_batch_cap lr_decay compare seeds"
)


@dataclass(frozen=True)
class Run:
    """A trained run: where, and its options.json."""

    folder: Path
    options: dict[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def classes(self) -> list[str]:
        return list(self.options["data"]["classes"])

    def model_arguments(self) -> dict[str, Any]:
        """The flags that rebuild its model, with the data's shape and classes."""
        flags = dict(self.options["flags"])
        return {name: flags[name] for name in _MODEL_FLAGS.split()} | {
            "model": self.options["model"]["path"],
            "unfold_bn": self.options["model"]["unfold_bn"],
            "input_shape": tuple(self.options["data"]["shape"]),
            "classes": len(self.classes),
            "weights": self.weights,
        }


def run_identity(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that make two commands the same run, as JSON holds them. Batch size and threads may change on the way."""
    return {name: _plain(getattr(args, name)) for name in f"{_MODEL_FLAGS} {_RUN_FLAGS}".split()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def choose_folder(args: argparse.Namespace, identity: dict[str, Any]) -> Path:
    """--out; with --resume the newest unfinished run of these flags; else a new folder."""
    if args.out is not None:
        return Path(args.out)
    if args.resume:
        found = find_resumable(identity, record=TRAIN_RECORD)
        if found is None:
            raise UsageError(f"no unfinished run with these flags in {RUNS}/. Run without --resume to begin one.")
        return found
    return default_folder(args.model, args.board)


def check_goes_on(folder: RunFolder, identity: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """options.json of the run that is in the folder already, or None where it is a new one.

    UsageError where the run is finished or was begun with other flags, or --resume finds nothing to go on with.
    """
    stored = folder.read_json(TRAIN_RECORD)
    if stored is None:
        if resume:
            raise UsageError(f"{folder.path} holds no run to go on with. Leave --resume out to begin one.")
        return None
    if stored.get("complete"):
        raise UsageError(f"the run in {folder.path} is finished. Choose another --out.")
    differing = [name for name in identity if stored.get(name) != identity[name]]
    if differing:
        name = differing[0]
        raise UsageError(
            f"the run in {folder.path} was begun with {_spelled(name, stored.get(name))}, now it is "
            f"{_spelled(name, identity[name])}. Use the same flags, or another --out."
        )
    return folder.read_json(OPTIONS)


def _spelled(name: str, value: Any) -> str:
    """A flag as it is typed: '--lr 0.3', '--nesterov', 'no --lr'."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return f"no {flag}"
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return flag if value is True else f"{flag} {text}"


def check_unchanged(before: dict[str, Any] | None, model: dict[str, Any], data: dict[str, Any]) -> None:
    """CompatibilityError (13) where a run would go on with another model file or other data."""
    for what, now in (("model", model), ("data", data)):
        if before is not None and before[what].get("sha256") != now.get("sha256"):
            raise CompatibilityError(
                f"the {what} is not what the run was begun with: SHA-256 {str(now.get('sha256'))[:16]}..., then "
                f"{str(before[what].get('sha256'))[:16]}... Begin a new run with another --out."
            )


def describe_model(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Which model, the hash of its file, and whether batch norms were put back, for options.json."""
    unfolded = bool(model.metadata.get("unfolded_batch_norm"))
    if args.model in ZOO:
        return {"path": args.model, "sha256": None, "unfold_bn": unfolded}
    path = Path(args.model).resolve()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(path), "sha256": digest, "unfold_bn": unfolded}


def describe_data(data: PackedDataSet) -> dict[str, Any]:
    """What `predict` and `export` need of the data, for options.json."""
    return {
        "source": data.source,
        "folder": str(data.folder),
        "sha256": data.sha256,
        "kind": data.kind,
        "samples": data.train.samples,
        "test_samples": data.test.samples if data.test else 0,
        "shape": list(data.shape),
        "classes": list(data.classes),
        "mean": list(data.mean),
        "std": list(data.std),
        "planes": data.planes,
        "resize": data.resize,
    }


def board_record(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the board keeps of a run for whoever attaches: the command, where it was given, and the run's folder there."""
    return {
        "verb": args.verb,
        "command": list(args.command),
        "directory": os.getcwd(),
        "host": platform.node(),
        "out": os.path.abspath(folder),
        "begun": now_utc(),
    }


def name_on_board(folder: Path) -> str:
    """Of the run's folder there: the same for the same folder of the same host, of letters that can be typed."""
    place = f"{platform.node()}:{os.path.abspath(folder)}"
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(os.path.abspath(folder)).name).lstrip("-.")[:80]
    return f"{plain or 'run'}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"


def read_run(folder: Path) -> Run:
    """A run that has weights; UsageError where it is none or has none yet."""
    file = folder / OPTIONS
    if not file.is_file():
        raise UsageError(f"{folder} is no training run: it has no {OPTIONS}. Name the --out of `train`.")
    held = read_json(file)
    if held.get("flags", {}).get("compare"):
        raise UsageError(f"{folder} is a comparison. Name one of the runs in it, such as {folder}/adabatch-0.")
    if not (folder / WEIGHTS).is_file():
        raise UsageError(
            f"the run in {folder} has no weights yet. Go on with its own `train` command and --out {folder} --resume."
        )
    try:
        run = Run(folder, held)
        run.model_arguments(), run.options["data"]["mean"]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptInputError(f"{file} lacks {error}: it was not written by this version. Train again.") from error
    return run
