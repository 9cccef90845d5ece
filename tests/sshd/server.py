"""Starts a real `sshd` on 127.0.0.1 and writes the client's side of it: key, known_hosts, and a configuration."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.needs import find_sshd

ALIAS = "test-board"


@dataclass(frozen=True)
class Sshd:
    """A running server. `config` is an ssh_config that knows it as `test-board`; `known_hosts` the file it names."""

    folder: Path
    port: int
    config: Path
    known_hosts: Path
    host_key: Path
    user_key: Path
    process: subprocess.Popen[bytes]

    def host_key_line(self, name: str | None = None, key: Path | None = None) -> str:
        """A known_hosts line for this server, or with another key."""
        kind, blob, *_ = (key or self.host_key).with_suffix(".pub").read_text().split()
        return f"{name or f'[127.0.0.1]:{self.port}'} {kind} {blob}\n"

    def know(self) -> None:
        """Put the server's own key into known_hosts."""
        self.known_hosts.write_text(self.host_key_line())

    def log(self) -> str:
        return (self.folder / "log").read_text()


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    bits = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *bits, "-N", passphrase, "-f", str(path)], check=True)
    return path


@contextlib.contextmanager
def run_sshd(folder: Path, settings: Mapping[str, str] | None = None, extra: str = "") -> Iterator[Sshd]:
    """A server in `folder` until the end of the block; `settings` replace ours, `extra` lines come first."""
    program = find_sshd()
    assert program is not None
    if os.geteuid() == 0:
        # sshd refuses to start as root without its empty folder; Debian makes it when the service starts.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_key, user_key = make_key(folder / "host_key"), make_key(folder / "user_key")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {
        "Port": str(port),
        "ListenAddress": "127.0.0.1",
        "HostKey": str(host_key),
        "AuthorizedKeysFile": f"{user_key}.pub",
        "PidFile": "none",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        # Whatever the user's own shell reads at its start is slow, or says something.
        "SetEnv": f"HOME={folder}",
        "Subsystem": "sftp internal-sftp",
        **(settings or {}),
    }
    (folder / "sshd_config").write_text(extra + "".join(f"{key} {value}\n" for key, value in options.items()))
    known_hosts, config = folder / "known_hosts", folder / "ssh_config"
    config.write_text(
        f"Host {ALIAS}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"Host *\n  IdentityFile {user_key}\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
    )
    with (folder / "log").open("wb") as log:
        # A killed test run must not leave a server behind.
        tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command = [*tied, program, "-D", "-e", "-f", str(folder / "sshd_config")]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    server = Sshd(folder, port, config, known_hosts, host_key, user_key, process)
    try:
        _await_banner(server)
        yield server
    finally:
        process.terminate()
        process.wait(10)


def _await_banner(server: Sshd) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until and server.process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1) as link:
            link.settimeout(5)
            if link.recv(4) == b"SSH-":
                return
        time.sleep(0.05)
    raise AssertionError(f"sshd did not start: {server.log()}")
