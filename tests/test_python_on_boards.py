"""device_runtime as `deploy --python` leaves it, under the Pythons that Debian ships: offline, and with taste-train's own bits."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cross.target import Target, find_target
from host_control.cli import main
from host_control.emulation.state import find_up
from tests.debian_root import make_root
from tests.host import host_target
from tests.packed_data import MEAN, STD, normalised, pack

_ROOT = Path(__file__).resolve().parent.parent
_EXAMPLES = ("train_on_the_board.py", "learn_on_the_board.py")
_DEBIAN = "python3,python3-cffi,python3-numpy,python3-psutil"
_IMPORT = """import device_runtime, device_runtime.monitor as m; m.Monitor().read()
import sys, numpy, cffi; print('%d.%d' % sys.version_info[:2], numpy.__version__, cffi.__version__)"""
_ROWS, _STEPS = 20, 6
_CURRENT = ".local/share/taste-edge/current"


def samples() -> tuple[
    np.ndarray[tuple[int, ...], np.dtype[np.uint8]], np.ndarray[tuple[int, ...], np.dtype[np.int32]]
]:
    draw = np.random.default_rng(8)
    return draw.integers(0, 256, (_ROWS, 2, 16, 16)).astype(np.uint8), draw.integers(0, 10, _ROWS).astype(np.int32)


def trained_by_the_program(target: Target, build: Path, folder: Path) -> tuple[list[float], dict[str, str]]:
    """The loss of every step, and the SHA-256 of every tensor afterwards, as taste-train has them."""
    x, y = samples()
    save_file({"x": normalised(x), "y": y}, folder / "floats")
    command = [*(target.emulator("")[:-1] if target.name != host_target() else ()), str(build / "taste-train"), "train"]
    command += ["--samples", str(folder / "floats"), "--weights", str(build / "weights.safetensors"), "--lr", "0.01"]
    command += ["--batch-size", "8", "--steps", str(_STEPS), "--momentum", "0.9", "--save", str(folder / "theirs")]
    ran = subprocess.run([*command, "--report-rate", "1000"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"], digests(folder / "theirs")


def digests(weights: Path) -> dict[str, str]:
    return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in load_file(weights).items()}


@pytest.mark.needs("debian-roots", "zig")
@pytest.mark.parametrize(
    ("suite", "architecture", "target", "versions"),
    [
        # The oldest of everything, from PyPI.
        ("bullseye", "amd64", None, r"3\.9 1\.24\.\d+ 1\.15\.\d+"),
        ("trixie", "arm64", "rpi4", r"3\.13 2\.2\.\d+ 1\.17\.\d+"),
        pytest.param("bookworm", "arm64", "rpi4", r"3\.11 1\.24\.\d+ 1\.15\.\d+", marks=pytest.mark.acceptance),
        pytest.param("trixie", "riscv64", "visionfive2", r"3\.13 2\.2\.\d+ 1\.17\.\d+", marks=pytest.mark.acceptance),
    ],
)
def test_python_trains_with_the_bits_of_the_program(
    suite: str, architecture: str, target: str | None, versions: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    name = target or host_target()
    build = built("mlp", name, input_shape=(2, 16, 16))
    losses, weights = trained_by_the_program(find_target(name), build, tmp_path)
    assert len(losses) == _STEPS

    wheels = () if target else ("numpy==1.24.*", "cffi==1.15.*", "pycparser==2.21")
    root = make_root(tmp_path / "root", suite, architecture, _DEBIAN if target else "python3", wheels)
    there = root.folder / "home/board"
    there.mkdir(parents=True)
    board = ["--board", f"emulated:{target}" if target else "local", "--remote-dir", str(there / "taste-edge")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert main(["deploy", "--python", "--build", str(build), "--out", str(tmp_path / "deploy"), *board]) == 0
    current = "/home/board/taste-edge/current"
    assert re.fullmatch(versions, root.run(current, "/usr/bin/python3", "-c", _IMPORT).strip())

    for example in _EXAMPLES:
        shutil.copy(_ROOT / "examples" / example, there)
    x, y = samples()
    pack(there / "train", x, y, MEAN, STD)
    said = root.run("/home/board", "/usr/bin/python3", _EXAMPLES[0], current, "train", "ours", PYTHONPATH=current)
    assert [float(line.split()[-1]) for line in said.splitlines()] == losses
    assert digests(there / "ours") == weights
    pack(there / "stream", np.repeat(x, 10, axis=0), np.repeat(y, 10))
    learn = ("/usr/bin/python3", _EXAMPLES[1], f"{current}/libtaste.so", "stream")
    assert root.run("/home/board", *learn, PYTHONPATH=current).startswith("200 samples, 20 updates: ")


@pytest.mark.acceptance
@pytest.mark.needs("netns-boards", "zig")
def test_a_board_over_ssh_trains_in_python_too(
    board_up: Callable[..., str], built: Callable[..., Path], tmp_path: Path
) -> None:
    """From `board up --packages` on: sent over SSH, imported there by its own user's Python."""
    name = board_up("rpi5-netns", packages=("python3", "python3-cffi", "python3-numpy"))
    build = built("mlp", "rpi5", input_shape=(2, 16, 16))
    losses, _ = trained_by_the_program(find_target("rpi5"), build, tmp_path)
    assert main(["deploy", "--python", "--build", str(build), "--board", name, "--out", str(tmp_path / "deploy")]) == 0
    x, y = samples()
    pack(tmp_path / "train", x, y, MEAN, STD)
    ssh = ["-F", str(find_up(name))]
    files = [str(tmp_path / "train"), *(str(_ROOT / "examples" / example) for example in _EXAMPLES)]
    subprocess.run(["scp", "-q", *ssh, *files, f"{name}:"], check=True)
    line = f"PYTHONPATH={_CURRENT} python3 {_EXAMPLES[0]} {_CURRENT} train ours"
    said = subprocess.run(["ssh", *ssh, name, line], capture_output=True, text=True, check=True, timeout=300).stdout
    assert [float(step.split()[-1]) for step in said.splitlines()] == losses


@pytest.mark.needs("zig")
def test_a_python_that_cannot_use_the_package_is_told_before_anything_is_current(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'cffi'\" >&2; exit 1\n")
    python.chmod(0o755)
    build = built("mlp", host_target(), input_shape=(2, 16, 16))
    there = tmp_path / "there"
    deploy = ["deploy", "--build", str(build), "--board", "local", "--remote-dir", str(there), "--json"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
        assert main([*deploy, "--python", "--out", str(tmp_path / "a")]) == 22
    assert "No module named 'cffi'. It needs Python 3.9, numpy and cffi" in capsys.readouterr().err
    assert not (there / "current").exists()

    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    assert main([*deploy, "--python", "--out", str(tmp_path / "b")]) == 0
    held = sorted(path.name for path in (there / "current" / "device_runtime").glob("*.py"))
    assert held == sorted(path.name for path in (_ROOT / "device_runtime").glob("*.py"))
    # The same build without Python is in there: it stays current, and what other verbs deploy takes nothing away.
    current = os.readlink(there / "current")
    capsys.readouterr()
    assert main([*deploy, "--out", str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sent_bytes"] == 0
    assert os.readlink(there / "current") == current
