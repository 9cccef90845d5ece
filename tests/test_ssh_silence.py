"""host_control/ssh.py against servers that fall silent and links that are cut; deployments over the link."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cross.errors import (
    LinkLostError,
    TasteError,
)
from host_control import ssh_auth
from host_control.board import OperatingPoint
from host_control.boards import BenchSettings, DeployedBoard, open_board
from host_control.boards.runs import list_runs
from host_control.ssh import Connection
from tests.fake_program import FILES, write_build
from tests.ports import listeners_of
from tests.sshd.client import connect
from tests.sshd.server import ALIAS, Sshd
from tests.sshd.silent import STAGES, Relay, run_silent, write_config
from tests.test_boards import gone, wait_for_pid

ANSWER_S = 1.0
"""How long a silent host is waited for here; users wait 15 s."""


# Silence.

OPERATIONS: dict[str, Callable[[Connection, Path], object]] = {
    "exec": lambda board, _: board.run(["true"]),
    "read": lambda board, _: board.run(["true"], timeout=60),
    "sftp": lambda board, _: board.home(),
    "stat": lambda board, _: board.size("/x"),
    "write": lambda board, folder: board.put(folder / "ssh_config", "/x"),
    "close": lambda board, folder: board.put(folder / "ssh_config", "/x"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_falls_silent_is_given_up_in_bounded_time(tmp_path: Path, stage: str) -> None:
    with run_silent(stage) as port:
        config = write_config(tmp_path, port)
        board = Connection("b", ssh_config=config, accept_new=True, answer_s=ANSWER_S)
        start = time.monotonic()
        with board, pytest.raises(LinkLostError) as caught:
            OPERATIONS.get(stage, OPERATIONS["exec"])(board, tmp_path)
        # The stages before the silent one take their own time, and a busy machine more.
        assert 0.9 * ANSWER_S < time.monotonic() - start < ANSWER_S + 4
    assert caught.value.exit_code == 17 and "no answer from b" in str(caught.value)


def test_the_silence_catches_a_connection_that_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("host_control.ssh._Watch.run", lambda _: None)
    with run_silent("exec") as port:
        board = Connection("b", ssh_config=write_config(tmp_path, port), accept_new=True, answer_s=ANSWER_S)
        ended = threading.Event()

        def wait() -> None:
            with contextlib.suppress(Exception):
                board.run(["true"])
            ended.set()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert not ended.wait(ANSWER_S + 4), "it would wait for ever"
        board.abort()
        waiting.join(10)


def test_users_wait_less_than_20_seconds() -> None:
    # The silent stages above run with a shorter time; everything else is the same.
    assert inspect.signature(Connection).parameters["answer_s"].default == 15


def test_an_agent_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_auth, "_AGENT_S", 0.3)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        with ssh_auth.open_agent(str(tmp_path / "agent")) as keys:
            assert keys == []


@pytest.mark.needs("sshd")
def test_a_quiet_program_is_no_silent_host(sshd: Sshd) -> None:
    with connect(sshd, answer_s=0.5) as board:
        assert board.run(["sh", "-c", "exec >&- 2>&-; sleep 2"], timeout=20).ok
        assert board.run(["sleep", "1"], timeout=20, tied=True).ok
        with pytest.raises(LinkLostError, match="sleep on .* did not end within 1 s"):
            board.run(["sleep", "30"], timeout=1, tied=True)


@pytest.mark.needs("sshd")
def test_a_server_that_is_stopped_while_a_program_runs_is_noticed(sshd: Sshd) -> None:
    with Relay(sshd.port) as relay:
        board = connect(sshd, answer_s=ANSWER_S)
        board.host = replace(board.host, port=relay.port, key_names=board.host.key_names)
        with board:
            board.open()
            relay.freeze()
            start = time.monotonic()
            with pytest.raises(LinkLostError, match="no answer from"):
                board.run(["sleep", "30"], timeout=600)
            assert time.monotonic() - start < 5


# Deployments and measurements over the link.


def board_through(sshd: Sshd, port: int, folder: Path, answer_s: float = ANSWER_S) -> DeployedBoard:
    link = connect(sshd, answer_s=answer_s)
    link.host = replace(link.host, port=port)
    return DeployedBoard("b", link, str(folder), BenchSettings())


@pytest.fixture
def plain_build(tmp_path: Path) -> Callable[[str], Path]:
    """Builds that any machine runs, with a large file beside the program."""

    def make(text: str) -> Path:
        build = write_build(tmp_path / f"build-{text}", text, weights_bytes=400_000)
        (build / "manifest.json").unlink()
        return build

    return make


PLAIN = (FILES[0], FILES[2])


@pytest.mark.needs("sshd")
def test_deploy_and_measure_over_ssh(sshd: Sshd, tmp_path: Path, plain_build: Callable[[str], Path]) -> None:
    folder = tmp_path / "a 'b' $(touch pwned)"
    with open_board(ALIAS, ssh_config=sshd.config, remote_dir=str(folder)) as board:
        assert isinstance(board, DeployedBoard)
        assert board.facts().arch == os.uname().machine
        assert board.deploy(plain_build("one"), files=PLAIN).sent_bytes > 400_000
        assert board.deploy(plain_build("one"), files=PLAIN).sent_bytes == 0
        assert board.measure(OperatingPoint(8)).samples_per_s == 12.5
        with pytest.raises(TasteError, match="exit 137"):
            board.measure(OperatingPoint(137))
        with pytest.raises(TasteError, match="Largest that fits: 8"):
            board.measure(OperatingPoint(10))
        board.clean()
    assert not folder.exists() and not list(tmp_path.rglob("pwned"))


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_link_cut_during_an_upload_leaves_the_old_deployment(
    sshd: Sshd, tmp_path: Path, plain_build: Callable[[str], Path], frozen: bool
) -> None:
    folder, seed = tmp_path / "board", random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with board_through(sshd, sshd.port, folder, 15) as board:
        board.deploy(plain_build("old"), files=PLAIN)
    for number in range(3):
        with Relay(sshd.port, limit=draw.randrange(20_000, 390_000), frozen=frozen) as relay:
            start = time.monotonic()
            with board_through(sshd, relay.port, folder) as board, pytest.raises(LinkLostError):
                board.deploy(plain_build(f"new{number}"), files=PLAIN)
            assert time.monotonic() - start < 10
        assert "# old" in (folder / "current" / "taste-train").read_text()
        for path in folder.glob("objects/*/weights.safetensors"):
            assert path.stat().st_size == 400_000
    with board_through(sshd, sshd.port, folder, 15) as board:
        assert board.deploy(plain_build("new2"), files=PLAIN).sent_bytes < 402_000
        assert "# new2" in (folder / "current" / "taste-train").read_text()
    assert not list(folder.rglob("*.part"))


def measure_in_another_process(build: Path, folder: Path, sshd: Sshd) -> subprocess.Popen[bytes]:
    """A host that deploys and begins a measurement which never ends by itself."""
    script = (
        "import sys; from pathlib import Path; from host_control.boards import open_board\n"
        "from host_control.board import OperatingPoint\n"
        f"with open_board({ALIAS!r}, remote_dir=sys.argv[2], ssh_config=Path(sys.argv[3])) as board:\n"
        "    board.deploy(Path(sys.argv[1]), files=('taste-train',)); board.measure(OperatingPoint(300))\n"
    )
    command = [sys.executable, "-c", script, str(build), str(folder), str(sshd.config)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.needs("sshd")
def test_ctrl_c_leaves_nothing_running_on_the_board(
    sshd: Sshd, tmp_path: Path, plain_build: Callable[[str], Path]
) -> None:
    with measure_in_another_process(plain_build("x"), tmp_path / "board", sshd) as host:
        try:
            pid = wait_for_pid(tmp_path / "board")
            host.send_signal(signal.SIGINT)
            assert host.wait(20) != 0
        finally:
            host.kill()
    assert gone(pid)


@pytest.mark.needs("sshd")
def test_a_killed_host_changes_nothing_and_the_next_one_finds_the_run(
    sshd: Sshd, tmp_path: Path, plain_build: Callable[[str], Path]
) -> None:
    folder = tmp_path / "board"
    with measure_in_another_process(plain_build("x"), folder, sshd) as host:
        try:
            pid = wait_for_pid(folder)
        finally:
            host.kill()
    with open_board(ALIAS, ssh_config=sshd.config, remote_dir=str(folder)) as board:
        assert isinstance(board, DeployedBoard)
        (run,) = list_runs(board)
        assert (run.status, run.state.pid) == ("running", pid)
        board.detached(run.name).stop()
        assert gone(pid)


@pytest.mark.needs("sshd")
def test_no_port_is_opened(sshd: Sshd, tmp_path: Path, plain_build: Callable[[str], Path]) -> None:
    """By the host, whatever it does; a socket that listens would be seen."""
    before = listeners_of()
    with board_through(sshd, sshd.port, tmp_path / "board", 15) as board:
        board.deploy(plain_build("one"), files=PLAIN)
        assert board.measure(OperatingPoint(8)).samples_per_s == 12.5
        assert listeners_of() == before
        with socket.create_server(("127.0.0.1", 0)):
            assert len(listeners_of() - before) == 1
    assert listeners_of() == before
