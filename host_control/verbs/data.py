"""data sets: pack one for the board, look into one, or fetch a public one"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import UsageError
from host_control.console import Console, mib
from host_control.flags import add_data_flags, add_output_flags, not_negative, pack_options

if TYPE_CHECKING:
    from host_control.data import DataSet, PackedDataSet

_FETCHED = ("cifar10", "cifar100", "tiny-imagenet", "fashion-mnist")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    pack = actions.add_parser("pack", help="decode a data set once, into the form that boards read")
    add_data_flags(pack, required=True)
    pack.add_argument("--seed", type=not_negative, default=0, help="which samples are held out (default: 0)")
    inspect = actions.add_parser("inspect", help="splits, shapes, classes and hash of a packed folder or of a source")
    inspect.add_argument("source", metavar="DIR|SOURCE", help="a packed folder, or whatever --data takes")
    fetch = actions.add_parser("fetch", help="download a public data set, checked")
    fetch.add_argument("name", choices=_FETCHED)
    for action in (pack, inspect, fetch):
        add_output_flags(action)


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    if args.action == "inspect":
        return _inspect(args, console)
    if args.out is None:
        raise UsageError(f"data {args.action} needs --out DIR. Name the folder to make.")
    return _pack(args, console) if args.action == "pack" else _fetch(args, console)


def _pack(args: argparse.Namespace, console: Console) -> int:
    from host_control.data import pack, read_data_set

    options = pack_options(args)
    data_set = read_data_set(args.data, options)
    for note in data_set.notes:
        console.line(note)
    with console.progress("packing") as report:
        packed = pack(data_set, args.out, options, report)
    _print_skipped(packed.skipped, console)
    _print_packed(packed.data, console)
    console.result(
        "data", {"action": "pack", **_fields(packed.data), "notes": data_set.notes, "skipped": packed.skipped}
    )
    return 0


def _print_skipped(skipped: tuple[str, ...], console: Console) -> None:
    for line in skipped[:5]:
        console.line(f"left out: {line.partition('. Repair')[0]}")
    if skipped:
        console.line(f"{len(skipped)} bad samples are left out (--skip-bad)")


def _inspect(args: argparse.Namespace, console: Console) -> int:
    from host_control.data import PackOptions, open_packed, read_data_set
    from host_control.data.packed import is_packed

    source = Path(args.source)
    if is_packed(source):
        packed = open_packed(source)
        _print_packed(packed, console)
        console.result("data", {"action": "inspect", **_fields(packed), "verified": True})
        return 0
    data_set = read_data_set(args.source, PackOptions())
    shape = _shape_of_first(data_set)
    console.line(f"{data_set.source} (not packed), first sample of {'x'.join(map(str, shape))}")
    for note in data_set.notes:
        console.line(note)
    counts = _source_counts(data_set)
    _print_counts(data_set.classes, counts, console)
    fields: dict[str, Any] = {
        "format": data_set.format,
        "source": data_set.source,
        "kind": data_set.kind,
        "notes": data_set.notes,
    }
    fields |= {"first_shape": shape}
    splits = {name: {"samples": samples, "counts": counts.get(name)} for name, samples in _sizes(data_set).items()}
    console.result("data", {"action": "inspect", **fields, "classes": data_set.classes, "splits": splits})
    return 0


def _shape_of_first(data_set: DataSet) -> tuple[int, ...]:
    """(C,H,W) of the first training sample as it is, or (T,)."""
    from host_control.data import PackOptions
    from host_control.data.images import prepare

    return prepare(data_set.train.sample(0), PackOptions(), data_set.train.name(0)).shape


def _sizes(data_set: DataSet) -> dict[str, int]:
    return {"train": len(data_set.train)} | ({"test": len(data_set.test)} if data_set.test else {})


def _source_counts(data_set: DataSet) -> dict[str, list[int]]:
    import numpy as np

    splits = {"train": data_set.train, "test": data_set.test}
    return {
        name: np.bincount(split.labels, minlength=len(data_set.classes)).tolist()
        for name, split in splits.items()
        if split is not None and data_set.kind == "images"
    }


def _fetch(args: argparse.Namespace, console: Console) -> int:
    from host_control.data.fetch import ARCHIVES, fetch

    with console.progress(f"fetching {args.name}") as report:
        received = fetch(ARCHIVES[args.name], args.out, report)
    console.line(f"{args.out}: use it as --data {args.out}")
    console.result("data", {"action": "fetch", "name": args.name, "out": str(args.out), "received_bytes": received})
    return 0


def _print_packed(data: PackedDataSet, console: Console) -> None:
    console.line(f"{data.folder}: {data.source}, samples of {'x'.join(map(str, data.shape))}")
    splits = [split for split in (data.train, data.test) if split]
    rows = [
        [split.path.stem, f"{split.samples:,}", f"{split.skipped:,}", mib(split.bytes), split.sha256[:16]]
        for split in splits
    ]
    heads = [("split", "left"), ("samples", "right"), ("left out", "right"), ("size", "right"), ("SHA-256", "left")]
    console.table(heads, rows)
    if data.kind == "images":
        planes = ["gray"] if len(data.mean) == 1 else list(data.planes)
        table = [[p, f"{m:.4f}", f"{s:.4f}"] for p, m, s in zip(planes, data.mean, data.std, strict=True)]
        console.table([("plane", "left"), ("mean", "right"), ("std", "right")], table)
    _print_counts(data.classes, {split.path.stem: list(split.counts) for split in splits if split.counts}, console)
    if data.domains:
        counts = {split.path.stem: list(split.domain_counts) for split in splits}
        _print_counts(data.domains, counts, console, "domain")


def _print_counts(
    classes: tuple[str, ...], counts: dict[str, list[int]], console: Console, what: str = "class"
) -> None:
    """A row a class, or a domain; characters of a text in one line."""
    if not counts:
        console.line(f"{len(classes)} characters: {''.join(classes)!r}")
        return
    columns = [(what, "right"), ("name", "left"), *((name, "right") for name in counts)]
    rows = [[str(index), name, *(f"{part[index]:,}" for part in counts.values())] for index, name in enumerate(classes)]
    console.table(columns, rows)


def _fields(data: PackedDataSet) -> dict[str, Any]:
    """A packed data set in the result of a verb."""
    splits = {
        split.path.stem: {
            "path": str(split.path),
            "samples": split.samples,
            "counts": split.counts,
            "bytes": split.bytes,
            "sha256": split.sha256,
            "skipped": split.skipped,
            "domain_counts": split.domain_counts,
        }
        for split in (data.train, data.test)
        if split
    }
    names = ("source", "kind", "shape", "classes", "mean", "std", "planes", "resize", "domains", "sha256")
    return {"out": str(data.folder), **{name: getattr(data, name) for name in names}, "splits": splits}
