"""host_control/ssh.py against a real sshd on loopback: commands, files, host keys, logging in, jump hosts."""

from __future__ import annotations

import os
import subprocess
import time
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
    UsageError,
)
from host_control.board import OperatingPoint
from host_control.boards import DeployedBoard, open_board
from host_control.ssh import Connection
from host_control.ssh_auth import load_key
from tests.fake_program import write_build
from tests.sshd.client import connect, identity
from tests.sshd.server import ALIAS, Sshd, make_key, run_sshd
from tests.sshd.silent import run_silent, write_config

# No NUL, which no program can be given, and no lone surrogate, which is no byte of any name.
LETTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


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
@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.faults)])
def test_any_argument_arrives_as_it_is(examples: int, sshd: Sshd, tmp_path: Path) -> None:
    words = st.lists(st.text(LETTERS, max_size=12), max_size=4)
    with connect(sshd) as board:

        @settings(max_examples=examples)
        @given(words)
        def check(arguments: list[str]) -> None:
            arguments = ["-n", "$(touch x)", "a'b\"c", *arguments]
            script = f"cd {tmp_path} && printf '%s\\1' \"$@\""
            said = board.run(["sh", "-c", script, "name", *arguments]).stdout
            assert said == "".join(f"{word}\1" for word in arguments)

        check()
    assert not list(tmp_path.iterdir()), "no command ran that nobody gave"


@pytest.mark.needs("sshd")
def test_the_arguments_catch_a_line_that_quotes_nothing(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_control.ssh.shell_line", " ".join)
    with connect(sshd) as board:
        board.run(["echo", f"$(touch {tmp_path}/pwned)"])
    assert list(tmp_path.iterdir())


@pytest.mark.needs("sshd")
def test_any_name_of_a_file_is_just_a_name(sshd: Sshd, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(b"content")
    (tmp_path / "there").mkdir()
    names = st.text(LETTERS.filter(lambda c: c != "/"), min_size=1, max_size=40)
    with connect(sshd) as board:

        @settings(max_examples=30)
        @given(names.filter(lambda name: name not in (".", "..")))
        def check(name: str) -> None:
            path = f"{tmp_path}/there/{name}"
            board.put(source, f"{path}.part")
            board.rename(f"{path}.part", path)
            assert board.names(f"{tmp_path}/there") == [name] and board.read(path, 3) == b"tent"
            board.get(path, back)
            assert back.read_bytes() == b"content" and board.size(path) == 7
            assert board.run(["rm", "--", path]).ok and board.read(path) is None

        check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source", "there"]


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
def test_a_client_that_checks_no_key_would_be_caught(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd.known_hosts.write_text(sshd.host_key_line(key=make_key(tmp_path / "other")))
    monkeypatch.setattr("host_control.ssh.check_host_key", lambda *_, **__: None)
    with connect(sshd) as board:
        assert board.run(["true"]).ok, "what the test above expects to be refused"


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
    answers, asked = iter(["wrong", "right"]), []
    with Connection(ALIAS, ssh_config=config, ask=ask) as board:
        for _ in range(3):
            assert board.run(["true"]).ok
            board.abort()
    assert len(asked) == 2, "nobody is asked again when a link that was cut is opened anew"
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
def test_through_a_second_board_of_its_own(sshd: Sshd, tmp_path: Path) -> None:
    """Two servers with a key and a known_hosts each: both are checked, and a build goes through."""
    (tmp_path / "gate").mkdir()
    with run_sshd(tmp_path / "gate") as gate:
        config, known = tmp_path / "config", tmp_path / "known_hosts"
        config.write_text(
            f"Host gate\n  HostName 127.0.0.1\n  Port {gate.port}\n  IdentityFile {gate.user_key}\n"
            f"Host behind\n  HostName 127.0.0.1\n  Port {sshd.port}\n  IdentityFile {sshd.user_key}\n  ProxyJump gate\n"
            f"Host *\n  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {known}\n"
            "  GlobalKnownHostsFile /dev/null\n"
        )
        known.write_text(sshd.host_key_line())
        with pytest.raises(SecurityError, match=r"host key of gate .* is not known"):
            Connection("behind", ssh_config=config).open()
        known.write_text(gate.host_key_line())
        with pytest.raises(SecurityError, match=r"host key of behind .* is not known"):
            Connection("behind", ssh_config=config).open()
        known.write_text(gate.host_key_line() + sshd.host_key_line())
        build = write_build(tmp_path / "build", weights_bytes=300_000)
        (build / "manifest.json").unlink()
        with open_board("behind", ssh_config=config, remote_dir=str(tmp_path / "there")) as board:
            assert isinstance(board, DeployedBoard)
            assert board.deploy(build, files=("taste-train", "weights.safetensors")).sent_bytes > 300_000
            assert board.measure(OperatingPoint(8)).samples_per_s == 12.5
        assert "Accepted publickey" in gate.log()
        gate.process.terminate()
        gate.process.wait(10)
        with pytest.raises(LinkLostError, match="cannot reach gate"):
            Connection("behind", ssh_config=config).open()


@pytest.mark.needs("sshd")
def test_a_circle_of_jump_hosts_ends(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n" + sshd.config.read_text())
    with Connection("a", ssh_config=config) as board, pytest.raises(UsageError, match="more than 8 jumps"):
        board.open()
    config.write_text(f"Host *\n  ProxyJump {ALIAS}\n" + sshd.config.read_text())
    with Connection(ALIAS, ssh_config=config) as board:
        assert board.run(["true"]).ok
