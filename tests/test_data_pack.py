"""The packed format: its bytes, what it says about itself, and that it is there whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import save_file

from cross.errors import CorruptInputError, DataError, NoSpaceError, UsageError
from host_control.data import (
    DataSet,
    PackOptions,
    Split,
    decode_images,
    open_packed,
    pack,
    packed_for,
    read_data_set,
)
from host_control.data.packed import metadata_sha256
from host_control.data.packing import mean_and_std
from host_control.data.read import held_out
from tests import data_files as df

X, Y = df.random_images(30, (3, 6, 5)), np.arange(30) % 3
_WHOLE = PackOptions(val_split=0)
_ROOT = Path(__file__).resolve().parent.parent


def _source(root: Path, x: df.Pixels = X) -> Path:
    return df.write_files(root, df.class_folders(x, Y[: len(x)]))


def _pack(source: Path, out: Path, options: PackOptions = _WHOLE) -> Path:
    return pack(read_data_set(source, options), out, options).data.folder


def test_the_bytes_are_those_of_the_documentation(tmp_path: Path) -> None:
    """docs/data.md, read with struct and json alone."""
    data = (_pack(_source(tmp_path / "a"), tmp_path / "b") / "train.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["y"] == {"dtype": "I32", "shape": [30], "data_offsets": [0, 120]}
    assert header["x"] == {"dtype": "U8", "shape": [30, 3, 6, 5], "data_offsets": [120, 120 + X.size]}
    start = 8 + length
    assert start % 4 == 0 and (start + 120) % 64 == 0 and len(data) == start + 120 + X.size
    x, y = df.in_class_order(X, Y)
    assert data[start:] == y.astype("<i4").tobytes() + x.tobytes()
    facts = header["__metadata__"]
    assert facts["format"] == "taste-data 1" and facts["split"] == "train" and facts["planes"] == "RGB"
    assert json.loads(facts["classes"]) == list(df.CLASSES)
    np.testing.assert_allclose(json.loads(facts["mean"]), (X / 255).mean(axis=(0, 2, 3)), rtol=1e-14)
    np.testing.assert_allclose(json.loads(facts["std"]), (X / 255).std(axis=(0, 2, 3)), rtol=1e-12)
    import hashlib

    assert facts["sha256"] == hashlib.sha256(data[start:]).hexdigest()
    lines = "".join(f"{name}={facts[name]}\n" for name in sorted(facts) if name != "metadata_sha256")
    assert facts["metadata_sha256"] == hashlib.sha256(lines.encode()).hexdigest()


def test_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    options = PackOptions(size=(4, 4), seed=3)
    one, two = (_pack(_source(tmp_path / name / "photos"), tmp_path / name / "out", options) for name in "ab")
    for name in ("train.safetensors", "test.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_open_packed_says_what_is_there(tmp_path: Path) -> None:
    options = PackOptions(size=(4, 7), resize="pad", bgr=True, val_split=0.2)
    data = open_packed(_pack(_source(tmp_path / "a"), tmp_path / "b", options))
    assert data.shape == (3, 4, 7) and data.classes == df.CLASSES and data.planes == "BGR" and data.kind == "images"
    assert data.train.counts == (8, 8, 8) and data.test is not None and data.test.counts == (2, 2, 2)
    assert data.train.samples == 24 and data.train.bytes == (tmp_path / "b" / "train.safetensors").stat().st_size
    later = data.options
    assert (later.size, later.resize, later.bgr, later.gray) == ((4, 7), "pad", True, False)


def test_given_mean_and_std_stand_in_the_file(tmp_path: Path) -> None:
    given_options = PackOptions(val_split=0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    data = open_packed(_pack(_source(tmp_path / "a"), tmp_path / "b", given_options))
    assert data.mean == (0.485, 0.456, 0.406) and data.std == (0.229, 0.224, 0.225)
    with pytest.raises(UsageError, match="the images have 3 planes"):
        _pack(tmp_path / "a", tmp_path / "c", PackOptions(mean=(0.5,), std=(0.5,)))
    for mean, std in ((0.5, None), (0.5, 0.0), (float("nan"), 1.0), (123.7, 1.0), (0.5, 58.4)):
        wrong = {"mean": (mean,), "std": (std,) if std is not None else None}
        with pytest.raises(UsageError):
            PackOptions(**wrong)  # type: ignore[arg-type]


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=1, max_side=50)))
def test_mean_and_std_are_numpys(values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    (mean,), (std,) = mean_and_std(np.bincount(values, minlength=256)[None])
    assert mean == pytest.approx((values / 255).mean(), rel=1e-13)
    if (values == values[0]).all():
        assert std == 1.0
    else:
        assert std == pytest.approx((values / 255).std(), rel=1e-9)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.floats(0.01, 0.99), st.integers(0, 5))
def test_held_out_samples_are_a_share_of_every_class(labels: list[int], share: float, seed: int) -> None:
    split = Split(np.array(labels), lambda i: b"", str)
    held = held_out(split, share, seed)
    assert sorted(set(held.tolist())) == held.tolist()
    for label in set(labels):
        members, out = labels.count(label), sum(labels[i] == label for i in held)
        assert out == min(max(round(members * share), 1), members - 1)
    np.testing.assert_array_equal(held, held_out(split, share, seed))


def test_held_out_samples_stay_when_others_are_added() -> None:
    def names(count: int, seed: int) -> set[int]:
        split = Split(np.zeros(count, np.int64), lambda i: b"", str)
        return set(held_out(split, 0.5, seed).tolist())

    before, after = names(100, 1), names(102, 1)
    assert len(before - after) <= 2 and names(100, 2) != before


def test_val_split_is_for_sources_without_one(tmp_path: Path) -> None:
    folders = df.class_folders(X, Y, "train/") | df.class_folders(X[:3], Y[:3], "val/")
    source = df.write_files(tmp_path / "a", folders)
    with pytest.raises(UsageError, match="test split of its own"):
        read_data_set(source, PackOptions(val_split=0.1))
    assert read_data_set(source, PackOptions()).test is not None
    assert read_data_set(_source(tmp_path / "b"), _WHOLE).test is None


def test_val_and_test_beside_each_other_is_said(tmp_path: Path) -> None:
    folders = {
        name: data for split in ("train", "val", "test") for name, data in df.class_folders(X, Y, f"{split}/").items()
    }
    found = read_data_set(df.write_files(tmp_path / "a", folders), PackOptions())
    assert found.notes == ("tested on val; test is left out: pack it apart where you need it",)


def _with_bad_files(root: Path) -> Path:
    source = _source(root)
    (source / "ant" / "000.png").write_bytes(b"no image")
    (source / "cat" / "002.png").write_bytes(df.png(X[2])[:50])
    return source


def test_a_bad_image_is_named_and_skip_bad_counts_it(tmp_path: Path) -> None:
    source = _with_bad_files(tmp_path / "a")
    with pytest.raises(DataError, match=r"ant/000.png cannot be decoded"):
        _pack(source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    options = PackOptions(val_split=0, skip_bad=True)
    packed = pack(read_data_set(source, options), tmp_path / "b", options)
    assert [Path(line.split()[0]).name for line in packed.skipped] == ["000.png", "002.png"]
    seen = open_packed(tmp_path / "b").train
    assert seen.counts == (9, 10, 9) and seen.skipped == 2
    x, y = df.in_class_order(X, Y)
    with safe_open(packed.data.train.path, "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("x"), np.delete(x, [0, 20], 0))
        np.testing.assert_array_equal(file.get_tensor("y"), np.delete(y, [0, 20]))


def test_too_few_good_images_are_an_error(tmp_path: Path) -> None:
    source = df.write_files(tmp_path / "a", {"a/1.png": df.png(X[0]), "b/1.png": b"no image"})
    with pytest.raises(DataError, match="1 usable samples, not of two classes"):
        _pack(source, tmp_path / "b", PackOptions(val_split=0, skip_bad=True))
    (source / "a" / "1.png").write_bytes(b"neither")
    with pytest.raises(DataError, match="no usable sample in its train split"):
        _pack(source, tmp_path / "b", PackOptions(val_split=0, skip_bad=True))


def test_images_of_two_sizes_need_one(tmp_path: Path) -> None:
    source = _source(tmp_path / "a")
    (source / "bee" / "001.png").write_bytes(df.png(df.random_images(1, (3, 9, 9))[0]))
    with pytest.raises(DataError, match=r"bee/001.png is 9x9, the images before it are 6x5.*--size 32x32"):
        _pack(source, tmp_path / "b")
    assert open_packed(_pack(source, tmp_path / "b", PackOptions(size=(6, 5)))).shape == (3, 6, 5)


def _streamed(count: int) -> DataSet:
    """150 kB a sample, made when it is asked for."""
    labels = np.arange(count) % 2
    split = Split(labels, lambda i: np.full((3, 224, 224), i % 251, np.uint8), str)
    return DataSet("test", "stream", "images", ("a", "b"), split)


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    peaks = []
    for count in (60, 240):
        tracemalloc.start()
        data = pack(_streamed(count), tmp_path / str(count), _WHOLE).data
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert data.train.samples == count
    assert peaks[1] < peaks[0] + 2**20 and peaks[1] < 2**25


class _FailingSplit:
    """Raises at the n-th sample."""

    def __init__(self, error: BaseException, at: int) -> None:
        self._error, self._at = error, at

    def __call__(self, i: int) -> df.Pixels:
        if i == self._at:
            raise self._error
        return X[i]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1, 29])
def test_nothing_is_left_where_packing_stops(error: BaseException, at: int, tmp_path: Path) -> None:
    data = DataSet("test", "a", "images", df.CLASSES, Split(Y, _FailingSplit(error, at), str))
    with pytest.raises(type(error)):
        pack(data, tmp_path / "out", _WHOLE)
    assert list(tmp_path.iterdir()) == []


def _first_mixture(source: Path, out: Path, *flags: str) -> str:
    """What tests/killed_packing.py says; it forks, so it is a process without threads."""
    command = [sys.executable, "-m", "tests.killed_packing", str(source), str(out), *flags]
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.faults
def test_a_killed_run_leaves_all_or_nothing_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    source = _source(tmp_path / "a")
    assert _first_mixture(source, tmp_path / "out") == "none of 37"
    # What the killed ones left is gone: the last, which was not killed, removed it.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    # The harness finds a writer that works in place.
    assert _first_mixture(source, tmp_path / "out", "--in-place").startswith("point ")


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    source = _source(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    assert _pack(source, tmp_path / "empty").is_dir()
    for out in (tmp_path / "empty", source / "ant" / "000.png"):
        with pytest.raises(UsageError, match="there already"):
            _pack(source, out)
    with pytest.raises(UsageError, match="packed already"):
        read_data_set(tmp_path / "empty", _WHOLE)


def _disagreeing(**changes: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Files that are whole and hashed, and say what does not fit together."""
    good = {"format": "taste-data 1", "split": "train", "classes": '["a", "b"]', "source": "s", "mean": "[0.5]"}
    good |= {"std": "[0.5]", "planes": "gray", "resize": "crop", "sha256": ""}
    x, y = np.zeros((2, 1, 3, 3), np.uint8), np.array([0, 1], np.int32)
    yield {"x": x, "y": y}, good
    yield {"x": x, "y": np.array([0, 2], np.int32)}, good
    yield {"x": x, "y": np.array([0, -1], np.int32)}, good
    yield {"x": x, "y": y[:1]}, good
    yield {"x": x, "y": y.astype(np.int64)}, good
    yield {"x": x.astype(np.float32), "y": y}, good
    yield {"x": x, "y": y, "z": y}, good
    yield {"x": x[0, 0], "y": x[0, 0] + 2}, {**good, "mean": "[]", "std": "[]", "planes": ""}
    changed = {"format": "taste-data 2", "split": "test", "classes": '["a"]', "mean": "[0.5, 0.5]", "std": "[0]"}
    changed |= {"planes": "RGB", "resize": "turn", "skipped": "-1"}
    for name, value in changed.items():
        yield {"x": x, "y": y}, {**good, name: value}
    for value in ("5", "[", "[NaN]", '["a"]', "[" * 100000):
        yield {"x": x, "y": y}, {**good, "mean": value}


def test_parts_that_disagree_are_corrupt(tmp_path: Path) -> None:
    for number, (tensors, metadata) in enumerate(_disagreeing()):
        file = tmp_path / "train.safetensors"
        save_file(tensors, file, metadata={**metadata, "metadata_sha256": metadata_sha256(metadata)})
        if number == 0:
            assert open_packed(tmp_path, verify=False).train.counts == (1, 1)
            continue
        with pytest.raises(CorruptInputError, match="damaged"):
            open_packed(tmp_path, verify=False)


def test_train_and_test_of_two_data_sets_are_corrupt(tmp_path: Path) -> None:
    one, two = (
        _pack(_source(tmp_path / name, x), tmp_path / f"out-{name}", PackOptions())
        for name, x in (("a", X), ("b", X[:, ::-1]))
    )
    shutil.copy(two / "test.safetensors", one / "test.safetensors")
    with pytest.raises(CorruptInputError, match="train and test disagree in .*source|mean"):
        open_packed(one)


def test_packed_for_packs_once_until_something_changes(tmp_path: Path) -> None:
    source, cache = _source(tmp_path / "a"), tmp_path / "cache"
    stages: list[str] = []

    def ask(options: PackOptions = _WHOLE) -> Path:
        stages.clear()
        found = packed_for(source, options, cache, lambda stage, done, total: stages.append(stage))
        return found.data.folder

    first = ask()
    assert stages and first.parent == cache
    assert ask() == first and not stages
    assert ask(PackOptions(val_split=0, gray=True)) != first
    # A damaged entry is made anew.
    file = first / "train.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert ask() == first and stages
    (source / "ant" / "000.png").write_bytes(df.png(X[9]))
    assert ask() != first
    # What is packed is taken as it is.
    assert packed_for(first, PackOptions(size=(2, 2)), cache).data.folder == first


def test_a_csv_is_packed_again_when_one_of_its_images_changes(tmp_path: Path) -> None:
    files = {f"{i}.png": df.png(image) for i, image in enumerate(X[:4])}
    source = df.write_csv(
        df.write_files(tmp_path / "a", files) / "a.csv", [[f"{i}.png", "xy"[i % 2]] for i in range(4)]
    )
    first = packed_for(source, _WHOLE, tmp_path / "cache").data
    (tmp_path / "a" / "unrelated").symlink_to("/etc/passwd")
    assert packed_for(source, _WHOLE, tmp_path / "cache").data == first
    (tmp_path / "a" / "3.png").write_bytes(df.png(X[9]))
    assert packed_for(source, _WHOLE, tmp_path / "cache").data.sha256 != first.sha256


def test_decode_images_as_the_packed_ones_were(tmp_path: Path) -> None:
    source = _source(tmp_path / "a")
    data = open_packed(_pack(source, tmp_path / "b", PackOptions(size=(5, 3), resize="pad", bgr=True, val_split=0)))
    with safe_open(data.train.path, "numpy") as file:
        np.testing.assert_array_equal(decode_images(sorted(source.rglob("*.png")), data), file.get_tensor("x"))


def test_a_full_disk_of_the_cache_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("host_control.data.cache.pack", full)
    with pytest.raises(NoSpaceError, match=rf"{tmp_path}/cache. Free some, or set TASTE_CACHE"):
        packed_for(_source(tmp_path / "a"), _WHOLE, tmp_path / "cache")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "here"))
    assert packed_for(_source(tmp_path / "a"), _WHOLE).data.folder.parent == tmp_path / "here" / "data"


def _named(path: Path) -> Path:
    """Images whose names tell who took them: ant/ann_000.png."""
    return df.write_files(
        path,
        {
            f"{df.CLASSES[y]}/{'ann bob cid'.split()[i % 4 % 3]}_{i:03}.png": df.png(x)
            for i, (x, y) in enumerate(zip(X, Y, strict=True))
        },
    )


def test_domains_of_file_names_and_of_a_column(tmp_path: Path) -> None:
    """The tensor `domain` says what the names do, in both splits; the same of a CSV's column; names are sorted."""
    options = PackOptions(val_split=0.3, domain="/([a-z]+)_[0-9]+")
    data = pack(read_data_set(_named(tmp_path / "a"), options), tmp_path / "named", options).data
    assert data.domains == ("ann", "bob", "cid") and data.test is not None
    lines = [("file", "label", "domain")]
    lines += [
        (str(f.relative_to(tmp_path / "a")), f.parent.name, f.name.partition("_")[0])
        for f in sorted((tmp_path / "a").rglob("*.png"))
    ]
    df.write_csv(tmp_path / "a/table.csv", lines)
    table = pack(read_data_set(tmp_path / "a/table.csv", _WHOLE), tmp_path / "table", _WHOLE).data
    assert table.domains == data.domains and table.train.domain_counts == (15, 8, 7)
    of = {x.tobytes(): i % 4 % 3 for i, x in enumerate(X)}
    for part in (data.train, data.test, table.train):
        with safe_open(part.path, framework="numpy") as file:
            x, domain = file.get_tensor("x"), file.get_tensor("domain")
        assert domain.dtype == np.int32 and domain.tolist() == [of[image.tobytes()] for image in x]
        assert part.domain_counts == tuple(np.bincount(domain, minlength=3))
    assert sum(np.add(data.train.domain_counts, data.test.domain_counts)) == 30
    assert open_packed(_pack(_source(tmp_path / "b"), tmp_path / "plain")).domains == ()


def test_domains_that_are_not_there(tmp_path: Path) -> None:
    for pattern, words in (("([a-z]", "no regular expression"), ("[a-z]+", "has 0 groups")):
        with pytest.raises(UsageError, match=words):
            PackOptions(domain=pattern)
    options = PackOptions(val_split=0, domain="(dora)_")
    with pytest.raises(DataError, match=r"ant/\S+.png has no domain"):
        pack(read_data_set(_named(tmp_path / "a"), options), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    df.write_csv(tmp_path / "a/t.csv", [("file", "label", "domain"), ("ant/ann_000.png", "ant", " ")])
    with pytest.raises(DataError, match="line 2 of .* has no domain"):
        read_data_set(tmp_path / "a/t.csv", _WHOLE)
    options = PackOptions(val_split=0, domain="/([a-z]+)_")
    path = _pack(_named(tmp_path / "c"), tmp_path / "d", options) / "train.safetensors"
    with safe_open(path, framework="numpy") as file:
        tensors, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file({**tensors, "domain": tensors["domain"] + 1}, path, facts)
    with pytest.raises(CorruptInputError, match="3 names"):
        open_packed(tmp_path / "d", verify=False)
