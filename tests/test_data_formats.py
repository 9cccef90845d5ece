"""Every format people have gives the samples, labels and class names that were written; what is broken is refused."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cross.errors import DataError, MissingToolError, TasteError
from host_control.data import PackOptions, pack, read_data_set
from host_control.data import read as reading
from tests import data_files as df
from tests.needs import FASHION_MNIST

X, Y = df.random_images(12), np.array([2, 0, 1, 1, 0, 2, 2, 2, 0, 1, 1, 0])
X_TEST, Y_TEST = df.random_images(5, seed=1), np.array([0, 1, 2, 1, 0])
_PLAIN = PackOptions(val_split=None)

_Arrays = tuple[df.Pixels, NDArray[np.int64]]


def packed(
    source: Path | str, tmp_path: Path, options: PackOptions = _PLAIN
) -> tuple[_Arrays, _Arrays | None, tuple[str, ...]]:
    """What the files hold, read by the safetensors library."""
    data = pack(read_data_set(source, options), tmp_path / "packed", options).data
    train = load_file(data.train.path)
    test = load_file(data.test.path) if data.test else None
    return (train["x"], train["y"]), (test["x"], test["y"]) if test else None, data.classes


def assert_same(found: _Arrays | None, x: df.Pixels, y: NDArray[np.int64]) -> None:
    assert found is not None
    np.testing.assert_array_equal(found[1], y)
    np.testing.assert_array_equal(found[0], x)


def _binary_10(root: Path) -> Path:
    files = {"data_batch_1.bin": df.cifar10_records(X[:7], Y[:7]), "data_batch_2.bin": df.cifar10_records(X[7:], Y[7:])}
    files |= {"test_batch.bin": df.cifar10_records(X_TEST, Y_TEST), "batches.meta.txt": b"ant\nbee\ncat\n\n"}
    return df.write_files(root, files)


def _binary_100(root: Path) -> Path:
    files = {"train.bin": df.cifar100_records(X, Y), "test.bin": df.cifar100_records(X_TEST, Y_TEST)}
    # As unpacked: everything lies in one folder below the one that is named.
    files |= {"fine_label_names.txt": b"ant\nbee\ncat\n", "coarse_label_names.txt": b"insects\n"}
    return df.write_files(root, {f"cifar-100-binary/{name}": data for name, data in files.items()})


def _python_10(write: Callable[[dict[str, object]], bytes]) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        def batch(x: df.Pixels, y: NDArray[np.int64]) -> bytes:
            names = [f"{i}.png" for i in range(len(x))]
            return write({"data": x.reshape(len(x), -1), "labels": y.tolist(), "filenames": names})

        files = {"data_batch_1": batch(X[:7], Y[:7]), "data_batch_2": batch(X[7:], Y[7:])}
        files |= {"test_batch": batch(X_TEST, Y_TEST), "batches.meta": write({"label_names": list(df.CLASSES)})}
        return df.write_files(root, files)

    return make


def _python_100(root: Path) -> Path:
    def batch(x: df.Pixels, y: NDArray[np.int64]) -> bytes:
        labels = {"fine_labels": y.tolist(), "coarse_labels": (19 - y).tolist()}
        return df.python2_pickle({"data": x.reshape(len(x), -1), **labels})

    meta = df.python2_pickle({"fine_label_names": list(df.CLASSES), "coarse_label_names": ["insects"]})
    return df.write_files(root, {"train": batch(X, Y), "test": batch(X_TEST, Y_TEST), "meta": meta})


def _npz(layout: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        root.mkdir()
        names = np.array(df.CLASSES)
        if layout == "keras":
            arrays = {"x_train": X.transpose(0, 2, 3, 1), "y_train": Y, "x_test": X_TEST.transpose(0, 2, 3, 1)}
            np.savez_compressed(root / "a.npz", y_test=Y_TEST, classes=names, **arrays)
        elif layout == "medmnist":
            arrays = {"train_images": X.transpose(0, 2, 3, 1), "train_labels": Y[:, None].astype(np.uint8)}
            arrays |= {"val_images": X_TEST.transpose(0, 2, 3, 1), "val_labels": Y_TEST[:, None]}
            np.savez(root / "a.npz", class_names=names, **arrays)
        else:
            arrays = {"train_x": X.astype(np.float32) / 255, "train_y": Y, "test_x": X_TEST.astype(np.int64)}
            np.savez(root / "a.npz", test_y=Y_TEST, label_names=names, **arrays)
        return root / "a.npz"

    return make


_IN_SOURCE_ORDER = {
    "cifar10-binary": _binary_10,
    "cifar100-binary": _binary_100,
    "cifar10-python2": _python_10(df.python2_pickle),
    "cifar10-python3-2": _python_10(lambda values: df.python3_pickle(2, values)),
    "cifar10-python3-4": _python_10(lambda values: df.python3_pickle(4, values, as_bytes=True)),
    "cifar10-python3-5": _python_10(lambda values: df.python3_pickle(5, values)),
    "cifar100-python2": _python_100,
    "npz-keras": _npz("keras"),
    "npz-medmnist": _npz("medmnist"),
    "npz-floats": _npz("floats"),
}


@pytest.mark.parametrize("form", _IN_SOURCE_ORDER)
def test_arrays_come_back_bit_for_bit(form: str, tmp_path: Path) -> None:
    train, test, classes = packed(_IN_SOURCE_ORDER[form](tmp_path / "source"), tmp_path)
    assert_same(train, X, Y)
    assert_same(test, X_TEST, Y_TEST)
    assert classes == df.CLASSES


_PARQUET = pytest.param("parquet", marks=pytest.mark.needs("pyarrow"))


def _folders(test_name: str) -> dict[str, bytes]:
    return df.class_folders(X, Y, "train/") | df.class_folders(X_TEST, Y_TEST, f"{test_name}/")


def _tiny(val: str) -> dict[str, bytes]:
    """wnids.txt is not sorted, as the real one is not: its order is that of the classes."""
    wnids = {"ant": "n03", "bee": "n01", "cat": "n02"}
    files = {"wnids.txt": b"n03\nn01\nn02\n", "words.txt": b"n02\tcat\nn01\tbee\nn03\tant\nn09\temu\n"}
    for i, (image, label) in enumerate(zip(X, Y, strict=True)):
        wnid = wnids[df.CLASSES[label]]
        files[f"train/{wnid}/images/{i:03}.JPEG"] = df.png(image)
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"0.JPEG\t0\t0\t1\t1\n"
    lines = []
    for i, (image, label) in enumerate(zip(X_TEST, Y_TEST, strict=True)):
        wnid = wnids[df.CLASSES[label]]
        lines.append(f"{i:03}.JPEG\t{wnid}\t0\t0\t63\t63\n")
        files[f"val/images/{i:03}.JPEG" if val == "original" else f"val/{wnid}/{i:03}.JPEG"] = df.png(image)
    files["test/images/0.JPEG"] = df.png(X[0])
    return files | {"val/val_annotations.txt": "".join(lines).encode()}


@pytest.mark.parametrize("form", ["val", "test", "zip", "tiny-original", "tiny-sorted", "tiny-zip", _PARQUET, "csv"])
def test_image_files_come_back_bit_for_bit(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if form in ("val", "test"):
        df.write_files(source, _folders(form) | {"train/ant/.DS_Store": b"", "train/cat/notes.txt": b"no image"})
    elif form in ("zip", "tiny-zip"):
        files = _folders("val") if form == "zip" else _tiny("original")
        source = df.write_zip(tmp_path / "a.zip", {f"top/{name}": data for name, data in files.items()})
    elif form.startswith("tiny"):
        df.write_files(source, _tiny(form.removeprefix("tiny-")))
    elif form == "parquet":
        for split, x, y in (("train", *df.in_class_order(X, Y)), ("test", *df.in_class_order(X_TEST, Y_TEST))):
            df.write_parquet(source / "data" / f"{split}-00000-of-00001.parquet", x, y, df.CLASSES)
    else:
        files = {f"img/{i}.png": df.png(image) for i, image in enumerate(np.concatenate([X, X_TEST]))}
        order = np.concatenate([np.argsort(Y, kind="stable"), 12 + np.argsort(Y_TEST, kind="stable")])
        names = [df.CLASSES[label] for label in np.concatenate([Y, Y_TEST])]
        rows = [[f"img/{i}.png", "train" if i < 12 else "val", names[i]] for i in order]
        source = df.write_csv(df.write_files(source, files) / "a.csv", [["path", "split", "label"], *rows], ";")
    train, test, classes = packed(source, tmp_path)
    assert_same(train, *df.in_class_order(X, Y))
    assert_same(test, *df.in_class_order(X_TEST, Y_TEST))
    assert classes == (df.CLASSES if not form.startswith("tiny") else ("n03 ant", "n01 bee", "n02 cat"))


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "a.txt"])
def test_a_folder_stands_for_the_one_file_in_it(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = {"img/0.png": df.png(X[0]), "img/1.png": df.png(X[1]), "a.csv": b"img/0.png,a\nimg/1.png,b\n"}
    if name != "a.csv":
        files = {"a.txt": b"to be or not to be" * 99} if name == "a.txt" else {}
    df.write_files(source, files)
    if name == "a.npz":
        source.mkdir()
        np.savez(source / name, x=X[:2], y=[0, 1])
    found = read_data_set(source, PackOptions(val_split=0))
    assert found.source.endswith(name) and len(found.classes) == (7 if name == "a.txt" else 2)


def test_idx_keeps_one_gray_plane(tmp_path: Path) -> None:
    x, x_test = df.random_images(12, (1, 9, 7)), df.random_images(5, (1, 9, 7), 1)
    source = df.write_idx(tmp_path / "mnist", (x, Y), (x_test, Y_TEST))
    train, test, classes = packed(source, tmp_path)
    assert_same(train, x, Y)
    assert_same(test, x_test, Y_TEST)
    assert classes == ("0", "1", "2")


def test_csv_without_heading_takes_whole_numbers_as_classes(tmp_path: Path) -> None:
    files = {f"{i}.png": df.png(image) for i, image in enumerate(X)}
    rows = [[f"{i}.png", label * 2] for i, label in enumerate(Y)]
    source = df.write_csv(df.write_files(tmp_path / "a", files) / "labels.csv", rows, "\t")
    train, _, classes = packed(source, tmp_path, PackOptions(val_split=0))
    assert_same(train, X, Y * 2)
    assert classes == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_becomes_windows_and_their_successors(newline: str, tmp_path: Path) -> None:
    text = f"To be, or not to be:{newline}das ist hier die Frage, ähem.{newline}" * 9
    source = tmp_path / "speech.txt"
    source.write_bytes(text.encode())
    train, test, characters = packed(source, tmp_path, PackOptions(window=8))
    assert characters == tuple(sorted(set(text)))
    split = len(text) - round(len(text) * 0.1)
    for found, first, last in ((train, 0, split), (test, split, len(text))):
        assert found is not None
        windows = (last - first - 1) // 8
        assert found[0].dtype == found[1].dtype == np.uint8 and found[0].shape == (windows, 8)
        assert "".join(characters[token] for token in found[0].reshape(-1)) == text[first : first + windows * 8]
        assert "".join(characters[token] for token in found[1].reshape(-1)) == text[first + 1 : first + 1 + windows * 8]


_GRAY = X[:, :1]
_IMAGES, _LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_HUGE = gzip.compress(struct.pack(">IIII", 0x803, 2**31, 2**14, 2**14))

_BROKEN: dict[str, tuple[dict[str, bytes], str, str]] = {
    "empty folder": ({"a/.keep": b""}, "", "is empty"),
    "empty class": (df.class_folders(X, Y) | {"dog/readme.txt": b""}, "", "no image of dog"),
    "no class folders": ({"1.png": df.png(X[0])}, "", "holds 1 images and no class folders"),
    "one class": (df.class_folders(X[:2], [0, 0], "train/") | {"val/ant/1.png": df.png(X[0])}, "", "one class only"),
    "class of val unknown": (_folders("val") | {"val/dog/1.png": df.png(X[0])}, "", "not trained: dog"),
    "cifar label 200": (
        {"data_batch_1.bin": df.cifar10_records(X, [*Y[:11], 200])},
        "",
        "record 11 of .*label 200",
    ),
    "cifar cut": ({"data_batch_1.bin": df.cifar10_records(X, Y)[:-1]}, "", "whole records"),
    "cifar-100 label": (
        {"train.bin": b"\0\x64" + bytes(3072), "fine_label_names.txt": b"a\nb\n"},
        "",
        "label 100",
    ),
    "idx without labels": ({_IMAGES: df.idx_images(_GRAY)}, "", "beside it"),
    "idx of other length": ({_IMAGES: df.idx_images(_GRAY) + b"0", _LABELS: df.idx_labels(Y)}, "", "declares 12304"),
    "idx counts differ": ({_IMAGES: df.idx_images(_GRAY), _LABELS: df.idx_labels(Y[:5])}, "", "12 images for 5"),
    "idx huge": ({_IMAGES + ".gz": _HUGE, _LABELS: df.idx_labels(Y)}, "", "declares 576460752303423504 bytes"),
    "idx sides": (
        {_IMAGES: struct.pack(">IIII", 0x803, 1, 0, 28), _LABELS: df.idx_labels([1])},
        "",
        "declares 1 x 0 x 28",
    ),
    "idx gz cut": (
        {_IMAGES + ".gz": gzip.compress(df.idx_images(_GRAY))[:-700], _LABELS: df.idx_labels(Y)},
        "",
        "damaged|ends",
    ),
    "text of no UTF-8": ({"a.txt": b"a" * 70000 + b"\xff\xfe" * 500}, "a.txt", "UTF-8 at byte 70000"),
    "text too short": ({"a.txt": b"abc"}, "a.txt", "too few for --window 64"),
    "text of too many characters": (
        {"a.txt": "".join(map(chr, range(0x4E00, 0x4F80))).encode()},
        "a.txt",
        "384 different",
    ),
    "unknown file": ({"a.bin": b"\x89\0\xff" * 99}, "a.bin", "no zip"),
    "csv without label": ({"a.csv": b"path,label\n1.png,\n"}, "a.csv", "line 2 .*no label"),
    "csv of one column": ({"a.csv": b"1.png\n"}, "a.csv", "line 1 .*1 columns"),
    "csv that leads out": ({"a.csv": b"../1.png,a\n2.png,b\n"}, "a.csv", "line 1 .*leads out"),
    "csv negative": ({"a.csv": b"1.png,-1\n2.png,1\n"}, "a.csv", "labels from -1"),
    "csv huge label": ({"a.csv": b"1.png,0\n2.png,99999999\n"}, "a.csv", "to 99999999"),
    "csv empty": ({"a.csv": b"\n"}, "a.csv", "is empty"),
    "parquet of another name": ({"a.dat": b"PAR1"}, "", "Name it a.parquet"),
    "not there": ({}, "nothing", "is not there"),
}


@pytest.mark.parametrize("case", _BROKEN)
def test_what_is_broken_is_a_data_error_that_names_it(case: str, tmp_path: Path) -> None:
    files, name, message = _BROKEN[case]
    source = df.write_files(tmp_path / "source", files) / name
    with pytest.raises(DataError, match=message) as caught:
        packed(source, tmp_path)
    assert caught.value.exit_code == 23 and "\n" not in str(caught.value)
    assert not (tmp_path / "packed").exists()


_BROKEN_ARRAYS: dict[str, tuple[dict[str, object], str]] = {
    "objects": ({"x": np.array([{"a": 1}] * 4, object), "y": Y[:4]}, "Python objects"),
    "floats above one": ({"x": X.astype(np.float32), "y": Y}, "from 0 to 1"),
    "not a number": ({"x": np.full((4, 8, 8), np.nan), "y": Y[:4]}, "from 0 to 1"),
    "too large": ({"x": X.astype(np.int16) + 1, "y": Y}, "from 0 to 255"),
    "two planes": ({"x": X[:, :2], "y": Y}, "1 or 3 planes"),
    "flat": ({"x": X.reshape(12, -1), "y": Y}, "Reshape"),
    "fewer labels": ({"x": X, "y": Y[:5]}, "12 images need"),
    "float labels": ({"x": X, "y": Y + 0.5}, "whole numbers"),
    "label beyond names": ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "label 2, and 2 classes"),
    "negative label": ({"x": X, "y": Y - 1}, "from -1"),
    "no labels": ({"x": X}, "no images with labels"),
    "no training": ({"x_test": X, "y_test": Y}, "no images with labels"),
    "Fortran order": ({"x": np.asfortranarray(X), "y": Y}, "Fortran"),
}


@pytest.mark.parametrize("case", _BROKEN_ARRAYS)
def test_arrays_that_are_no_images_are_refused(case: str, tmp_path: Path) -> None:
    arrays, message = _BROKEN_ARRAYS[case]
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        packed(tmp_path / "a.npz", tmp_path)


def test_parquet_without_pyarrow_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    df.write_files(tmp_path / "hub", {"train.parquet": b"PAR1"})
    with pytest.raises(MissingToolError, match="pip install pyarrow"):
        read_data_set(tmp_path / "hub", _PLAIN)


@pytest.mark.needs("pyarrow")
def test_broken_parquet_is_a_data_error(tmp_path: Path) -> None:
    file = df.write_parquet(tmp_path / "hub" / "train.parquet", X, Y, df.CLASSES)
    whole = file.read_bytes()
    for cut in range(0, len(whole), 997):
        file.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        with pytest.raises(DataError):
            packed(tmp_path / "hub", tmp_path, PackOptions(val_split=0))


def test_fashion_mnist_by_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "FASHION_MNIST", tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TasteError, match="dataset-fashion-mnist") as caught:
        read_data_set("fashion-mnist", _PLAIN)
    assert caught.value.exit_code == 22


@pytest.mark.needs("fashion-mnist")
def test_fashion_mnist_of_debian() -> None:
    data = read_data_set("fashion-mnist", _PLAIN)
    assert data.classes[0] == "T-shirt/top" and data.test is not None
    for split, stem in ((data.train, "train"), (data.test, "t10k")):
        images = gzip.decompress((FASHION_MNIST / f"{stem}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((FASHION_MNIST / f"{stem}-labels-idx1-ubyte.gz").read_bytes())[8:]
        np.testing.assert_array_equal(split.labels, np.frombuffer(labels, np.uint8))
        for i in (0, 1, len(labels) // 2, len(labels) - 1, 7):
            assert bytes(split.sample(i)) == images[i * 784 : (i + 1) * 784]


@pytest.mark.needs("data")
def test_real_cifar_and_tiny_imagenet(data: Path, tmp_path: Path) -> None:
    _, test, classes = packed(data / "cifar-10-batches-bin", tmp_path)
    records = np.fromfile(data / "cifar-10-batches-bin" / "test_batch.bin", np.uint8).reshape(-1, 3073)
    assert_same(test, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64))
    assert classes[3] == "cat"
    tiny = read_data_set(data / "tinyimagenet20.zip", _PLAIN)
    assert tiny.classes[0] == "n02124075 Egyptian cat" and len(tiny.classes) == 20 and tiny.test is not None
    assert np.bincount(tiny.train.labels).tolist() == [500] * 20
    assert np.bincount(tiny.test.labels).tolist() == [50] * 20
