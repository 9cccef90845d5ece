"""Instructions of programs under QEMU: the plugin is built, a program runs under it, blocks become functions.

QEMU counts, it does not time: a count is the same on every run and every host, and says nothing of a board's speed.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cross import toolchain
from cross.errors import CorruptInputError, MissingToolError, TasteError
from cross.target import Target

SOURCE = Path(__file__).with_name("count_instructions.c")
L1_WAYS, L2_WAYS = 4, 16
_KERNEL = re.compile(r"(?:__tvm_ffi_)?(taste_\w+?_[0-9a-f]{12})(?:_compute_)?$")
_SYMTAB, _FUNCTION = 2, 2


@dataclass(frozen=True)
class Counts:
    """What one run executed: instructions by block address; accesses and misses where caches were modelled."""

    blocks: Mapping[int, int]
    memory: tuple[int, int, int] | None = None

    @property
    def instructions(self) -> int:
        return sum(self.blocks.values())

    def __sub__(self, other: Counts) -> Counts:
        """What this run executed more than `other` did."""
        blocks = {at: count - other.blocks.get(at, 0) for at, count in self.blocks.items()}
        memory = None
        if self.memory is not None and other.memory is not None:
            accesses, l1, l2 = (a - b for a, b in zip(self.memory, other.memory, strict=True))
            memory = accesses, l1, l2
        return Counts({at: count for at, count in blocks.items() if count}, memory)


def check_emulator(target: Target) -> None:
    """MissingToolError (22) unless this target's QEMU is here; UsageError is for targets that have none."""
    if not target.qemu or shutil.which(target.qemu[0]) is None:
        program = target.qemu[0] if target.qemu else f"an emulator of {target.name}"
        raise MissingToolError(f"{program} is not installed. On Debian: apt-get install qemu-user.")


def build_plugin(folder: Path) -> Path:
    """The plugin for this host's QEMU, compiled once; QEMU itself provides the functions it calls."""
    folder.mkdir(parents=True, exist_ok=True)
    plugin = folder / "libcount_instructions.so"
    if not plugin.exists() or plugin.stat().st_mtime < SOURCE.stat().st_mtime:
        part = folder / f"{plugin.stem}.{os.getpid()}.so"
        flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared", "-s"]
        flags += ["-Wl,-z,lazy", "-Wl,--allow-shlib-undefined"]
        result = toolchain.run_compiler(f"{os.uname().machine}-linux-gnu.2.17", [*flags, SOURCE, "-o", part])
        if result.returncode != 0:
            raise TasteError(f"the counting plugin does not compile: {' '.join(result.stderr.split())[:300]}")
        part.rename(plugin)
    return plugin


def count(
    target: Target,
    command: Sequence[str],
    plugin: Path,
    out: Path,
    *,
    caches: bool = False,
    mark: int | None = None,
    limit_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    emulator_flags: Sequence[str] = (),
) -> Counts:
    """Run a program of the target's under its own CPU to the end and read what it executed; with `mark`, only between its
    first and second system call of that number."""
    options = f"{plugin},out={out}"
    if mark is not None:
        options += f",mark={mark}"
    if caches:
        options += f",caches=on,l1={target.l1_kib}:{L1_WAYS},l2={target.l2_kib}:{L2_WAYS}"
    words = [target.qemu[0], "-cpu", target.qemu[1], "-plugin", options, *emulator_flags, *command]
    out.unlink(missing_ok=True)
    try:
        run = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise TasteError(
            f"{command[0]} was not done after {limit_s:.0f} s under {target.qemu[0]}. Raise --limit."
        ) from error
    if run.returncode != 0:
        said = run.stderr.strip().splitlines()
        raise TasteError(
            f"{Path(command[0]).name} under {target.qemu[0]} ended with {run.returncode}: {said[-1] if said else 'no message'}"
        )
    if not out.exists():
        raise MissingToolError(
            f"{target.qemu[0]} wrote no counts: it lacks plugins (qemu-user-static does). On Debian: apt-get install qemu-user."
        )
    return read_counts(out.read_text(encoding="utf-8"))


def read_counts(text: str) -> Counts:
    """What the plugin wrote; CorruptInputError where that is cut off or garbled."""
    blocks: Counter[int] = Counter()
    memory = None
    for line in text.splitlines():
        kind, *words = line.split()
        if len(words) != 3 or kind not in ("block", "memory") or not all(word.isdigit() for word in words):
            raise CorruptInputError(f"the counting plugin wrote {line!r}. Run it again.")
        first, second, third = map(int, words)
        if kind == "block":
            blocks[first] += second * third
        else:
            memory = first, second, third
    return Counts(dict(blocks), memory)


def by_function(counts: Counts, symbols: Sequence[tuple[int, str]]) -> dict[str, int]:
    """Instructions by function, most first; a kernel's parts under the kernel's symbol.

    `symbols`: (address, name) in order of address. What lies before the first is `?`. The body of a kernel's loops over
    threads is a local function without a name of its own that follows the kernel.
    """
    addresses = [address for address, _ in symbols]
    owners = _owners([name for _, name in symbols])
    found: Counter[str] = Counter()
    for address, instructions in counts.blocks.items():
        at = bisect_right(addresses, address) - 1
        found[owners[at] if at >= 0 else "?"] += instructions
    return dict(found.most_common())


def _owners(names: Sequence[str]) -> list[str]:
    owners, kernel = [], ""
    for name in names:
        match = _KERNEL.match(name)
        if match:
            kernel = match[1]
        elif not name.startswith("__tvm_parallel_lambda"):
            kernel = ""
        owners.append(kernel or name)
    return owners


def read_symbols(program: Path) -> list[tuple[int, str]]:
    """(address, name) of the functions of a 64-bit little-endian ELF file, in order of address."""
    data = program.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise CorruptInputError(f"{program} is not a 64-bit little-endian ELF file. Build it again.")
    (sections_at,) = struct.unpack_from("<Q", data, 0x28)
    size, number = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * size) for i in range(number)]
    found = set()
    for _, kind, _, _, offset, length, linked, *_ in sections:
        if kind != _SYMTAB:
            continue
        names = sections[linked][4]
        for at in range(offset, offset + length, 24):
            name, info, _, index, address, _ = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == _FUNCTION and index:
                end = data.index(b"\0", names + name)
                found.add((address, data[names + name : end].decode()))
    if not found:
        raise CorruptInputError(f"{program} has no symbols. Build it with symbols=True.")
    return sorted(found)
