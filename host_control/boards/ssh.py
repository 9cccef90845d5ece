"""A board behind SSH: a host, or an alias of ~/.ssh/config."""

from __future__ import annotations

from pathlib import Path

from host_control.boards.bench import BenchSettings
from host_control.boards.deployed import DeployedBoard
from host_control.deploy import DEFAULT_FOLDER


def open_ssh(
    name: str,
    remote_dir: str | None,
    settings: BenchSettings,
    *,
    accept_new: bool,
    ssh_config: Path | None,
    emulated: bool = False,
) -> DeployedBoard:
    """The board called `name`; UsageError where that can be no host. Nothing is connected yet.

    `emulated`: what it measures is no board's speed, whatever its files say.
    """
    # paramiko takes a fifth of a second to import, which the boards on this machine need not pay.
    from host_control.ssh import Connection

    connection = Connection(name, accept_new=accept_new, ssh_config=ssh_config)
    return DeployedBoard(name, connection, remote_dir or DEFAULT_FOLDER, settings, emulated=emulated)
