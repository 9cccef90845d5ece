"""The client's side of a test server: a Connection that asks nobody, and configurations of its own."""

from __future__ import annotations

from pathlib import Path

from host_control.ssh import Connection
from tests.sshd.server import ALIAS, Sshd


def connect(server: Sshd, **options: object) -> Connection:
    return Connection(ALIAS, ssh_config=server.config, ask=lambda _: None, **options)  # type: ignore[arg-type]


def identity(server: Sshd, folder: Path, *lines: str) -> Path:
    """The server's client configuration with other lines in front, which win."""
    config = folder / "config"
    config.write_text("".join(f"{line}\n" for line in lines) + server.config.read_text().replace("IdentityFile", "#"))
    return config
