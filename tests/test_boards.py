"""host_control/boards: local, emulated and recorded boards, and what a measurement's output and exit code mean."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cross.errors import (
    CompatibilityError,
    CorruptInputError,
    DoesNotFitError,
    FileError,
    LinkLostError,
    MissingToolError,
    TasteError,
    UsageError,
)
from host_control.board import Counters, OperatingPoint
from host_control.boards import BenchSettings, DeployedBoard, RecordedBoard, open_board
from host_control.boards.bench import bench_arguments, bench_limit_s, read_bench
from host_control.boards.detached import DetachedRun
from host_control.boards.local import LocalConnection
from host_control.connection import RunResult, shell_line
from tests.fake_program import write_build
from tests.tiny_elf import write_aarch64_program


@pytest.fixture
def board(tmp_path: Path) -> Iterator[DeployedBoard]:
    """The local board with the fake program deployed; the CPU here need not be the fake's."""
    build = write_build(tmp_path / "build")
    (build / "manifest.json").unlink()
    with open_board("local", remote_dir=str(tmp_path / "board")) as opened:
        assert isinstance(opened, DeployedBoard)
        opened.deploy(build, files=("taste-train",))
        yield opened


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def wait_for_pid(folder: Path) -> int:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for path in folder.rglob("taste-train.pid"):
            if path.read_text().strip():
                return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError("the program never started")


def test_a_measurement_becomes_counters(board: DeployedBoard, tmp_path: Path) -> None:
    expected = Counters(8, 12.5, 0.01, 0.1, 0.2, 0.01, 1000, 1010, 3, False, True, "hot")
    assert board.measure(OperatingPoint(8)) == expected
    calls = next((tmp_path / "board").rglob("taste-train.calls")).read_text().splitlines()
    assert calls == ["bench --batch-size 8 --seconds 2"]


def test_the_command_line_of_a_measurement() -> None:
    point = OperatingPoint(6, program="eval", threads=2, cores=(0, 3))
    settings = BenchSettings(seconds=0.5, min_steps=3, warmup=1, seed=7, memory_bytes=1 << 29, weights="/w x")
    assert " ".join(bench_arguments(point, settings)) == (
        "bench --batch-size 6 --program eval --seconds 0.5 --min-steps 3 --warmup 1 --threads 2 --cores 0,3 "
        "--weights /w x --memory 536870912 --seed 7"
    )
    watched = bench_arguments(OperatingPoint(1, frequency_khz=600_000), BenchSettings(power_every=0.1))
    assert watched[-4:] == ["--frequency", "600000", "--power-every", "0.1"]
    for wrong in (OperatingPoint(0), OperatingPoint(-2)):
        with pytest.raises(UsageError):
            bench_arguments(wrong, settings)
    assert (
        bench_limit_s(OperatingPoint(128), settings, True) > bench_limit_s(OperatingPoint(128), settings, False) > 1000
    )


@pytest.mark.parametrize(
    ("batch_size", "kind", "code", "message"),
    [
        (10, DoesNotFitError, 10, r"^batch size 10 needs 812 MiB; 540 MiB free. Largest that fits: 8.$"),
        (15, TasteError, 15, "NaN at step 3"),
        (77, TasteError, 1, "failed with exit code 77 and said nothing"),
        (132, CompatibilityError, 13, "SIGILL, exit 132"),
        (137, DoesNotFitError, 10, r"\(100 MiB planned\) was killed .*exit 137.* smaller batch size"),
        (139, TasteError, 1, "crashed with SIGSEGV"),
        (143, TasteError, 1, "ended from outside"),
        (200, TasteError, 1, "printed no result for batch size 200"),
        (201, CompatibilityError, 13, "lacks or garbles 'samples_per_s'"),
    ],
)
def test_each_exit_of_the_program_is_explained(
    board: DeployedBoard, batch_size: int, kind: type[TasteError], code: int, message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        board.measure(OperatingPoint(batch_size))
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24])
def test_every_exit_code_comes_back_as_its_own_error(code: int) -> None:
    result = RunResult(("taste-train",), code, "", "warning: x\nerror: 3 of 5 wrong. Do this.\n")
    with pytest.raises(TasteError, match=r"^3 of 5 wrong. Do this.$") as caught:
        read_bench(result, OperatingPoint(1), "b")
    assert caught.value.exit_code == code


def test_a_deployment_that_went_away_is_told(board: DeployedBoard, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "board" / "objects")
    with pytest.raises(FileError, match="is not there any more.*Deploy again"):
        board.measure(OperatingPoint(1))


def test_a_hung_program_is_stopped_and_told(board: DeployedBoard, tmp_path: Path) -> None:
    with pytest.raises(LinkLostError, match="did not end within 1 s: stopped"):
        board.run_program(["bench", "--batch-size", "300"], timeout=1)
    assert gone(wait_for_pid(tmp_path / "board"))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running_when_the_host_is_interrupted_or_killed(tmp_path: Path, ending: signal.Signals) -> None:
    build, folder = write_build(tmp_path / "build"), tmp_path / "board"
    script = (
        "import sys; from pathlib import Path; from host_control.boards import open_board\n"
        "from host_control.board import OperatingPoint\n"
        "with open_board('local', remote_dir=sys.argv[2]) as board:\n"
        "    board.deploy(Path(sys.argv[1]), files=('taste-train',)); board.measure(OperatingPoint(300))\n"
    )
    (build / "manifest.json").unlink()
    with subprocess.Popen([sys.executable, "-c", script, build, folder], stderr=subprocess.DEVNULL) as host:
        try:
            pid = wait_for_pid(folder)
            host.send_signal(ending)
            assert host.wait(10) != 0
        finally:
            host.kill()
    assert gone(pid)


def test_a_command_that_is_not_there_ends_with_127() -> None:
    assert LocalConnection().run(["no-such-program-here"]).exit_code == 127
    assert LocalConnection().run(["/"]).exit_code == 126


def measuring(tmp_path: Path, owner: str) -> DeployedBoard:
    """A board behind a link, whose measurements run on without it."""
    settings = BenchSettings(owner=owner)
    return DeployedBoard("pi", LocalConnection("pi"), str(tmp_path / "board"), settings, outlives_link=True)


def test_a_measurement_whose_host_died_is_collected_by_its_owner_only(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build")
    (build / "manifest.json").unlink()
    with measuring(tmp_path, "study") as board:
        board.deploy(build, files=("taste-train",))

    def died(self: DetachedRun, command: Any, record: Any, *_: object, **__: object) -> RunResult:
        self.start(command, record)
        raise LinkLostError("the host was shut down.")

    with pytest.MonkeyPatch.context() as patch, measuring(tmp_path, "study") as board:
        patch.setattr(DetachedRun, "run_through", died)
        with pytest.raises(LinkLostError):
            board.measure(OperatingPoint(8))
    for owner, calls in (("study", 1), ("study", 2), ("another", 3)):
        with measuring(tmp_path, owner) as board:
            assert board.measure(OperatingPoint(8)).samples_per_s == 12.5
        (log,) = (tmp_path / "board").rglob("taste-train.calls")
        assert len(log.read_text().splitlines()) == calls
    with measuring(tmp_path, "study") as board:
        with pytest.raises(DoesNotFitError, match="Largest that fits: 8"):
            board.measure(OperatingPoint(10))
        with pytest.raises(DoesNotFitError, match="exit 137"):
            board.measure(OperatingPoint(137))
        with pytest.raises(CompatibilityError, match="SIGILL, exit 132"):
            board.measure(OperatingPoint(132))
    assert not list((tmp_path / "board" / "runs").iterdir())


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        shell_line(["a\0b"])


def test_this_machine_says_what_it_is() -> None:
    with open_board("local") as board:
        assert isinstance(board, DeployedBoard)
        facts = board.facts()
    assert facts.arch == os.uname().machine and facts.memory_available_bytes > 0


def test_nothing_deployed_is_a_usage_error(tmp_path: Path) -> None:
    with (
        open_board("local", remote_dir=str(tmp_path / "none")) as board,
        pytest.raises(UsageError, match="Deploy a build"),
    ):
        board.measure(OperatingPoint(1))


# Emulated.


@pytest.mark.needs("qemu")
def test_an_emulated_board_runs_the_other_architecture_and_says_emulated(tmp_path: Path) -> None:
    result = {"event": "result", "batch_size": 4, "samples_per_s": 1.5, "emulated": False}
    (tmp_path / "build").mkdir()
    write_aarch64_program(tmp_path / "build" / "taste-train", json.dumps(result) + "\n")
    with open_board("emulated:rpi4", remote_dir=str(tmp_path / "board")) as board:
        assert isinstance(board, DeployedBoard)
        facts = board.facts()
        assert (facts.arch, facts.features, facts.vector_bits, facts.emulated) == ("aarch64", ("neon",), 128, True)
        assert facts.memory_available_bytes <= 4096 << 20
        board.deploy(tmp_path / "build", files=("taste-train",))
        counters = board.measure(OperatingPoint(4))
    assert counters.emulated and counters.samples_per_s == 1.5


@pytest.mark.needs("qemu")
def test_a_build_for_another_cpu_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build")
    with open_board("emulated:visionfive2", remote_dir=str(tmp_path / "board")) as board:
        assert isinstance(board, DeployedBoard)
        with pytest.raises(CompatibilityError, match="but the board's CPU is riscv64"):
            board.deploy(build)
    assert not (tmp_path / "board").exists()


def test_missing_qemu_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingToolError, match="qemu-aarch64 is not installed.*apt-get install qemu-user") as caught:
        open_board("emulated:rpi4").__enter__()
    assert caught.value.exit_code == 22


def test_a_target_without_emulator_and_an_unknown_one_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="no emulator.*--board local"):
        open_board("emulated:x86-64-avx512").__enter__()
    with pytest.raises(UsageError, match="unknown target 'pdp11'"):
        open_board("emulated:pdp11").__enter__()


# Recorded.


def write_table(path: Path, record: object) -> str:
    path.write_text(json.dumps(record))
    return f"recorded:{path}"


ROWS = [
    {"batch_size": 1, "samples_per_s": 3.0},
    {"batch_size": 8, "samples_per_s": 9.5, "spread": 0.02, "tainted": True},
]


def test_a_recorded_table_is_replayed(tmp_path: Path) -> None:
    name = write_table(tmp_path / "pi.json", {"board": "a Pi 4", "emulated": True, "throughput": ROWS, "verb": "tune"})
    with open_board(name) as board:
        assert isinstance(board, RecordedBoard)
        counters = board.measure(OperatingPoint(8))
        assert (counters.samples_per_s, counters.spread, counters.emulated, counters.tainted) == (9.5, 0.02, True, True)
        assert (board.name, board.batch_sizes) == ("a Pi 4", (1, 8))
        with pytest.raises(UsageError, match="batch size 6 is not in the table of a Pi 4, which has 1, 8"):
            board.measure(OperatingPoint(6))


@pytest.mark.parametrize(
    "record",
    [
        [],
        3,
        {},
        {"throughput": []},
        {"throughput": [{"batch_size": 1}]},
        {"throughput": [{"batch_size": "x", "samples_per_s": 1}]},
        {"throughput": [{"batch_size": 0, "samples_per_s": 1}]},
        {"throughput": [{"batch_size": 1, "samples_per_s": float("nan")}]},
    ],
)
def test_what_is_no_table_is_corrupt_input(tmp_path: Path, record: object) -> None:
    with pytest.raises(CorruptInputError, match="is not a recorded table") as caught:
        open_board(write_table(tmp_path / "t.json", record)).__enter__()
    assert caught.value.exit_code == 14


def test_a_table_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recorded table"):
        open_board(f"recorded:{tmp_path}/none.json").__enter__()
    (tmp_path / "t.json").write_bytes(b"\xff{")
    with pytest.raises(CorruptInputError):
        open_board(f"recorded:{tmp_path}/t.json").__enter__()


@pytest.mark.parametrize("name", ["", "-oProxyCommand=touch x", "emulate:rpi4", "a b", "$(x)", "host:99999", "@host"])
def test_a_name_that_can_be_no_board_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_board(name).__enter__()
    assert caught.value.exit_code == 2
