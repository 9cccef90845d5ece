"""The packed format, one file a split (docs/data.md), and its reader, which trusts nothing in the files."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError, safe_open

from cross.errors import CorruptInputError, UsageError
from host_control.data.data_set import PackOptions, Resize

FORMAT = "taste-data 1"
TRAIN, TEST = "train.safetensors", "test.safetensors"
MAX_HEADER_BYTES = 2**22
"""As much as the board reads."""

_REQUIRED = ("format", "split", "classes", "source", "sha256", "metadata_sha256")
_OF_ONE_SPLIT = ("split", "skipped", "sha256", "metadata_sha256")
_DIGEST_CHUNK = 2**22


@dataclass(frozen=True)
class PackedSplit:
    """One file. `shape` of x with N in front; `counts` of every class (of text: nothing); `sha256` of the data section;
    `skipped` bad samples were left out; `domain_counts` of every domain."""

    path: Path
    shape: tuple[int, ...]
    counts: tuple[int, ...]
    sha256: str
    bytes: int
    skipped: int
    domain_counts: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """N"""
        return self.shape[0]


@dataclass(frozen=True)
class PackedDataSet:
    """A packed folder. `shape` of one sample is (C,H,W), or (T,) of text; `mean` and `std` a plane each, empty for text. `domains`:
    names, none where nothing tells samples apart beside their classes."""

    folder: Path
    source: str
    kind: Literal["images", "text"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    planes: str
    resize: Resize
    train: PackedSplit
    test: PackedSplit | None
    domains: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.train.shape[1:]

    @property
    def sha256(self) -> str:
        """Of the contents of both splits."""
        parts = [self.train.sha256] + ([self.test.sha256] if self.test else [])
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def options(self) -> PackOptions:
        """How another image is prepared for a model that was trained on this data."""
        if self.kind == "text":
            raise UsageError(f"{self.folder} holds text, not images. Give data of images.")
        _, height, width = self.shape
        return PackOptions(
            size=(height, width),
            resize=self.resize,
            mean=self.mean,
            std=self.std,
            bgr=self.planes == "BGR",
            gray=self.planes == "gray",
        )


@dataclass(frozen=True)
class _File:
    """One split as its file gives it."""

    split: PackedSplit
    metadata: dict[str, Any]


def is_packed(folder: Path) -> bool:
    """Whether a folder holds packed data; says nothing of its state."""
    return (folder / TRAIN).is_file()


def open_packed(folder: Path, verify: bool = True) -> PackedDataSet:
    """A packed folder, checked; with `verify` its contents are hashed too. CorruptInputError (14) names what is wrong."""
    folder = Path(folder)
    if not is_packed(folder):
        raise UsageError(f"{folder} holds no {TRAIN}. Make it with `data pack`.")
    train = _read(folder / TRAIN, "train", verify)
    test = _read(folder / TEST, "test", verify) if (folder / TEST).exists() else None
    if test is not None:
        differing = [
            key for key in train.metadata if key not in _OF_ONE_SPLIT and train.metadata[key] != test.metadata.get(key)
        ]
        if differing or train.split.shape[1:] != test.split.shape[1:]:
            raise _damaged(folder, f"train and test disagree in {', '.join(differing) or 'the shape of a sample'}")
    facts = train.metadata
    return PackedDataSet(
        folder=folder,
        source=facts["source"],
        kind="images" if len(train.split.shape) == 4 else "text",
        classes=tuple(facts["classes"]),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        planes=facts["planes"],
        resize=facts["resize"],
        train=train.split,
        test=test.split if test else None,
        domains=tuple(facts["domains"]),
    )


def _damaged(path: Path, what: str) -> CorruptInputError:
    return CorruptInputError(f"{path} is damaged: {what}. Pack the data again.")


def _read(path: Path, split: str, verify: bool) -> _File:
    try:
        with safe_open(path, framework="numpy") as file:
            if set(file.keys()) - {"domain"} != {"x", "y"}:
                raise _damaged(path, "it does not hold the tensors x and y")
            x, y = file.get_slice("x"), file.get_slice("y")
            forms = ((x.get_dtype(), tuple(x.get_shape())), (y.get_dtype(), tuple(y.get_shape())))
            facts = _metadata(path, file.metadata() or {}, split)
            counts = _counts(path, forms, facts, file)
            domain_counts = _domain_counts(path, forms[0][1][0], facts["domains"], file)
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())) from error
    if verify and data_sha256(path) != facts["sha256"]:
        raise _damaged(path, "its contents do not have the hash that it names")
    shape = forms[0][1]
    size, skipped = path.stat().st_size, int(facts["skipped"])
    return _File(PackedSplit(path, shape, counts, facts["sha256"], size, skipped, domain_counts), facts)


def _metadata(path: Path, raw: dict[str, str], split: str) -> dict[str, Any]:
    """The metadata with lists parsed, each checked for its type and range."""
    if raw.get("format") != FORMAT:
        raise _damaged(path, f"its format is {raw.get('format')!r}, not {FORMAT!r}")
    missing = [name for name in _REQUIRED if name not in raw]
    if missing or raw["split"] != split:
        raise _damaged(path, f"its metadata lack {missing[0]}" if missing else f"its split is {raw['split']!r}")
    if metadata_sha256(raw) != raw["metadata_sha256"]:
        raise _damaged(path, "its metadata do not have the hash that they name")
    facts: dict[str, Any] = dict(raw)
    for name in ("classes", "domains", "mean", "std"):
        facts[name] = json.loads(raw.get(name, "[]"))
        kind = str if name in ("classes", "domains") else int | float
        if not isinstance(facts[name], list) or not all(isinstance(item, kind) for item in facts[name]):
            raise _damaged(path, f"its {name} are no list of values")
    facts["skipped"] = raw.get("skipped", "0")
    if not facts["skipped"].isascii() or not facts["skipped"].isdecimal() or len(facts["skipped"]) > 18:
        raise _damaged(path, f"its skipped is {facts['skipped'][:20]!r}, not a number")
    facts["planes"] = raw.get("planes", "")
    facts["resize"] = raw.get("resize", "crop")
    if facts["planes"] not in ("", "gray", "RGB", "BGR") or facts["resize"] not in get_args(Resize):
        raise _damaged(path, f"its planes are {facts['planes']!r}, resized by {facts['resize']!r}")
    if len(facts["classes"]) < 2 or not all(map(math.isfinite, facts["mean"] + facts["std"])):
        raise _damaged(path, "its classes, mean or std make no sense")
    return facts


def _counts(
    path: Path, forms: tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]], facts: dict[str, Any], file: Any
) -> tuple[int, ...]:
    """Samples of every class; checks types, shapes and labels on the way."""
    (x_type, x_shape), (y_type, y_shape) = forms
    images = x_type == "U8" and len(x_shape) == 4 and y_type == "I32" and y_shape == x_shape[:1]
    text = x_type == "U8" and len(x_shape) == 2 and y_type == "U8" and y_shape == x_shape
    if not (images or text) or min(x_shape) < 1:
        raise _damaged(path, f"x is {x_type} {list(x_shape)} and y {y_type} {list(y_shape)}")
    classes = len(facts["classes"])
    planes = x_shape[1] if images else 0
    named = {"gray": 1, "": 0}.get(facts["planes"], 3)
    if not len(facts["mean"]) == len(facts["std"]) == planes == named or any(value <= 0 for value in facts["std"]):
        raise _damaged(path, f"mean and std do not fit its {planes} planes")
    # Of text the tokens of y are those of x but for the last of each row.
    labels = file.get_tensor("y")
    tokens = labels if images else np.concatenate([labels.max(axis=1), file.get_tensor("x").max(axis=1)])
    if tokens.min() < 0 or tokens.max() >= classes:
        raise _damaged(path, f"a label is {int(tokens.max())}, and there are {classes} classes")
    return tuple(np.bincount(labels, minlength=classes).tolist()) if images else ()


def _domain_counts(path: Path, count: int, domains: list[str], file: Any) -> tuple[int, ...]:
    """Samples of every domain; there are names where there is the tensor, and the other way round."""
    if ("domain" in file.keys()) != bool(domains):
        raise _damaged(path, f"it names {len(domains)} domains and its tensors are {', '.join(file.keys())}")
    if not domains:
        return ()
    values = file.get_tensor("domain")
    if values.dtype != np.int32 or values.shape != (count,) or values.min() < 0 or values.max() >= len(domains):
        raise _damaged(path, f"its domains are {values.dtype} {list(values.shape)}, and there are {len(domains)} names")
    return tuple(np.bincount(values, minlength=len(domains)).tolist())


def metadata_sha256(metadata: dict[str, str]) -> str:
    """SHA-256 of the lines `name=value` of all other metadata, sorted by name, hex."""
    lines = (f"{name}={value}\n" for name, value in sorted(metadata.items()) if name != "metadata_sha256")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def data_sha256(path: Path) -> str:
    """SHA-256 of the data section of a safetensors file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + header)
        while chunk := file.read(_DIGEST_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
