"""libFuzzer on the C readers: a million files each, grown from whole ones, under the address and undefined-behaviour
sanitizers. Every fuzzer must find a reader that forgets how much room a name has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.native_builds import FUZZER, HOST, succeed
from tests.packed_data import pack

pytestmark = [pytest.mark.faults, pytest.mark.needs("clang")]
Build = Callable[..., Path]


def bare_file(build: Build, corpus: Path) -> None:
    """Behind the two bytes that the fuzz target takes for itself."""
    whole = corpus.parent / "whole"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int32)}, whole, metadata={"c": "d"})
    (corpus / "whole").write_bytes(bytes(2) + whole.read_bytes())


def checkpoint(build: Build, corpus: Path) -> None:
    """Of the smallest model; its hash, which would stop every change at once, is not looked at."""
    windows = pack(corpus.parent / "text", np.zeros((2, 6), np.uint8), np.zeros((2, 6), np.uint8))
    run_once = ("train", "--samples", windows, "--batch-size", 1, "--steps", 2, "--lr", 0.1)
    succeed(build(HOST, "taste-train-text"), *run_once, "--checkpoint", corpus.parent / "run")
    (corpus.parent / "run/checkpoint-0.safetensors").rename(corpus / "whole")


def data_sets(build: Build, corpus: Path) -> None:
    """Packed images, with a hash and without."""
    x, y = np.zeros((2, 2, 4, 5), np.uint8), np.zeros(2, np.int32)
    pack(corpus / "hashed", x, y)
    save_file({"x": x, "y": y}, corpus / "plain", metadata={"mean": "[0.5, 0.5]", "std": "[1, 1]"})


READERS: list[tuple[str, Callable[[Build, Path], None], int]] = [
    ("fuzz-safetensors", bare_file, 400),
    ("fuzz-checkpoint -DTASTE_PLANT_SKIP_HASH", checkpoint, 1500),
    ("fuzz-samples", data_sets, 1500),
]


@pytest.mark.parametrize(("what", "whole_files", "longest"), READERS, ids=[r[0].split()[0] for r in READERS])
def test_no_bytes_upset_a_reader(
    build: Build, tmp_path: Path, what: str, whole_files: Callable[[Build, Path], None], longest: int
) -> None:
    (tmp_path / "corpus").mkdir()
    whole_files(build, tmp_path / "corpus")

    def fuzz(program: Path) -> subprocess.CompletedProcess[str]:
        options = ["-runs=1000000", f"-max_len={longest}", "-seed=1", "-verbosity=0"]
        command = [str(program), *options, f"-artifact_prefix={tmp_path}/", str(tmp_path / "corpus")]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    planted = fuzz(build(FUZZER, f"{what} -DTASTE_PLANT_SKIP_BOUND"))
    assert planted.returncode != 0 and "AddressSanitizer: stack-buffer-overflow" in planted.stderr
    result = fuzz(build(FUZZER, what))
    assert result.returncode == 0, result.stderr[-3000:]
