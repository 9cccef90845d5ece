"""A real sshd on loopback that behaves as a Raspberry Pi 4: its facts, its binaries under QEMU, its recorded rates."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross.target import find_target
from tests.sshd.server import Sshd, run_sshd

_PROBES = Path(__file__).parent.parent / "probes"
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_MACHINES = {"aarch64": 183, "riscv64": 243}


@dataclass(frozen=True)
class EmulatedBoard:
    """The server, and the file that gets a line for each step that really ran."""

    sshd: Sshd
    log: Path

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@contextlib.contextmanager
def run_emulated_board(
    folder: Path, target: str, *, step: Sequence[str], loss: float, table: Mapping[int, Mapping[str, Any]]
) -> Iterator[EmulatedBoard]:
    """`step`: taste-train's arguments for one step, `loss`: what it must give; `table` maps batch sizes to results."""
    chosen = find_target(target)
    _write_stand_ins(folder, (_PROBES / f"{target}.txt").read_text(encoding="utf-8"))
    board = {
        "emulator": chosen.emulator("")[:-1],
        "machine": _MACHINES[chosen.arch],
        "path": str(folder / "bin"),
        "step": list(step),
        "loss": loss,
        "table": {str(size): dict(row) for size, row in table.items()},
        "log": str(folder / "steps.jsonl"),
    }
    (folder / "board.json").write_text(json.dumps(board))
    shell = Path(__file__).parent / "board_shell.py"
    settings = {
        "ForceCommand": f"{sys.executable} -I -S {shell} {folder / 'board.json'}",
        # ForceCommand takes the place of internal-sftp too; the program it can start as any other.
        "Subsystem": f"sftp {next(path for path in _SFTP_SERVERS if Path(path).exists())}",
    }
    with run_sshd(folder, settings) as server:
        server.know()
        yield EmulatedBoard(server, folder / "steps.jsonl")


def _write_stand_ins(folder: Path, probe: str) -> None:
    """uname, nproc and cat that show the recorded board instead of this host."""
    parts = re.split(r"^== (.+)$", probe, flags=re.MULTILINE)
    sections = {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    for name in ("/proc/cpuinfo", "/proc/meminfo"):
        shown = folder / "face" / name.removeprefix("/")
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(sections[name] + "\n")
    scripts = {
        "uname": f"case $1 in -m) echo {sections['machine']} ;; *) echo {sections['kernel']} ;; esac",
        "nproc": f"echo {sections['cores']}",
        "cat": f'case $1 in /proc/cpuinfo|/proc/meminfo) exec /bin/cat "{folder}/face$1" ;; esac\nexec /bin/cat "$@"',
    }
    (folder / "bin").mkdir()
    for name, script in scripts.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
