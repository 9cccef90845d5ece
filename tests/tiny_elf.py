"""A static aarch64 Linux program that prints one text and ends with a given code: 130 bytes of hand-made ELF.

Enough to prove that a foreign binary really ran under QEMU, without a cross-compiler.
"""

from __future__ import annotations

import struct
from pathlib import Path

_BASE = 0x400000
_CODE_AT = 64 + 56
_SVC = 0xD4000001


def _movz(register: int, value: int) -> int:
    return 0xD2800000 | (value & 0xFFFF) << 5 | register


def _adr(register: int, distance: int) -> int:
    return 0x10000000 | (distance & 3) << 29 | (distance >> 2) << 5 | register


def write_aarch64_program(path: Path, text: str, exit_code: int = 0) -> Path:
    """write(1, text); exit(exit_code)."""
    data = text.encode()
    # x8 holds the number of the system call: 64 is write, 93 is exit.
    length = 9 * 4
    code = [_movz(0, 1), _adr(1, length - 4), _movz(2, len(data)), _movz(8, 64), _SVC]
    code += [_movz(0, exit_code), _movz(8, 93), _SVC, _SVC]
    body = struct.pack(f"<{len(code)}I", *code) + data
    size = _CODE_AT + len(body)
    identity = b"\x7fELF" + bytes((2, 1, 1, 0)) + bytes(8)
    header = struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, _BASE + _CODE_AT, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    path.write_bytes(identity + header + segment + body)
    path.chmod(0o755)
    return path
