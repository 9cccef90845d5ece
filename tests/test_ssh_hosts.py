"""Which host an SSH name means, and what known_hosts says of its key: no server needed."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cross.errors import FileError, LinkLostError, SecurityError, UsageError
from host_control.known_hosts import find_keys, fingerprint, judge, record
from host_control.ssh_dial import dial
from host_control.ssh_host import SshHost, resolve_host, split_name
from host_control.ssh_host_key import check_host_key, known_kinds, repeat_command

ONE = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
TWO = bytes(reversed(ONE))


def line(name: str, blob: bytes = ONE, kind: str = "ssh-ed25519", marker: str = "") -> str:
    return f"{marker + ' ' if marker else ''}{name} {kind} {base64.b64encode(blob).decode()} a comment\n"


def make_host(known_hosts: Path, *, port: int = 22, hashed: bool = False) -> SshHost:
    names = ("board",) if port == 22 else (f"[board]:{port}", "board")
    return SshHost("b", "board", port, "pi", names, (), False, None, (known_hosts,), (), hashed, ())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("pi4", (None, "pi4", None)),
        ("pi@pi4.local", ("pi", "pi4.local", None)),
        ("pi@10.0.0.7:2222", ("pi", "10.0.0.7", 2222)),
        ("ssh://pi@pi4:22", ("pi", "pi4", 22)),
        ("[fe80::1%eth0]:2222", (None, "fe80::1%eth0", 2222)),
        ("a@::1", ("a", "::1", None)),
        ("odd@user@host", ("odd@user", "host", None)),
    ],
)
def test_names_of_hosts(name: str, parts: tuple[str | None, str, int | None]) -> None:
    assert split_name(name) == parts


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_no_name_becomes_an_option_or_a_command(name: str) -> None:
    try:
        user, host, _ = split_name(name)
    except UsageError:
        return
    assert not host.startswith("-") and not (user or "").startswith("-") and not set(host) & set(" \t\n$`;|&<>'\"\\")


@pytest.mark.needs("sshd")
def test_openssh_resolves_aliases_includes_and_files(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host pi\nHostName 10.1.2.3\nPort 2200\nUser root\nProxyJump a@hop1:77,hop2\n")
    (tmp_path / "config").write_text(
        f"Include {tmp_path}/more\nHost pi\n  IdentityFile {tmp_path}/%h-key\n  IdentitiesOnly yes\n"
        f"  HostKeyAlias the-pi\n  UserKnownHostsFile {tmp_path}/a {tmp_path}/b\n"
        "  HashKnownHosts yes\n  IdentityAgent none\n"
    )
    host = resolve_host("pi", tmp_path / "config")
    assert (host.address, host.port, host.user, host.key_names) == ("10.1.2.3", 2200, "root", ("the-pi",))
    assert host.identity_files == (tmp_path / "10.1.2.3-key",) and host.identities_only and host.agent is None
    assert host.user_known_hosts == (tmp_path / "a", tmp_path / "b") and host.hash_known_hosts
    assert host.jumps == ("a@hop1:77", "hop2") and str(host) == "pi (10.1.2.3:2200)"
    other = resolve_host("pi@elsewhere:2022", tmp_path / "config")
    assert (other.address, other.port, other.user) == ("elsewhere", 2022, "pi")
    assert other.key_names == ("[elsewhere]:2022", "elsewhere")


@pytest.mark.needs("sshd")
def test_openssh_resolves_matches(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "Match originalhost pi exec true\n  HostName 10.1.2.3\n  User matched\n"
        f"Match host 10.1.2.3 user matched\n  IdentityFile {tmp_path}/key\n"
        "Match exec false\n  Port 99\nHost *\n  Port 2200\n"
    )
    host = resolve_host("pi", tmp_path / "config")
    assert (host.address, host.port, host.user) == ("10.1.2.3", 2200, "matched")
    other = resolve_host("other", tmp_path / "config")
    assert other.address == "other" and tmp_path / "key" not in other.identity_files


@pytest.mark.needs("sshd")
def test_what_the_configuration_asks_and_we_cannot_is_said(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host pi\n  ProxyCommand nc %h %p\n")
    with pytest.raises(UsageError, match="ProxyCommand 'nc .*not supported. Use ProxyJump"):
        resolve_host("pi", tmp_path / "config")
    (tmp_path / "config").write_text("Nonsense yes\n")
    with pytest.raises(UsageError, match="`ssh -G pi` failed: .*nonsense"):
        resolve_host("pi", tmp_path / "config")


def test_without_openssh_the_name_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    host = resolve_host("pi@pi4:2222")
    assert (host.address, host.port, host.user, host.jumps) == ("pi4", 2222, "pi", ())
    assert host.user_known_hosts == (Path.home() / ".ssh" / "known_hosts",) and len(host.identity_files) == 3


def test_a_name_nobody_knows_is_a_wrong_board_and_a_closed_port_a_lost_link() -> None:
    host = make_host(Path("/dev/null"))
    with pytest.raises(UsageError, match="unknown board 'b': no host no-such-board-here is known"):
        dial(SshHost(**{**host.__dict__, "address": "no-such-board-here"}))
    with pytest.raises(LinkLostError, match="cannot reach .*refused"):
        dial(SshHost(**{**host.__dict__, "address": "127.0.0.1", "port": 1}))


def test_a_fingerprint_is_openssh_s(tmp_path: Path) -> None:
    assert fingerprint(b"").startswith("SHA256:47DEQpj8HBSa") and not fingerprint(ONE).endswith("=")


@pytest.mark.needs("sshd")
def test_hashed_files_of_openssh_are_read_and_ours_are_read_by_it(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("board") + line("[board]:2222", TWO))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert "board" not in file.read_text()
    assert [key.blob for key in find_keys([file], "board")] == [ONE]
    assert [key.blob for key in find_keys([file], "[board]:2222")] == [TWO]
    record(file, "[new]:77", "ssh-ed25519", ONE, hashed=True)
    found = subprocess.run(
        ["ssh-keygen", "-F", "[new]:77", "-f", str(file)], capture_output=True, text=True, check=True
    )
    assert base64.b64encode(ONE).decode() in found.stdout and "new" not in file.read_text()


@pytest.mark.parametrize(
    ("text", "name", "verdict"),
    [
        (line("board"), "board", "known"),
        (line("board,10.0.0.7"), "10.0.0.7", "known"),
        (line("other"), "board", "unknown"),
        (line("board", TWO), "board", "changed"),
        (line("board", TWO, "ssh-rsa"), "board", "changed"),
        (line("board", TWO) + line("board"), "board", "known"),
        (line("board", ONE, marker="@revoked") + line("board"), "board", "revoked"),
        (line("*", ONE, marker="@revoked"), "board", "revoked"),
        (line("board", ONE, marker="@cert-authority"), "board", "unknown"),
        (line("*.lan,!board.lan"), "board.lan", "unknown"),
        (line("*.lan,!board.lan"), "pi.lan", "known"),
        (line("BOARD"), "board", "known"),
        (line("[board]:22?2"), "[board]:2222", "known"),
        (line("[board]:2222"), "board", "unknown"),
        ("#" + line("board"), "board", "unknown"),
        ("board ssh-ed25519 not!base64\nboard\n\n\x00\xff\n|1|x\n|1|a|b ssh-ed25519 AAAA\n", "board", "unknown"),
    ],
)
def test_what_known_hosts_says_of_a_key(tmp_path: Path, text: str, name: str, verdict: str) -> None:
    (tmp_path / "known_hosts").write_text(text, encoding="latin-1")
    assert judge(find_keys([tmp_path / "missing", tmp_path / "known_hosts"], name), ONE)[0] == verdict


def test_an_unknown_key_shows_its_fingerprint_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/host_control/__main__.py", "tune", "--board", "b", "--out", "a b"])
    with pytest.raises(SecurityError) as caught:
        check_host_key(make_host(tmp_path / "known_hosts"), "ssh-ed25519", ONE, accept_new=False)
    assert fingerprint(ONE) in str(caught.value) and caught.value.exit_code == 19
    assert str(caught.value).endswith("python -m host_control tune --board b --out 'a b' --accept-new")
    assert not (tmp_path / "known_hosts").exists()
    monkeypatch.setattr("sys.argv", ["/usr/bin/taste-edge", "doctor"])
    assert repeat_command("--accept-new") == "taste-edge doctor --accept-new"


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("port", [22, 2222])
def test_accept_new_records_once(tmp_path: Path, port: int, hashed: bool) -> None:
    file = tmp_path / "deep" / "known_hosts"
    host = make_host(file, port=port, hashed=hashed)
    check_host_key(host, "ssh-ed25519", ONE, accept_new=True)
    text = file.read_text()
    assert text.count("\n") == 1 and ("board" in text) != hashed and file.stat().st_mode & 0o777 == 0o600
    for accept in (True, False):
        check_host_key(host, "ssh-ed25519", ONE, accept_new=accept)
        with pytest.raises(SecurityError, match=r"is not the one in .*known_hosts:1: .*ssh-keygen -f .* -R"):
            check_host_key(host, "ssh-ed25519", TWO, accept_new=accept)
    assert file.read_text() == text and [path.name for path in file.parent.iterdir()] == ["known_hosts"]


def test_a_key_known_without_the_port_counts_and_a_different_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("board"))
    check_host_key(make_host(file, port=2222), "ssh-ed25519", ONE, accept_new=False)
    with pytest.raises(SecurityError, match="is not known"):
        check_host_key(make_host(file, port=2222), "ssh-ed25519", TWO, accept_new=False)


def test_recording_keeps_what_is_there_its_mode_and_its_link(tmp_path: Path) -> None:
    real, file = tmp_path / "real", tmp_path / "known_hosts"
    real.write_text("# no newline at the end")
    real.chmod(0o644)
    file.symlink_to(real)
    record(file, "board", "ssh-ed25519", ONE, hashed=False)
    assert real.read_text().splitlines()[0] == "# no newline at the end" and file.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o644 and find_keys([file], "board")[0].place == f"{file}:2"


def test_a_failed_recording_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("other"))

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FileError, match="cannot record the host key"):
        record(file, "board", "ssh-ed25519", ONE, hashed=False)
    assert file.read_text() == line("other") and [path.name for path in tmp_path.iterdir()] == ["known_hosts"]


def test_the_kinds_a_host_is_known_by(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text(line("board", kind="ssh-rsa") + line("board", marker="@revoked"))
    assert known_kinds(make_host(tmp_path / "known_hosts")) == {"ssh-rsa", "rsa-sha2-256", "rsa-sha2-512"}
