"""A board behind a real sshd whose binaries run under QEMU and whose rates were recorded: deploy, measure, tune."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import host_control.boards as boards
from cross.errors import CompatibilityError, SecurityError, TasteError
from host_control.board import OperatingPoint
from host_control.boards import DeployedBoard, open_board
from tests.fake_program import write_build
from tests.sshd.emulated_board import EmulatedBoard, run_emulated_board
from tests.sshd.server import ALIAS, make_key
from tests.tiny_elf import write_aarch64_program


def recorded(batch_size: int) -> dict[str, Any]:
    """A made-up Pi 4: peaks at 10, falls beyond."""
    rate = 7.0 * math.exp(-(math.log(batch_size / 10) ** 2) / 6)
    return {"samples_per_s": rate, "spread": 0.004, "peak_rss_bytes": (40 + 2 * batch_size) << 20, "tainted": False}


TABLE = {size: recorded(size) for size in (1, *range(2, 129, 2))}
TINY_LOSS = 2.302585
TINY_RESULT = {"event": "result", "verb": "train", "first_loss": TINY_LOSS}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[tuple[EmulatedBoard, Path]]:
    """The board, and a build whose program is a hand-made aarch64 ELF."""
    build, folder = tmp_path / "build", tmp_path / "sshd"
    build.mkdir()
    folder.mkdir()
    write_aarch64_program(build / "taste-train", json.dumps(TINY_RESULT) + "\n")
    with run_emulated_board(folder, "rpi4", step=["train"], loss=TINY_LOSS, table=TABLE) as board:
        yield board, build


@pytest.mark.needs("boards")
def test_the_step_runs_under_qemu_and_the_rate_is_the_recorded_one(
    tiny: tuple[EmulatedBoard, Path], tmp_path: Path
) -> None:
    emulated, build = tiny
    with open_board(ALIAS, ssh_config=emulated.sshd.config, remote_dir=str(tmp_path / "there")) as board:
        assert isinstance(board, DeployedBoard)
        facts = board.facts()
        assert (facts.arch, facts.cpu, facts.cores) == ("aarch64", "cortex-a72", 4)
        board.deploy(build, files=("taste-train",))
        counters = board.measure(OperatingPoint(10))
        assert counters.emulated and counters.samples_per_s == pytest.approx(7.0)
        assert emulated.steps() == [{"batch_size": 10, "loss": TINY_LOSS}]
        with pytest.raises(TasteError, match="batch size 7 was never recorded"):
            board.measure(OperatingPoint(7))
        board.clean()
    assert not (tmp_path / "there").exists()


@pytest.mark.needs("boards")
def test_a_step_with_a_wrong_loss_is_no_measurement(tiny: tuple[EmulatedBoard, Path], tmp_path: Path) -> None:
    emulated, build = tiny
    write_aarch64_program(build / "taste-train", json.dumps({**TINY_RESULT, "first_loss": TINY_LOSS * 1.0001}) + "\n")
    with open_board(ALIAS, ssh_config=emulated.sshd.config, remote_dir=str(tmp_path / "there")) as board:
        assert isinstance(board, DeployedBoard)
        board.deploy(build, files=("taste-train",))
        with pytest.raises(TasteError, match="the emulated step gave loss"):
            board.measure(OperatingPoint(10))
    assert emulated.steps() == []


@pytest.mark.needs("boards")
def test_a_build_for_another_board_is_refused_before_it_is_sent(
    tiny: tuple[EmulatedBoard, Path], tmp_path: Path
) -> None:
    emulated, _ = tiny
    with open_board(ALIAS, ssh_config=emulated.sshd.config, remote_dir=str(tmp_path / "there")) as board:
        assert isinstance(board, DeployedBoard)
        with pytest.raises(CompatibilityError, match="the board's CPU is aarch64"):
            board.deploy(write_build(tmp_path / "x86"))
    assert not (tmp_path / "there").exists()


@pytest.mark.needs("boards")
def test_a_wrong_host_key_is_refused_and_known_hosts_untouched(
    tiny: tuple[EmulatedBoard, Path], tmp_path: Path
) -> None:
    sshd = tiny[0].sshd
    sshd.known_hosts.write_text(sshd.host_key_line(key=make_key(tmp_path / "other")))
    before = sshd.known_hosts.read_bytes()
    with open_board(ALIAS, ssh_config=sshd.config, accept_new=True) as board, pytest.raises(SecurityError) as caught:
        board.measure(OperatingPoint(10))
    assert caught.value.exit_code == 19 and sshd.known_hosts.read_bytes() == before


def first_loss(build: Path, board_name: str, folder: Path, step: list[str]) -> float:
    """First loss of one real step of a build, on this machine or under QEMU."""
    with open_board(board_name, remote_dir=str(folder)) as board:
        assert isinstance(board, DeployedBoard)
        board.deploy(build)
        result = board.run_program(step, timeout=300)
        assert result.ok, result.stderr
        return float(json.loads(result.stdout.splitlines()[-1])["first_loss"])


@pytest.mark.needs("boards", "zig")
def test_tune_over_ssh_finds_the_best_of_the_recorded_table(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from cross.probe import choose_target
    from host_control.cli import main

    draw = np.random.default_rng(7)
    samples = tmp_path / "samples.safetensors"
    x = draw.standard_normal((2, 3, 32, 32), dtype=np.float32)
    save_file({"x": x, "y": np.array([3, 7], np.int32)}, samples)
    step = ["train", "--samples", str(samples), "--batch-size", "2", "--steps", "1", "--lr", "0.01"]
    with open_board("local") as here:
        assert isinstance(here, DeployedBoard)
        own = choose_target(here.facts())
    loss = first_loss(built("resnet8", own), "local", tmp_path / "local", step)

    (tmp_path / "sshd").mkdir()
    with run_emulated_board(tmp_path / "sshd", "rpi4", step=step, loss=loss, table=TABLE) as emulated:
        known = partial(open_board, ssh_config=emulated.sshd.config)
        monkeypatch.setattr(boards, "open_board", known)
        words = ["tune", "--board", ALIAS, "--build", str(built("resnet8", "rpi4")), "--max-batch-size", "64", "--json"]
        words += ["--remote-dir", str(tmp_path / "there"), "--out", str(tmp_path / "run")]
        assert main(words) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        steps = emulated.steps()
    assert result["event"] == "result" and result["emulated"] is True
    assert result["bs_peak"] == 10 and result["bs_opt"] in (8, 10)
    assert {row["batch_size"] for row in result["throughput"]} <= {step["batch_size"] for step in steps}
    assert all(step["loss"] == pytest.approx(loss, rel=1e-5) for step in steps)
