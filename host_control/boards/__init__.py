"""Boards to run on: `open_board` makes one of `local`, an SSH host, the name of an emulated board that is up,
`emulated:TARGET` or `recorded:FILE.json`.

    with open_board("pi@raspberrypi.local") as board:
        target = target_of(board.facts())
        board.deploy(build_dir)
        counters = board.measure(OperatingPoint(batch_size=8))

A kind of board is one file here: local.py, ssh.py, emulated.py, recorded.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from host_control.boards.bench import BenchSettings
from host_control.boards.deployed import DeployedBoard
from host_control.boards.emulated import open_emulated
from host_control.boards.local import open_local
from host_control.boards.recorded import RecordedBoard, open_recorded
from host_control.boards.ssh import open_ssh
from host_control.emulation.catalogue import load_catalogue
from host_control.emulation.state import find_up

__all__ = ["BenchSettings", "DeployedBoard", "RecordedBoard", "open_board"]


@contextmanager
def open_board(
    name: str,
    *,
    remote_dir: str | None = None,
    accept_new: bool = False,
    ssh_config: Path | None = None,
    settings: BenchSettings | None = None,
) -> Iterator[DeployedBoard | RecordedBoard]:
    """The board called `name`, closed at the end; nothing is connected before it is needed.

    `remote_dir`: where deployments lie. `accept_new`: record the host key of a host not known yet. `ssh_config`: a file
    in place of ~/.ssh/config. Raises UsageError (2) for a name that can be no board.
    """
    board = _make_board(name, remote_dir, accept_new, ssh_config, settings or BenchSettings())
    try:
        yield board
    finally:
        board.close()


def _make_board(
    name: str, remote_dir: str | None, accept_new: bool, ssh_config: Path | None, settings: BenchSettings
) -> DeployedBoard | RecordedBoard:
    kind, colon, rest = name.partition(":")
    if name == "local":
        return open_local(remote_dir, settings)
    if kind == "emulated" and colon:
        return open_emulated(rest, remote_dir, settings)
    if kind == "recorded" and colon:
        return open_recorded(Path(rest))
    emulated = name in load_catalogue()
    config = find_up(name) if emulated else ssh_config
    return open_ssh(name, remote_dir, settings, accept_new=accept_new, ssh_config=config, emulated=emulated)
