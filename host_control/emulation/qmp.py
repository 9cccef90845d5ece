"""QEMU's monitor: one command at a time over its socket (the QEMU Machine Protocol)."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import IO, Any

from cross.errors import LinkLostError

SOCKET = "monitor"
_ANSWER_S = 120.0


def ask_monitor(folder: Path, line: str) -> str:
    """Give a line to the human monitor of the QEMU whose socket is in `folder`, and return what it says.

    LinkLostError (17) where QEMU does not answer.
    """
    # A path of any length, though a socket's address holds 107 bytes.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_ANSWER_S)
            link.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
            stream = link.makefile("rw", encoding="utf-8")
            stream.readline()
            _call(stream, "qmp_capabilities", {})
            return str(_call(stream, "human-monitor-command", {"command-line": line}))
    except (OSError, ValueError) as error:
        raise LinkLostError(f"QEMU's monitor in {folder} did not answer: {error}. Run `board down`.") from error
    finally:
        os.close(descriptor)


def _call(stream: IO[str], command: str, arguments: dict[str, str]) -> Any:
    stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
    stream.flush()
    while True:
        answer = json.loads(stream.readline())
        if "return" in answer:
            return answer["return"]
        if "error" in answer:
            raise ValueError(answer["error"].get("desc", "no reason given"))
