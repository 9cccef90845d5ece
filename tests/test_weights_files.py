"""Weights files: every format against its own writer; hostile, damaged and truncated files end in one line, exit 14."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from cross.errors import CorruptInputError, UsageError
from cross.weights.load import load_weights
from cross.weights.torch_legacy import MAGIC, START, VERSION

Array = np.ndarray[Any, Any]
TRUNCATIONS = 50


def sample() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "conv.weight": rng.standard_normal((4, 3, 3, 3)).astype("float32"),
        "fc.bias": rng.standard_normal(7).astype("float32"),
        "bn.num_batches_tracked": np.array(5, "int64"),
    }


def npz_bytes(tensors: Mapping[str, Array], compressed: bool = False) -> bytes:
    stream = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(stream, **tensors)  # type: ignore[arg-type]
    return stream.getvalue()


def torch_bytes(value: Any, legacy: bool) -> bytes:
    torch, stream = pytest.importorskip("torch"), io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def state_dict(tensors: Mapping[str, Array]) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}


WRITERS: Mapping[str, Callable[[], bytes]] = {
    "safetensors": lambda: save(sample()),
    "npz": lambda: npz_bytes(sample()),
    "torch-zip": lambda: torch_bytes(state_dict(sample()), legacy=False),
    "torch-legacy": lambda: torch_bytes(state_dict(sample()), legacy=True),
}
FORMATS = [pytest.param(name, marks=pytest.mark.needs("torch")) if "torch" in name else name for name in WRITERS]


def load(folder: Path, data: bytes) -> dict[str, Array]:
    path = folder / "weights"
    path.write_bytes(data)
    return load_weights(path)


def refused(folder: Path, data: bytes, *words: str) -> None:
    with pytest.raises(CorruptInputError) as caught:
        load(folder, data)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    found, wanted = load(tmp_path, WRITERS[name]()), sample()
    assert found.keys() == wanted.keys()
    for tensor, values in wanted.items():
        assert found[tensor].dtype == values.dtype and found[tensor].shape == values.shape
        np.testing.assert_array_equal(found[tensor], values)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    whole = WRITERS[name]()
    for part in range(TRUNCATIONS):
        refused(tmp_path, whole[: len(whole) * part // TRUNCATIONS])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_does_anything_but_be_refused_or_read(name: str, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes anywhere replaced: whatever follows is an array a tensor or CorruptInputError."""
    broken = bytearray(WRITERS[name]())
    for position in data.draw(st.lists(st.integers(0, len(broken) - 1), min_size=1, max_size=4)):
        broken[position] = data.draw(st.integers(0, 255))
    try:
        found = load(tmp_path, bytes(broken))
    except CorruptInputError:
        return
    assert all(isinstance(values, np.ndarray) for values in found.values())


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load_weights(tmp_path / "none.pt")
    with pytest.raises(UsageError):
        load_weights(tmp_path)


def test_other_formats_are_named_as_none_of_ours(tmp_path: Path) -> None:
    for data in (b"", b"\x89HDF\r\n\x1a\n" + bytes(100), b"hello", b"PK", bytes(8)):
        refused(tmp_path, data)


# Kinds of numbers


def test_npz_reads_halves_doubles_columns_and_compressed_members(tmp_path: Path) -> None:
    values = np.arange(12, dtype="float64").reshape(3, 4) / 7
    tensors = {"half": values.astype("<f2"), "double": values, "big": values.astype(">f4"), "column": np.asfortranarray(values),
               "count": np.array([1, 2], ">i4"), "none": np.zeros((0, 3), "float32")}  # fmt: skip
    for compressed in (False, True):
        found = load(tmp_path, npz_bytes(tensors, compressed))
        for name, wanted in tensors.items():
            assert found[name].dtype == ("int32" if name == "count" else "float32") and found[name].flags.c_contiguous
            np.testing.assert_array_equal(found[name], wanted.astype("float32"))


def test_safetensors_reads_bfloat16_and_names_what_it_cannot_use(tmp_path: Path) -> None:
    def file(dtype: str, size: int, body: bytes) -> bytes:
        header = f'{{"w":{{"dtype":"{dtype}","shape":[{size}],"data_offsets":[0,{len(body)}]}}}}'.encode()
        return struct.pack("<Q", len(header)) + header + body

    values = np.array([1.0, -2.5, 3.140625, 0.0], "float32")
    upper = (values.view("uint32") >> 16).astype("<u2").tobytes()
    np.testing.assert_array_equal(load(tmp_path, file("BF16", 4, upper))["w"], values)
    refused(tmp_path, file("F8_E4M3", 4, bytes(4)), "'w'", "F8_E4M3")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_reads_every_width_views_and_shared_storages(legacy: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.randn(6, 8)
    tensors = {
        "half": base.half(), "bfloat": base.bfloat16(), "double": base.double(), "turned": base.t(), "part": base[1:4, ::3],
        "tied": base, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "count": torch.arange(3), "flag": base > 0,
        "spread": torch.tensor([3.0]).expand(5, 2), "parameter": torch.nn.Parameter(base.clone()),
    }  # fmt: skip
    found = load(tmp_path, torch_bytes(tensors, legacy))
    for name, wanted in tensors.items():
        values = wanted.detach()
        expected = values.float().numpy() if values.is_floating_point() else values.numpy()
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


@pytest.mark.needs("torch")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    axes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4),
    offset=st.integers(0, 5),
    legacy=st.booleans(),
)
def test_any_strides_read_as_pytorch_reads_them(
    tmp_path: Path, axes: list[tuple[int, int]], offset: int, legacy: bool
) -> None:
    torch = pytest.importorskip("torch")
    sizes, strides = [size for size, _ in axes], [stride for _, stride in axes]
    reach = offset + sum(max(size - 1, 0) * stride for size, stride in axes) + 1
    tensor = torch.arange(reach, dtype=torch.float32).as_strided(sizes, strides, offset)
    found = load(tmp_path, torch_bytes({"w": tensor}, legacy))["w"]
    np.testing.assert_array_equal(found, tensor.numpy())


@pytest.mark.needs("torch")
@pytest.mark.parametrize("legacy", [False, True])
def test_a_checkpoint_gives_its_state_dict(legacy: bool, tmp_path: Path) -> None:
    """What training scripts save: weights under a key, beside optimizer state and numbers; and a module's own state dict."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    wanted = {name: value.numpy() for name, value in module.state_dict().items()}
    best = torch.tensor(0.5)
    for value in (
        module.state_dict(),
        {"epoch": 3, "best": best, "state_dict": module.state_dict(), "optimizer": optimizer.state_dict()},
        {"model": {"model_state_dict": module.state_dict()}, "args": {"lr": 0.1, "names": ["a", ("b", None)]}},
    ):
        found = load(tmp_path, torch_bytes(value, legacy))
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values)
    refused(tmp_path, torch_bytes({"epoch": 3}, legacy), "no tensors")
    refused(tmp_path, torch_bytes(module, legacy), "torch.nn.modules.container.Sequential", "state_dict()")


@pytest.mark.needs("data")
def test_a_published_checkpoint_of_2018_is_read(data: Path) -> None:
    """ResNet-20 in the legacy format, saved on a GPU: 0.27 million parameters, names behind `module.`."""
    found = load_weights(data / "resnet_cifar10" / "resnet20-12fca82f.th")
    weights = {n: a for n, a in found.items() if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert sum(values.size for values in weights.values()) == 269_722
    assert found["module.conv1.weight"].shape == (16, 3, 3, 3) and found["module.linear.weight"].shape == (10, 64)
    assert all(np.isfinite(values).all() and values.dtype == np.float32 for values in weights.values())
    assert all((values > 0).all() for name, values in found.items() if name.endswith("running_var"))


# Hostile files


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def zipped(pickled: bytes, storages: Mapping[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("a/data.pkl", pickled)
        for key, data in (storages or {}).items():
            archive.writestr(f"a/data/{key}", data)
    return stream.getvalue()


def legacy(pickled: bytes, storages: Mapping[str, bytes] | None = None) -> bytes:
    keys = storages or {}
    head = b"".join(pickle.dumps(v, 2) for v in (MAGIC, VERSION, {"little_endian": True}))
    assert head.startswith(START)
    body = b"".join(struct.pack("<q", len(data) // 4) + data for data in keys.values())
    return head + pickled + pickle.dumps(list(keys), 2) + body


def tensor_pickle(shape: tuple[Any, ...], strides: tuple[Any, ...], offset: Any, count: int) -> bytes:
    """{'w': a float tensor in storage '0'}, written opcode by opcode."""

    def numbers(values: tuple[Any, ...]) -> bytes:
        return b"(" + b"".join(pickle.dumps(v, 2)[2:-1] for v in values) + b"t"

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + numbers((count,))[1:-1] + b"tQ"
    )
    view = b"(" + storage + numbers((offset,))[1:-1] + numbers(shape) + numbers(strides) + b"t"
    return b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor\n" + view + b"Rs."


@pytest.mark.parametrize("wrap", [zipped, legacy])
def test_nothing_in_a_file_is_executed(
    wrap: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4):
        refused(tmp_path, wrap(pickle.dumps({"w": Evil()}, protocol)), "system", "state_dict()")
    for name in (
        "builtins\neval",
        "collections\nCounter",
        "torch\nload",
        "torch.storage\n_load_from_bytes",
        "os\nsystem",
    ):
        refused(tmp_path, wrap(b"\x80\x02c" + name.encode() + b"\n(X\x01\x00\x00\x001tR."), name.replace("\n", "."))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("wrap", [zipped, legacy])
def test_a_tensor_outside_its_storage_is_refused(wrap: Callable[..., bytes], tmp_path: Path) -> None:
    four = {"0": np.arange(4, dtype="<f4").tobytes()}
    found = load(tmp_path, wrap(tensor_pickle((2, 2), (2, 1), 0, 4), four))["w"]
    np.testing.assert_array_equal(found, [[0, 1], [2, 3]])
    for shape, strides, offset, count in (
        ((2, 2), (2, 1), 1, 4), ((2, 3), (2, 1), 0, 4), ((4,), (2,), 0, 4), ((2,), (-1,), 3, 4), ((2,), (1,), -1, 4), ((-2,), (1,), 0, 4),
        ((2, 2), (1,), 0, 4), ((5,), (1,), 0, 5), ((2,), (1,), 0, 2**40), ((2.0,), (1,), 0, 4), ((2**70,), (1,), 0, 4),
        ((2,), (2**62,), 0, 4), ((True,), (1,), 0, 4), ((1,) * 70, (1,) * 70, 0, 4),
    ):  # fmt: skip
        refused(tmp_path, wrap(tensor_pickle(shape, strides, offset, count), four))


def bombs() -> dict[str, bytes]:
    four = {"0": bytes(16)}
    text = b"\x80\x02}X\x01\x00\x00\x00w"
    overlapping = bytearray(zipped(tensor_pickle((4,), (1,), 0, 4), four))
    directory = overlapping.rindex(b"PK\x01\x02")
    overlapping[directory + 20 : directory + 28] = struct.pack("<II", 2**31, 2**31)
    body = io.BytesIO()
    np.lib.format.write_array_header_1_0(body, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    headless, packed = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(headless, "w") as archive:
        archive.writestr("w.npy", body.getvalue())
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", bytes(1 << 26))
    return {
        "expanded view": zipped(tensor_pickle((2**14, 2**14), (0, 0), 0, 4), four),
        "expanded view, legacy": legacy(tensor_pickle((2**14, 2**14), (0, 0), 0, 4), four),
        "memo index": zipped(text + b"r\xff\xff\xff\x7f."),
        "byte array": zipped(text + b"\x96" + struct.pack("<Q", 2**34) + b"."),
        "long string": zipped(text + b"\x8d" + struct.pack("<Q", 2**34) + b"."),
        "long integer": zipped(text + b"\x8b" + struct.pack("<i", 2**30) + b"."),
        "long frame": zipped(b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}."),
        "decimal": zipped(b"\x80\x02I" + b"9" * 100_000 + b"\n."),
        "nested key": zipped(b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns."),
        "nested lists": zipped(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        "itself": zipped(b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s."),
        "compressed": zipped(tensor_pickle((4,), (1,), 0, 4), four, zipfile.ZIP_DEFLATED),
        "member larger than the file": bytes(overlapping),
        "storage of no numbers": zipped(tensor_pickle((4,), (1,), 0, 4), {"0": bytes(15)}),
        "storage missing": zipped(tensor_pickle((4,), (1,), 0, 4)),
        "storage missing, legacy": legacy(tensor_pickle((4,), (1,), 0, 4)),
        "stack empty": zipped(b"\x80\x02R."),
        "mark crossed": zipped(b"\x80\x02]((a."),
        "two values": zipped(b"\x80\x02NN."),
        "npy header": headless.getvalue(),
        "npz bomb": packed.getvalue(),
        "npz of objects": npz_bytes({"w": np.array([{}], object)}),
        "safetensors header": struct.pack("<Q", 2**40) + b"{" + bytes(100),
        "big-endian": START + pickle.dumps(VERSION, 2) + pickle.dumps({"little_endian": False}, 2),
        "version": START + pickle.dumps(VERSION + 1, 2) + pickle.dumps({"little_endian": True}, 2),
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused_in_memory_bounded_by_its_size(name: str, tmp_path: Path) -> None:
    data = bombs()[name]
    tracemalloc.start()
    try:
        refused(tmp_path, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 64 * len(data) + (4 << 20)


def test_names_that_would_steer_a_terminal_are_made_printable(tmp_path: Path) -> None:
    refused(tmp_path, zipped(b"\x80\x02c\x1b[31mos\nsystem\n."), "?[31mos.system")
