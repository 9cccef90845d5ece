"""host_control/ssh.py against a real sshd on loopback, and against servers that fall silent."""

from __future__ import annotations

import inspect
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL

from cross.errors import (
    AuthenticationError,
    CompatibilityError,
    FileError,
    LinkLostError,
    MissingToolError,
    SecurityError,
    TasteError,
    UsageError,
)
from host_control import ssh_auth
from host_control.board import OperatingPoint
from host_control.boards import BenchSettings, DeployedBoard, open_board
from host_control.ssh import Connection
from host_control.ssh_auth import load_key
from tests.fake_program import FILES, INTERRUPTIBLE, write_build
from tests.sshd.server import ALIAS, Sshd, make_key, run_sshd
from tests.sshd.silent import STAGES, Relay, run_silent, write_config
from tests.test_boards import gone, wait_for_pid

ANSWER_S = 1.0
"""How long a silent host is waited for here; users wait 15 s."""


@pytest.fixture(scope="module")
def shared_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with run_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def sshd(shared_sshd: Sshd) -> Sshd:
    """The module's server, its host key known."""
    shared_sshd.know()
    return shared_sshd


def connect(server: Sshd, **options: object) -> Connection:
    return Connection(ALIAS, ssh_config=server.config, ask=lambda _: None, **options)  # type: ignore[arg-type]


def identity(server: Sshd, folder: Path, *lines: str) -> Path:
    """The server's client configuration with other lines in front, which win."""
    config = folder / "config"
    config.write_text("".join(f"{line}\n" for line in lines) + server.config.read_text().replace("IdentityFile", "#"))
    return config


# Commands and files.


@pytest.mark.needs("sshd")
def test_a_command_gives_its_output_and_exit_code(sshd: Sshd) -> None:
    with connect(sshd) as board:
        result = board.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
        assert (result.exit_code, result.stdout, result.stderr, result.ok) == (7, "out\n", "err\n", False)
        assert board.run(["cat"]).stdout == ""  # stdin is at its end
        assert board.run(["sh", "-c", "kill -9 $$"], tied=True).exit_code == 137
        large = board.run(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero >&2"])
        assert (len(large.stdout), len(large.stderr)) == (3_000_000, 3_000_000)


@pytest.mark.needs("sshd")
def test_it_opens_when_first_needed_and_again_after_a_cut(sshd: Sshd) -> None:
    with connect(sshd) as board:
        assert not board.open_now
        assert board.run(["true"]).ok and board.open_now
        board.abort()
        assert board.run(["true"]).ok
    assert not board.open_now
    board.close()


@pytest.mark.needs("sshd")
def test_any_argument_arrives_as_it_is(sshd: Sshd, tmp_path: Path) -> None:
    # No NUL, which no program can be given, and no lone surrogate, which is no byte of any name.
    letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    words = st.lists(st.text(letters, max_size=12), max_size=4)
    with connect(sshd) as board:

        @settings(max_examples=40)
        @given(words)
        def check(arguments: list[str]) -> None:
            arguments = ["-n", "$(touch x)", "a'b\"c", *arguments]
            script = f"cd {tmp_path} && printf '%s\\1' \"$@\""
            said = board.run(["sh", "-c", script, "name", *arguments]).stdout
            assert said == "".join(f"{word}\1" for word in arguments)

        check()
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("sshd")
def test_files_go_there_and_back(sshd: Sshd, tmp_path: Path) -> None:
    source, there = tmp_path / "source", f"{tmp_path}/-a 'b' $(c)\n\"d\""
    source.write_bytes(os.urandom(150_000))
    with connect(sshd) as board:
        assert board.size(there) is None and board.names(f"{tmp_path}/none") == [] and board.read_link(there) is None
        assert board.put(source, there) == 150_000 == board.size(there)
        os.truncate(there, 70_000)
        assert board.put(source, there, offset=70_000) == 80_000
        board.get(there, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
        board.link("source", f"{tmp_path}/link")
        assert board.read_link(f"{tmp_path}/link") == "source" and board.read_link(there) is None
        board.rename(there, f"{tmp_path}/back")
        assert board.names(str(tmp_path)) == ["back", "link", "source"] and board.size(str(tmp_path)) is None
        assert Path(board.home()).is_dir()
        with pytest.raises(FileError, match=r"cannot write .*No such file.*Check the folder"):
            board.put(source, f"{tmp_path}/none/x")
        assert board.run(["true"]).ok


@pytest.mark.needs("sshd")
def test_a_server_without_sftp_is_told(tmp_path: Path) -> None:
    with run_sshd(tmp_path, {"Subsystem": "other /bin/false"}) as server:
        server.know()
        with connect(server) as board, pytest.raises(MissingToolError, match="no SFTP server.*openssh-sftp-server"):
            board.home()


@pytest.mark.needs("sshd")
def test_a_login_shell_that_talks_into_sftp_is_told(tmp_path: Path) -> None:
    with run_sshd(tmp_path, {"Subsystem": "sftp /bin/echo Welcome to my board"}) as server:
        server.know()
        with connect(server) as board, pytest.raises(CompatibilityError, match="login shell prints something"):
            board.home()


# Host keys.


@pytest.mark.needs("sshd")
def test_an_unknown_host_key_is_refused_and_accepted_once_on_demand(sshd: Sshd) -> None:
    shown = subprocess.run(["ssh-keygen", "-lf", f"{sshd.host_key}.pub"], capture_output=True, text=True, check=True)
    sshd.known_hosts.unlink()
    with pytest.raises(SecurityError) as caught:
        connect(sshd).open()
    assert shown.stdout.split()[1] in str(caught.value) and "--accept-new" in str(caught.value)
    assert caught.value.exit_code == 19 and not sshd.known_hosts.exists()
    connect(sshd, accept_new=True).close()
    with connect(sshd, accept_new=True) as board:
        board.open()
    assert sshd.known_hosts.read_text() == sshd.host_key_line()
    with connect(sshd) as board:
        board.open()


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("accept_new", [False, True])
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_wrong_host_key_is_refused_and_known_hosts_untouched(
    sshd: Sshd, tmp_path: Path, accept_new: bool, kind: str
) -> None:
    sshd.known_hosts.write_text(sshd.host_key_line(key=make_key(tmp_path / "other", kind=kind)))
    before = (sshd.known_hosts.read_bytes(), sshd.known_hosts.stat().st_mtime_ns)
    with pytest.raises(SecurityError, match="is not the one in .*known_hosts:1") as caught:
        connect(sshd, accept_new=accept_new).open()
    assert caught.value.exit_code == 19
    assert (sshd.known_hosts.read_bytes(), sshd.known_hosts.stat().st_mtime_ns) == before


@pytest.mark.needs("sshd")
def test_a_hashed_known_host_is_known(sshd: Sshd) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(sshd.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.1" not in sshd.known_hosts.read_text()
    with connect(sshd) as board:
        assert board.run(["true"]).ok


@pytest.mark.needs("sshd")
def test_the_kind_of_key_that_is_known_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    rsa = make_key(tmp_path / "rsa", kind="rsa")
    with run_sshd(tmp_path / "x", extra=f"HostKey {rsa}\n") as server:
        server.known_hosts.write_text(server.host_key_line(key=rsa))
        with connect(server) as board:
            assert board.run(["true"]).ok


@pytest.mark.needs("sshd")
def test_a_revoked_host_key_is_refused(sshd: Sshd) -> None:
    sshd.known_hosts.write_text(f"@revoked {sshd.host_key_line('*')}{sshd.host_key_line()}")
    with pytest.raises(SecurityError, match="is revoked by"):
        connect(sshd).open()


# Logging in.


@pytest.mark.needs("sshd")
def test_a_wrong_key_is_refused_with_what_was_tried(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TASTE_SSH_PASSWORD", raising=False)
    key = make_key(tmp_path / "wrong")
    (tmp_path / "garbage").write_text("no key")
    config = identity(sshd, tmp_path, f"IdentityFile {key}", f"IdentityFile {tmp_path}/garbage")
    with pytest.raises(AuthenticationError, match=rf"{tmp_path}/garbage \(not readable.*ssh-copy-id") as caught:
        Connection(ALIAS, ssh_config=config).open()
    assert caught.value.exit_code == 21 and f"tried {key}" in str(caught.value)


@pytest.mark.needs("sshd")
def test_no_key_at_all_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="tried nothing: there is no agent"):
        Connection(ALIAS, ssh_config=identity(sshd, tmp_path, "IdentityFile none")).open()


@pytest.mark.needs("sshd")
def test_a_server_that_hangs_up_after_too_many_tries_refused_us(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with run_sshd(tmp_path / "x", {"MaxAuthTries": "2"}) as server:
        server.know()
        keys = [make_key(tmp_path / f"wrong{number}") for number in range(4)]
        config = identity(server, tmp_path, *(f"IdentityFile {key}" for key in keys))
        with pytest.raises(AuthenticationError, match="after too many tries"):
            Connection(ALIAS, ssh_config=config).open()


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_an_encrypted_key_asks_for_its_passphrase(tmp_path: Path, kind: str) -> None:
    key = make_key(tmp_path / "key", kind=kind, passphrase="open sesame")
    with pytest.raises(paramiko.PasswordRequiredException):
        load_key(key)
    with pytest.raises((paramiko.SSHException, ValueError)):
        load_key(key, "wrong")
    assert load_key(key, "open sesame").get_base64() == Path(f"{key}.pub").read_text().split()[1]


@pytest.mark.needs("sshd")
def test_a_passphrase_that_is_wrong_first_is_asked_again(sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(sshd.user_key.read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "right", "-f", str(key)], check=True, capture_output=True)
    answers, asked = iter(["wrong", "right"]), []

    def ask(prompt: str) -> str | None:
        asked.append(prompt)
        return next(answers)

    config = identity(sshd, tmp_path, f"IdentityFile {key}")
    with Connection(ALIAS, ssh_config=config, ask=ask) as board:
        assert board.run(["true"]).ok
    assert asked == [f"passphrase of {key}: "] * 2
    with pytest.raises(AuthenticationError, match="encrypted, not opened"):
        Connection(ALIAS, ssh_config=config, ask=lambda _: None).open()


@pytest.mark.needs("sshd")
def test_the_agent_is_asked(sshd: Sshd, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(agent)], stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 10
            while not agent.exists() and time.monotonic() < until:
                time.sleep(0.02)
            environment = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
            add = ["ssh-add", "-q", str(sshd.user_key)]
            subprocess.run(add, env=environment, check=True, capture_output=True)
            config = identity(sshd, tmp_path, f"IdentityAgent {agent}", "IdentityFile none")
            with Connection(ALIAS, ssh_config=config) as board:
                assert board.run(["true"]).ok
            config = identity(sshd, tmp_path, f"IdentityAgent {agent}", "IdentityFile none", "IdentitiesOnly yes")
            with pytest.raises(AuthenticationError):
                Connection(ALIAS, ssh_config=config).open()
        finally:
            process.terminate()


def test_passwords_come_from_the_environment_or_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Passwords(paramiko.ServerInterface):
        def get_allowed_auths(self, username: str) -> str:
            return "password"

        def check_auth_password(self, username: str, password: str) -> int:
            return AUTH_SUCCESSFUL if password == "secret" else AUTH_FAILED

    monkeypatch.setattr("tests.sshd.silent._Stalling", lambda *_: Passwords())
    monkeypatch.delenv("TASTE_SSH_PASSWORD", raising=False)
    with run_silent("nowhere") as port:
        config = write_config(tmp_path, port)
        answers = iter(["wrong", "secret"])
        for ask, variable in ((lambda _: next(answers), None), (lambda _: None, "secret")):
            if variable:
                monkeypatch.setenv("TASTE_SSH_PASSWORD", variable)
            with Connection("b", ssh_config=config, accept_new=True, ask=ask, answer_s=10) as board:
                assert board.open().is_authenticated()
        monkeypatch.setenv("TASTE_SSH_PASSWORD", "wrong")
        with pytest.raises(AuthenticationError, match="tried password; the host accepts password"):
            Connection("b", ssh_config=config, ask=lambda _: pytest.fail("asked"), answer_s=10).open()


# Jump hosts.


@pytest.mark.needs("sshd")
def test_through_a_jump_host(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    target = f"Host behind\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump {ALIAS}\n"
    config.write_text(target + sshd.config.read_text())
    with Connection("behind", ssh_config=config) as board:
        assert board.run(["echo", "through"]).stdout == "through\n"
        assert not isinstance(board.open().sock, type(None)) and isinstance(board.open().sock, paramiko.Channel)


@pytest.mark.needs("sshd")
def test_a_circle_of_jump_hosts_ends(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n" + sshd.config.read_text())
    with Connection("a", ssh_config=config) as board, pytest.raises(UsageError, match="more than 8 jumps"):
        board.open()
    config.write_text(f"Host *\n  ProxyJump {ALIAS}\n" + sshd.config.read_text())
    with Connection(ALIAS, ssh_config=config) as board:
        assert board.run(["true"]).ok


# Silence.

OPERATIONS: dict[str, Callable[[Connection, Path], object]] = {
    "exec": lambda board, _: board.run(["true"]),
    "read": lambda board, _: board.run(["true"], timeout=60),
    "sftp": lambda board, _: board.home(),
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
        assert time.monotonic() - start < ANSWER_S + 4
    assert caught.value.exit_code == 17 and "no answer from b" in str(caught.value)


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
    for number in range(2):
        with Relay(sshd.port, limit=draw.randrange(20_000, 390_000), frozen=frozen) as relay:
            start = time.monotonic()
            with board_through(sshd, relay.port, folder) as board, pytest.raises(LinkLostError):
                board.deploy(plain_build(f"new{number}"), files=PLAIN)
            assert time.monotonic() - start < 10
        assert "# old" in (folder / "current" / "taste-train").read_text()
        for path in folder.glob("objects/*/weights.safetensors"):
            assert path.stat().st_size == 400_000
    with board_through(sshd, sshd.port, folder, 15) as board:
        assert board.deploy(plain_build("new1"), files=PLAIN).sent_bytes < 402_000
        assert "# new1" in (folder / "current" / "taste-train").read_text()
    assert not list(folder.rglob("*.part"))


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running_on_the_board(
    sshd: Sshd, tmp_path: Path, plain_build: Callable[[str], Path], ending: signal.Signals
) -> None:
    script = INTERRUPTIBLE + (
        "import sys; from pathlib import Path; from host_control.boards import open_board\n"
        "from host_control.board import OperatingPoint\n"
        f"with open_board({ALIAS!r}, remote_dir=sys.argv[2], ssh_config=Path(sys.argv[3])) as board:\n"
        "    board.deploy(Path(sys.argv[1]), files=('taste-train',)); board.measure(OperatingPoint(300))\n"
    )
    folder = tmp_path / "board"
    command = [sys.executable, "-c", script, str(plain_build("x")), str(folder), str(sshd.config)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as host:
        try:
            pid = wait_for_pid(folder)
            host.send_signal(ending)
            assert host.wait(10) != 0
        finally:
            host.kill()
    assert gone(pid)


@pytest.mark.needs("sshd")
def test_no_port_is_opened(sshd: Sshd) -> None:
    def listening() -> set[str]:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        return {line.split()[9] for line in lines if line.split()[3] == "0A"}

    with connect(sshd) as board:
        board.open()
        mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
        assert not {f"socket:[{inode}]" for inode in listening()} & mine
