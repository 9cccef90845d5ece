"""Following a long program line by line, here and over SSH: what it says, Ctrl-C, a dead link, a killed host."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cross.errors import FileError
from host_control.boards.local import LocalConnection
from host_control.connection import Connection, Lines
from host_control.deploy import upload_file
from host_control.ssh import Connection as SshConnection
from tests.sshd.server import ALIAS, run_sshd
from tests.test_boards import gone

SLOW = """
trap 'echo saved; exit 130' TERM
echo $$ >"$0"; echo begun; n=0
while [ $n -lt 200 ]; do n=$((n+1)); echo line $n; sleep 0.02; done
"""


@contextmanager
def opened(where: str, folder: Path) -> Iterator[Connection]:
    if where == "local":
        yield LocalConnection()
        return
    with run_sshd(folder) as server:
        server.know()
        with SshConnection(ALIAS, ssh_config=server.config, ask=lambda _: None) as link:
            yield link


both = pytest.mark.parametrize("where", ["local", pytest.param("ssh", marks=pytest.mark.needs("sshd"))])


def test_lines_are_given_on_once_they_are_whole() -> None:
    got: list[str] = []
    lines = Lines(got.append)
    for piece in (b"a", b"b\nc", b"", b"\n\nd\xff\n", b"rest"):
        lines.feed(piece)
    assert got == ["ab", "c", "", "d\ufffd"]


@both
def test_a_program_is_followed_to_its_exit_code(where: str, tmp_path: Path) -> None:
    got: list[str] = []
    with opened(where, tmp_path) as link:
        script = "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); echo $i; done; echo bad >&2; exit 15"
        result = link.follow(["sh", "-c", script], got.append)
    assert got == [str(i) for i in range(1, 5001)]
    assert (result.exit_code, result.stdout, result.stderr) == (15, "", "bad\n")


@both
def test_ctrl_c_asks_the_program_to_end_and_hears_what_it_still_says(where: str, tmp_path: Path) -> None:
    got: list[str] = []

    def listen(line: str) -> None:
        got.append(line)
        if line == "line 3":
            raise KeyboardInterrupt

    with opened(where, tmp_path) as link:
        result = link.follow(["sh", "-c", SLOW, str(tmp_path / "pid")], listen)
    assert result.exit_code == 130 and got[-1] == "saved" and "line 200" not in got
    assert gone(int((tmp_path / "pid").read_text()))


@both
def test_an_error_of_the_listener_ends_the_program(where: str, tmp_path: Path) -> None:
    def listen(line: str) -> None:
        if line == "line 3":
            raise FileError("the disk is full. Free some.")

    with opened(where, tmp_path) as link, pytest.raises(FileError):
        link.follow(["sh", "-c", SLOW, str(tmp_path / "pid")], listen)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_killed_host_takes_the_program_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = "import sys; from host_control.boards.local import LocalConnection\n"
    code += "LocalConnection().follow(['sh', '-c', sys.argv[1], sys.argv[2]], print)"
    with subprocess.Popen([sys.executable, "-c", code, SLOW, pid], stdout=subprocess.DEVNULL) as host:
        until = time.monotonic() + 20
        while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(host.pid, signal.SIGKILL)
    assert gone(int(pid.read_text()))


@both
def test_a_file_is_sent_once_by_its_content(where: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "train.safetensors", tmp_path / "board 'x'"
    source.write_bytes(bytes(range(256)) * 1000)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    (tmp_path / "sshd").mkdir()
    with opened(where, tmp_path / "sshd") as link:
        path, sent = upload_file(link, source, str(folder))
        assert (path, sent) == (f"{folder}/data/{digest}/train.safetensors", 256_000)
        assert Path(path).read_bytes() == source.read_bytes()
        assert upload_file(link, source, str(folder)) == (path, 0)
        Path(path).rename(f"{path}.part")
        with Path(f"{path}.part").open("r+b") as part:
            part.truncate(100_000)
        assert upload_file(link, source, str(folder)) == (path, 156_000), "a part that a cut left is gone on with"
    assert not list(folder.rglob("*.part"))
