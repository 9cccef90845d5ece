"""A board behind SSH: a host, or an alias of ~/.ssh/config."""

from __future__ import annotations

from pathlib import Path

from host_control.boards.bench import BenchSettings
from host_control.boards.deployed import DeployedBoard
from host_control.connection import ANSWER_S
from host_control.deploy import DEFAULT_FOLDER

_EMULATED_PATIENCE = 4
"""An emulated core on a busy machine takes that much longer for the arithmetic of a login."""


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

    `emulated`: what it measures is no board's speed, whatever its files say; and it may take its time to answer.
    """
    # paramiko takes a fifth of a second to import, which the boards on this machine need not pay.
    from host_control.ssh import Connection

    answer_s = ANSWER_S * (_EMULATED_PATIENCE if emulated else 1)
    connection = Connection(name, accept_new=accept_new, ssh_config=ssh_config, answer_s=answer_s)
    folder = remote_dir or DEFAULT_FOLDER
    return DeployedBoard(name, connection, folder, settings, emulated=emulated, outlives_link=True)
