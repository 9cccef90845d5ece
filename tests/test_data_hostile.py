"""Files that attack: pickles that call, zips and links that lead out, packed files with flipped bits."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cross.errors import CorruptInputError, DataError, TasteError
from host_control.console import Console
from host_control.data import PackOptions, open_packed, pack, read_data_set
from host_control.data.inert_pickle import load_inert
from tests import data_files as df

X, Y = df.random_images(6, (3, 4, 4)), np.array([0, 1, 2, 0, 1, 2])
_WHOLE = PackOptions(val_split=0)


class _Call:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


_CALLS = [(os.system, "touch {}"), (eval, "__import__('os').mkdir({!r})"), (os.mkdir, "{}"), (Path.touch,)]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("call", _CALLS)
def test_a_pickle_that_calls_is_refused_and_nothing_runs(protocol: int, call: tuple[Any, ...], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    arguments = [text.format(str(mark)) for text in call[1:]] or [mark]
    attack = pickle.dumps({"data": _Call(call[0], *arguments), "labels": [1]}, protocol)
    source = df.write_files(tmp_path / "cifar", {"data_batch_1": attack})
    with pytest.raises(DataError, match=r"data_batch_1 is not a CIFAR batch: .*Nothing in it was executed"):
        read_data_set(source, _WHOLE)
    assert not mark.exists()
    # The harness can fail: Python's own reader does execute it.
    pickle.loads(attack)
    assert mark.exists()


_ATTACKS = {
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02U\x01aQ.",
    "instance": b"(S'x'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nU\x01ao.",
    "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "attributes of a name": b"\x80\x02cnumpy\ndtype\n}U\x04callK\x01sb.",
    "name as a value": b"\x80\x02}U\x01acnumpy\ndtype\ns.",
    "call of a value": b"\x80\x02K\x01)R.",
    "submodule by dots": b"\x80\x04\x8c\x05numpy\x8c\x0ectypeslib.load\x93.",
    "huge memo": b"\x80\x02K\x01r\xff\xff\xff\x7f0j\xfe\xff\xff\x7f.",
    "huge text": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "huge bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0fabc.",
    "pop of nothing": b"0.",
    "no mark": b"\x80\x02K\x01K\x02e.",
    "no end": b"\x80\x02}",
    "object array": b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
    "array larger than its bytes": df.python2_pickle({"data": X[:1, :, 0, 0]}).replace(b"J\x03\0\0\0", b"J\xff\xff\xff\x7f"),
}  # fmt: skip


@pytest.mark.parametrize("case", _ATTACKS)
def test_whatever_is_no_plain_data_is_refused(case: str) -> None:
    with pytest.raises(DataError, match="a.pkl is not a CIFAR batch"):
        load_inert(_ATTACKS[case], "a.pkl")


def test_keys_that_take_for_ever_to_hash_are_refused() -> None:
    """60 tuples of the one before, twice: 2^60 hashes, 250 bytes."""
    with pytest.raises(DataError, match="a key that is no text"):
        load_inert(b"\x80\x02}K\x01q\x01" + b"h\x01\x86q\x01" * 60 + b"K\x01s.", "a.pkl")


_GOOD = df.python2_pickle({"data": X.reshape(6, -1), "labels": Y.tolist(), "filenames": ["a", "b"]})


@given(st.integers(0, len(_GOOD) - 1), st.integers(0, 255), st.booleans())
def test_any_byte_of_a_pickle_may_be_wrong(at: int, value: int, cut: bool) -> None:
    try:
        load_inert(_GOOD[:at] + bytes([value]) + (b"" if cut else _GOOD[at + 1 :]), "a.pkl")
    except DataError:
        pass


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_data_error(data: bytes) -> None:
    try:
        load_inert(data, "a.pkl")
    except DataError:
        pass


_FOLDERS = df.class_folders(X, Y)


def _link(name: str, target: str) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info, target.encode()


_BAD_ZIPS: dict[str, tuple[list[tuple[Any, bytes]], str]] = {
    "parent": ([("../evil.png", b"")], "may lead out"),
    "parent inside": ([("ant/../../evil.png", b"")], "may lead out"),
    "absolute": ([("/etc/evil.png", b"")], "may lead out"),
    "backslashes": ([("..\\evil.png", b"")], "may lead out"),
    "link": ([_link("ant/link.png", "/etc/passwd")], "link or a device"),
    "twice": ([("ant/000.png", df.png(X[0])), ("ant/000.png", b"")], "twice"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", _BAD_ZIPS)
def test_zips_with_bad_names_are_refused(case: str, tmp_path: Path) -> None:
    extra, message = _BAD_ZIPS[case]
    files = [*_FOLDERS.items(), *extra] if case != "twice" else [*extra, ("bee/1.png", df.png(X[1]))]
    with pytest.raises(DataError, match=message):
        read_data_set(df.write_zip(tmp_path / "a.zip", files), _WHOLE)


def test_a_zip_that_is_damaged_names_the_image(tmp_path: Path) -> None:
    file = df.write_zip(tmp_path / "a.zip", _FOLDERS)
    data = bytearray(file.read_bytes())
    at = data.index(df.png(X[0])) + 45
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"a.zip/ant/000.png cannot be read: Bad CRC-32"):
        pack(read_data_set(file, _WHOLE), tmp_path / "out", _WHOLE)
    file.write_bytes(data[:-30])
    with pytest.raises(DataError, match="not a readable zip"):
        read_data_set(file, _WHOLE)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling", "fifo", "loop"])
def test_links_that_lead_out_and_devices_are_refused(kind: str, tmp_path: Path) -> None:
    outside = df.write_files(tmp_path / "outside", {"secret.png": df.png(X[0])})
    source = df.write_files(tmp_path / "source", _FOLDERS)
    odd = source / "ant" / "odd.png"
    if kind == "fifo":
        os.mkfifo(odd)
    else:
        targets = {"file": outside / "secret.png", "folder": outside, "dangling": tmp_path / "no", "loop": source}
        odd.symlink_to(targets[kind])
    with pytest.raises(DataError, match=r"leads out of|not there|link to a folder|neither a file nor a folder"):
        read_data_set(source, _WHOLE)


def test_a_link_within_the_folder_is_read_and_one_swapped_in_later_is_not(tmp_path: Path) -> None:
    source = df.write_files(tmp_path / "source", _FOLDERS)
    (source / "ant" / "same.png").symlink_to("000.png")
    found = read_data_set(source, _WHOLE)
    at = [found.train.name(i) for i in range(len(found.train))].index(f"{source}/ant/same.png")
    assert found.train.sample(at) == df.png(X[0])
    (source / "ant" / "same.png").unlink()
    (source / "ant" / "same.png").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="leads out of"):
        found.train.sample(at)


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    source = df.write_files(folder / "source", _FOLDERS)
    return pack(read_data_set(source, _WHOLE), folder / "packed", _WHOLE).data.folder


def test_a_packed_folder_without_its_training_split_is_told(packed_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "test.safetensors").write_bytes((packed_folder / "train.safetensors").read_bytes())
    with pytest.raises(DataError, match="no train.safetensors beside it. Pack"):
        read_data_set(tmp_path, _WHOLE)


def test_names_of_any_characters_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.line("class a\nb\x1b[31m")
    console.table([("name", "left")], [["c\rd[red]"]])
    out = capsys.readouterr().out
    assert "class a?b?[31m\n" in out and "c?d[red]" in out and "\x1b" not in out


@pytest.mark.faults
def test_every_flipped_bit_of_a_packed_file_is_found(packed_folder: Path, tmp_path: Path) -> None:
    good = (packed_folder / "train.safetensors").read_bytes()
    assert open_packed(packed_folder).train.samples == 6
    damaged = tmp_path / "train.safetensors"
    for at in range(len(good)):
        damaged.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with pytest.raises(CorruptInputError) as caught:
            open_packed(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.faults
def test_every_cut_of_a_packed_file_is_found(packed_folder: Path, tmp_path: Path) -> None:
    good = (packed_folder / "train.safetensors").read_bytes()
    for end in range(0, len(good), 7):
        (tmp_path / "train.safetensors").write_bytes(good[:end])
        with pytest.raises(CorruptInputError):
            open_packed(tmp_path)


@given(st.binary(max_size=300))
def test_any_bytes_as_a_header_are_corrupt(header: bytes) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "train.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CorruptInputError):
            open_packed(Path(folder))


_SMALL = df.random_images(4, (3, 4, 4), 7)
_CIFAR = df.random_images(4, seed=7)


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=_SMALL.astype(np.int16), y=Y[:4], classes=np.array(df.CLASSES))
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in df.class_folders(_SMALL, [0, 1, 2, 0]).items():
            archive.writestr(name, data)
    return file.getvalue()


_FORMS: dict[str, tuple[str, bytes, dict[str, bytes]]] = {
    "npz": ("a.npz", _npz(), {}),
    "zip": ("a.zip", _zip(), {}),
    "idx": (
        "train-images-idx3-ubyte.gz",
        gzip.compress(df.idx_images(_SMALL[:, :1])),
        {"train-labels-idx1-ubyte": df.idx_labels(Y[:4])},
    ),
    "idx labels": (
        "train-labels-idx1-ubyte.gz",
        gzip.compress(df.idx_labels(Y[:4])),
        {"train-images-idx3-ubyte": df.idx_images(_SMALL[:, :1])},
    ),
    "cifar": (
        "data_batch_1",
        df.python2_pickle({"labels": Y[:4].tolist(), "data": _CIFAR.reshape(4, -1)}),
        {"batches.meta": df.python2_pickle({"label_names": list(df.CLASSES)})},
    ),
    "csv": (
        "a.csv",
        b"path,label,split\n0.png,ant,train\n1.png,bee,train\n2.png,ant,val\n3.png,bee,train\n",
        {f"{i}.png": df.png(image) for i, image in enumerate(_SMALL)},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", _FORMS)
@given(st.data())
@settings(max_examples=40)
def test_any_byte_of_any_format_may_be_wrong(form: str, data: st.DataObject) -> None:
    """What comes of it is a data set or one line for the user: no other exception, no folder half made."""
    name, good, others = _FORMS[form]
    at = data.draw(st.integers(0, min(len(good) - 1, 900)) | st.integers(0, len(good) - 1))
    middle = data.draw(st.binary(max_size=4))
    broken = good[:at] + middle + good[at + data.draw(st.sampled_from([0, 1, 4, len(good)])) :]
    with TemporaryDirectory() as folder:
        root = df.write_files(Path(folder) / "in", {name: broken, **others})
        source = root / name if form in ("npz", "zip", "csv") else root
        try:
            pack(read_data_set(source, PackOptions()), Path(folder) / "out", PackOptions())
        except TasteError as error:
            assert error.exit_code in (2, 14, 23) and not (Path(folder) / "out").exists()
