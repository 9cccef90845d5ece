"""Emulated boards of the product: deploy, tune, train and resume on four of them, and what each must refuse (13, 10)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.errors import CompatibilityError, DoesNotFitError, LinkLostError
from host_control import deploy
from host_control.board import Counters, OperatingPoint
from host_control.boards import DeployedBoard, open_board
from host_control.boards.bench import BenchSettings
from host_control.cli import main
from host_control.emulation.namespace_board import set_cable
from host_control.emulation.state import Running, board_folder, find_up, read_board
from host_control.ssh import Connection
from tests.ports import listeners_of

_ROOT = Path(__file__).resolve().parent.parent
BoardUp = Callable[..., str]
Built = Callable[..., Path]

SHAPE = (1, 6, 6)
"""Of the images: a machine that counts instructions, or one on a busy host, does a few million operations a second."""

BOARDS = [
    pytest.param("rpi4-netns", marks=pytest.mark.needs("netns-boards", "zig")),
    pytest.param("rpi4-vm", marks=pytest.mark.needs("vm-boards", "zig")),
    pytest.param("visionfive2-vm", marks=pytest.mark.needs("vm-boards", "zig")),
    pytest.param("bpi-f3-vm", marks=pytest.mark.needs("vm-boards", "zig")),
]


def build_for(built: Built, board: str) -> Path:
    return built("mlp", board.rpartition("-")[0], input_shape=SHAPE)


def ssh(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """As a person would, with OpenSSH's own client."""
    command = ["ssh", "-F", str(find_up(name)), name, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, stdin=subprocess.DEVNULL)


@pytest.fixture
def opened(board_up: BoardUp) -> Iterator[Callable[..., DeployedBoard]]:
    """`opened(name)`: a connection to a board that is up."""
    boards: list[DeployedBoard] = []

    def open_one(name: str, **settings: Any) -> DeployedBoard:
        context = open_board(board_up(name, **settings), settings=BenchSettings(seconds=0.1))
        board = context.__enter__()
        assert isinstance(board, DeployedBoard)
        boards.append(board)
        return board

    yield open_one
    for board in boards:
        board.close()


def recorded_rate(batch_size: int) -> float:
    """A made-up curve that peaks at 6."""
    return 50.0 - (batch_size - 6) ** 2


@pytest.mark.parametrize("name", BOARDS)
def test_deploy_tune_train_and_resume(
    name: str,
    board_up: BoardUp,
    built: Built,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    board_up(name)

    def said(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, "--board", name, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    build = build_for(built, name)
    sent = said("deploy", "--build", str(build), "--out", str(tmp_path / "deploy"))
    assert sent["sha256"] == hashlib.sha256((build / "taste-train").read_bytes()).hexdigest() and sent["sent_bytes"] > 0
    assert ssh(name, "sha256sum", ".local/share/taste-edge/current/taste-train").stdout.startswith(sent["sha256"])

    measured, measure = [], DeployedBoard.measure

    def replayed(board: DeployedBoard, point: OperatingPoint) -> Counters:
        """Every size is really run there; its rate is the recorded one."""
        counters = measure(board, point)
        assert counters.emulated and counters.samples_per_s > 0
        measured.append(point.batch_size)
        rate = recorded_rate(point.batch_size)
        return replace(counters, samples_per_s=rate, spread=0.001, tainted=False, taint="")

    with monkeypatch.context() as patch:
        patch.setattr(DeployedBoard, "measure", replayed)
        study = ["--build", str(build), "--max-batch-size", "8", "--seconds", "0.05", "--out", str(tmp_path / "tune")]
        tuned = said("tune", *study)
    assert tuned["emulated"] is True and tuned["bs_peak"] == 6 and set(measured) <= {1, *range(2, 9, 2)}

    train_and_resume(name, tmp_path, said)


def training_of(folder: Path, epochs: int) -> list[str]:
    """A short training run of images that are made here; an epoch of a `-netns` board is over in half a second."""
    draw = np.random.default_rng(5)
    x, y = draw.integers(0, 256, (240, *SHAPE)).astype(np.uint8), np.arange(240) % 10
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    words = ["train", "--model", "mlp", "--data", str(folder / "data.npz"), "--batch-size", "4", "--lr", "0.01"]
    return [*words, "--epochs", str(epochs), "--augment", "crop-flip"]


_END_AT_A_STEP = """echo ready
until grep -qs '"step"' .local/share/taste-edge/runs/run-*/events.jsonl; do sleep 0.05; done
pkill -TERM taste-train"""


def train_and_resume(name: str, folder: Path, said: Callable[..., dict[str, Any]]) -> None:
    """A run that is ended on the board in the middle goes on to the bits of one that never was."""
    epochs = 8 if name.endswith("-netns") else 4
    words = training_of(folder, epochs)
    straight = said(*words, "--out", str(folder / "straight"))
    assert straight["emulated"] is True and straight["epochs"] == epochs

    command = [sys.executable, "-m", "host_control", *words, "--board", name, "--json", "--out", str(folder / "run")]
    # It waits on the board itself: a fast one would be through with the run by the time of a login.
    with subprocess.Popen(
        ["ssh", "-F", str(find_up(name)), name, _END_AT_A_STEP],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as ender:
        try:
            assert ender.stdout is not None and ender.stdout.readline() == "ready\n"
            ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False)
            assert (ender.wait(60), ended.returncode) == (0, 130), ended.stderr
        finally:
            ender.kill()
    resumed = said(*words, "--out", str(folder / "run"), "--resume")
    assert (resumed["sha256"], resumed["epochs"]) == (straight["sha256"], epochs)


# Refused before anything is sent (13), with the feature that is missing.


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        pytest.param("bpi-f3", "visionfive2-vm", "needs v;", marks=pytest.mark.needs("vm-boards", "zig")),
        pytest.param("rpi5", "rpi4-vm", "needs fp16, dotprod;", marks=pytest.mark.needs("vm-boards", "zig")),
        pytest.param(
            "bpi-f3",
            "generic-riscv64-v-netns",
            "vectors of 256 bits; the board's have 128",
            marks=pytest.mark.needs("netns-boards", "zig"),
        ),
        pytest.param(
            "generic-riscv64-v",
            "bpi-f3-vm",
            "vectors of 128 bits; the board's have 256",
            marks=pytest.mark.needs("vm-boards", "zig"),
        ),
    ],
)
def test_a_binary_that_could_not_run_there_is_never_started(
    target: str, name: str, message: str, opened: Callable[..., DeployedBoard], built: Built
) -> None:
    board = opened(name)
    digest = hashlib.sha256((build_for(built, f"{target}-x") / "taste-train").read_bytes()).hexdigest()
    with pytest.raises(CompatibilityError, match=message) as caught:
        board.deploy(build_for(built, f"{target}-x"))
    assert caught.value.exit_code == 13
    assert not ssh(name, "ls", f".local/share/taste-edge/objects/{digest}").stdout


@pytest.mark.needs("netns-boards", "zig")
def test_a_memory_cap_lower_than_the_plan_is_told_and_survived(
    opened: Callable[..., DeployedBoard], built: Built
) -> None:
    """The cap is a control group's; the board's own MemAvailable says nothing of it."""
    board = opened("rpi3-netns", memory_bytes=192 << 20)
    assert board.facts().memory_available_bytes < 192 << 20
    assert "MemAvailable" in ssh(board.name, "cat", "/proc/meminfo").stdout
    build = built("mlp", "rpi3", input_shape=(3, 16, 16))
    board.deploy(build)
    with pytest.raises(DoesNotFitError, match=r"Largest that fits: \d+") as caught:
        board.measure(OperatingPoint(100_000))
    assert caught.value.exit_code == 10
    assert board.measure(OperatingPoint(4)).emulated and ssh(board.name, "true").returncode == 0


# The cable is pulled at random bytes of an upload.


def write_big_build(folder: Path, build: Path, seed: int) -> Path:
    """The same program with 12 MiB of weights that nobody has yet."""
    folder.mkdir()
    (folder / "taste-train").symlink_to(build / "taste-train")
    weights = random.Random(seed).randbytes(12 << 20)
    (folder / "weights.safetensors").write_bytes(weights)
    manifest = json.loads((build / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"]["sha256"] = hashlib.sha256(weights).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def partial_files(there: Path) -> list[str]:
    """Files under a final name whose content is not what the name says."""
    objects = [path for path in (there / "objects").glob("*/*") if path.suffix != ".part"]
    return [str(p) for p in objects if hashlib.sha256(p.read_bytes()).hexdigest() != p.parent.name]


def cut_an_upload(running: Running, big: Path, there: Path, at: int) -> float:
    """Pull the cable once `at` bytes of the weights are on the board; the seconds that deploy then took to return."""
    name, cut_at = running.name, [0.0]
    digest = hashlib.sha256((big / "weights.safetensors").read_bytes()).hexdigest()

    def pull() -> None:
        while not any(path.stat().st_size >= at for path in there.glob(f"objects/{digest}/weights.safetensors*")):
            time.sleep(0.001)
        set_cable(running, up=False)
        cut_at[0] = time.monotonic()

    puller = threading.Thread(target=pull, daemon=True)
    try:
        with DeployedBoard(
            name, Connection(name, ssh_config=find_up(name), answer_s=4), "~/cut", BenchSettings(), emulated=True
        ) as board:
            puller.start()
            with pytest.raises(LinkLostError):
                board.deploy(big, files=("taste-train", "manifest.json", "weights.safetensors"))
            returned = time.monotonic()
    finally:
        puller.join(20)
        set_cable(running, up=True)
    assert cut_at[0] > 0
    return returned - cut_at[0]


@pytest.mark.needs("netns-boards", "zig")
@pytest.mark.parametrize("cuts", [5, pytest.param(20, marks=pytest.mark.acceptance)])
def test_a_cut_link_leaves_the_old_deployment_and_no_partial_file(
    cuts: int, board_up: BoardUp, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = read_board(board_up("rpi4-netns"))
    assert running is not None
    there = board_folder(running.name) / "root/home/board/cut"
    build, files = build_for(built, running.name), ("taste-train", "manifest.json", "weights.safetensors")
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    draw = random.Random(seed)
    with open_board(running.name, remote_dir="~/cut") as board:
        assert isinstance(board, DeployedBoard)
        board.deploy(write_big_build(tmp_path / "old", build, 0), files=files)
    old = os.readlink(there / "current")
    for number in range(1, cuts + 1):
        big = write_big_build(tmp_path / f"new{number}", build, number)
        assert cut_an_upload(running, big, there, draw.randrange(1, 11 << 20)) < 20
        assert os.readlink(there / "current") == old and partial_files(there) == []
    with open_board(running.name, remote_dir="~/cut") as board:
        assert isinstance(board, DeployedBoard)
        sent = board.deploy(big, files=files).sent_bytes
        assert board.info()["event"] == "info"
    # What had arrived of the last one was not sent again.
    assert 0 < sent < 12 << 20
    assert os.readlink(there / "current") != old and partial_files(there) == []

    # A deploy that writes in place is caught by the same check.
    send = deploy._send
    monkeypatch.setattr(deploy, "_send", lambda link, source, part: send(link, source, part.removesuffix(".part")))
    cut_an_upload(running, write_big_build(tmp_path / "planted", build, 99), there, 1 << 20)
    assert partial_files(there) != []
    ssh(running.name, "rm", "-rf", "cut")


def listening(running: Running) -> set[str]:
    """The ports of the whole board, as `ss -ltn` there would show them."""
    inside = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0]
    shown = subprocess.check_output(["nsenter", "--net", f"--target={inside}", "ss", "-ltnH"], text=True)
    return {line.split()[3] for line in shown.splitlines()}


@pytest.mark.needs("netns-boards", "zig")
@pytest.mark.parametrize("cuts", [1, pytest.param(5, marks=pytest.mark.acceptance)])
def test_a_cut_link_changes_nothing_of_a_run(
    cuts: int, board_up: BoardUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bits are those of a run without any link. It is an ordinary user's, and no port is opened on either side."""
    running = read_board(board_up("rpi4-netns"))
    assert running is not None
    words, there = training_of(tmp_path, 4 + 8 * cuts), ["--remote-dir", str(tmp_path / "there")]
    assert main([*words, "--board", "emulated:rpi4", *there, "--out", str(tmp_path / "here"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])["sha256"]
    command = [sys.executable, "-m", "host_control", *words, "--board", running.name, "--json"]
    command += ["--out", str(tmp_path / "run")]
    assert ssh(running.name, "id", "-u").stdout.strip() == "1000"
    ports, lost = listening(running), 0
    assert {port.rpartition(":")[2] for port in ports} == {"22"}
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None and training.stderr is not None
        try:
            for line in training.stdout:
                if '"event": "step"' in line and lost < cuts:
                    assert (listening(running), listeners_of(training.pid)) == (ports, set())
                    set_cable(running, up=False)
                    time.sleep(2)
                    set_cable(running, up=True)
                    lost += 1
        finally:
            set_cable(running, up=True)
        messages = training.stderr.read()
    assert training.returncode == 0 and lost == cuts, messages
    assert json.loads(line)["sha256"] == expected
    assert listening(running) == ports
    with subprocess.Popen(["ssh", "-F", str(find_up(running.name)), running.name, "busybox nc -l -p 4444"]) as planted:
        until = time.monotonic() + 30
        while listening(running) == ports:
            assert time.monotonic() < until, "a program that listens is not seen"
            time.sleep(0.1)
        planted.terminate()


@pytest.mark.needs("vm-boards")
def test_a_snapshot_resumes_and_down_leaves_nothing(board_up: BoardUp, capsys: pytest.CaptureFixture[str]) -> None:
    name = board_up("rpi4-vm")
    before = read_board(name)
    assert before is not None and main(["board", "down", name]) == 0
    assert not before.alive and not board_folder(name).exists()
    assert main(["board", "up", name, "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {"event": "progress", "stage": "resuming", "done": 0, "total": 1} in said
    assert said[-1]["host"] == "127.0.0.1" and ssh(name, "uname", "-m").stdout.strip() == "aarch64"
    assert main(["board", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["emulated"]
    assert {"up"} == {row["state"] for row in listed if row["name"] == name}


@pytest.mark.needs("netns-boards")
@pytest.mark.parametrize("ending", ["INT", "KILL"])
def test_an_interrupted_up_leaves_nothing(board_up: BoardUp, ending: str) -> None:
    """Killed, nothing runs on, and the folder that is left goes with the next `down`."""
    board_up("rpi4-netns")
    name = "generic-arm64-netns"
    code = (
        "import os, signal, sys; from host_control.emulation import namespace_board as n; from host_control.cli import main\n"
        f"n.wait_for_ssh = lambda *_: os.kill(os.getpid(), signal.SIG{ending})\n"
        f"sys.exit(main(['board', 'up', '{name}']))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (130 if ending == "INT" else -9), done.stderr
    until = time.monotonic() + 10
    while any(name in line for line in processes()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(name in line for line in processes())
    assert board_folder(name).exists() == (ending == "KILL")
    assert main(["board", "down", name]) == 0 and not board_folder(name).exists()


def processes() -> list[str]:
    return [
        line for line in subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines() if "unshare" in line
    ]
