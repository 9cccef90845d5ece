"""The login shell of an emulated board: runs what came over SSH, other architectures' programs under QEMU.

Started by sshd's ForceCommand as `board_shell.py BOARD.json`. It stands in for what a board has and this host lacks:
its CPU (binfmt_misc would need root and would change the whole machine) and its speed. `bench` really runs one step
under QEMU and checks its loss, then reports the rate of a recorded table, marked `emulated`.

BOARD.json: {"emulator": [words], "machine": ELF machine number, "path": folder of stand-ins for uname and the like,
"step": arguments of one step, "loss": what that step must give, "table": {batch size: result}, "log": file}
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
import time
from typing import Any, NoReturn

RELATIVE_TOLERANCE = 1e-5


def main() -> NoReturn:
    board_file, *rest = sys.argv[1:]
    with open(board_file, encoding="utf-8") as file:
        board = json.load(file)
    if rest:
        run_foreign(board, rest)
    command = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    words = shlex.split(command)
    if not words:
        sys.exit("this board has no interactive shell")
    os.environ["PATH"] = f"{board['path']}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    # Where a program stands: first, or among the arguments of `sh -c SCRIPT`.
    for index in (5, 4, 0) if words[:2] == ["sh", "-c"] else (0,):
        if len(words) > index and is_foreign(words[index], board["machine"]):
            words[index:index] = [sys.executable, "-I", "-S", os.path.abspath(__file__), board_file]
    os.execvp(words[0], words)


def is_foreign(path: str, machine: int) -> bool:
    """Whether a file is an ELF program of the board's machine."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and struct.unpack_from("<H", head, 18)[0] == machine


def run_foreign(board: dict[str, Any], words: list[str]) -> NoReturn:
    """What the kernel of the board would do with its own program."""
    command = [*board["emulator"], words[0]]
    if words[1:2] == ["bench"] and "--run" in words:
        detach(words[words.index("--run") + 1], follow="--follow" in words)
    if words[1:2] != ["bench"]:
        os.execvp(command[0], [*command, *words[1:]])
    batch_size = words[words.index("--batch-size") + 1]
    step = subprocess.run([*command, *board["step"]], capture_output=True, text=True, check=False)
    if step.returncode != 0:
        sys.stderr.write(step.stderr)
        sys.exit(step.returncode)
    loss = json.loads(step.stdout.splitlines()[-1])["first_loss"]
    if not abs(loss - board["loss"]) <= RELATIVE_TOLERANCE * abs(board["loss"]):
        sys.exit(f"error: the emulated step gave loss {loss}, expected {board['loss']}. The binary is wrong.")
    with open(board["log"], "a", encoding="utf-8") as log:
        log.write(json.dumps({"batch_size": int(batch_size), "loss": loss}) + "\n")
    if batch_size not in board["table"]:
        print(f"error: batch size {batch_size} was never recorded. Measure it first.", file=sys.stderr)
        sys.exit(2)
    result = {"event": "result", "verb": "bench", "batch_size": int(batch_size), **board["table"][batch_size]}
    print(json.dumps({**result, "emulated": True}))
    sys.exit(0)


def detach(run: str, *, follow: bool) -> None:
    """As native/taste-train/detached.c, without its lock: returns in the run itself, in the background."""
    if os.fork():
        wait_for(f"{run}/process")
        print(json.dumps({"event": "started"}))
        if not follow:
            sys.exit(0)
        with open(wait_for(f"{run}/exit"), encoding="utf-8") as file:
            code = int(file.read())
        with open(f"{run}/events.jsonl", encoding="utf-8") as file:
            sys.stdout.write(file.read())
        sys.exit(code)
    os.setsid()
    for name, number in (("/dev/null", 0), (f"{run}/events.jsonl", 1), (f"{run}/messages", 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND | (os.O_CREAT if number else 0)), number)
    if pid := os.fork():
        with open(f"{run}/process", "w", encoding="utf-8") as file:
            file.write(f"{pid}\n")
        _, state = os.waitpid(pid, 0)
        with open(f"{run}/exit", "w", encoding="utf-8") as file:
            file.write(f"{os.waitstatus_to_exitcode(state)}\n")
        os._exit(0)


def wait_for(path: str) -> str:
    """The path, once something stands in that file."""
    while not os.path.exists(path) or os.path.getsize(path) == 0:
        time.sleep(0.02)
    return path


if __name__ == "__main__":
    main()
