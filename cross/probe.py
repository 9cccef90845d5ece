"""What a board is, read from plain POSIX commands, and what may be built for it.

`PROBE_SCRIPT` is run by `sh` on the board (over SSH, or here); `parse_probe` turns its text into `BoardFacts`;
`choose_target` names the entry of boards.toml to build for, `target_of` has its values; `check_runs_on` refuses what
the CPU could not run, with the reason. Pure functions: the text comes from whoever can run a command there.

The vector length of a RISC-V core is in no file: a program of three instructions, written by the script, reads `vlenb`.
Where that cannot run (a folder mounted noexec), it is known for cores we know and taken from the `zvl...b` extensions
where a kernel lists them; a binary checks `vlenb` once more at its start (exit 13).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cross.errors import CompatibilityError, CorruptInputError
from cross.target import Target, find_target, load_targets

# vlenb becomes the exit code: csrr a0, vlenb; li a7, 93; ecall. One segment at 0x10000, that starts with the headers.
_VLENB_CODE = struct.pack("<3I", 0xC2202573, 0x05D00893, 0x00000073)
_VLENB_ELF = struct.pack(
    "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 243, 1, 0x10000 + 120, 64, 0, 5, 64, 56, 1, 0, 0, 0
) + struct.pack("<IIQQQQQQ", 1, 5, 0, 0x10000, 0x10000, 132, 132, 0x1000)

PROBE_SCRIPT = r"""
say() { printf '\n== %s\n' "$1"; }
say machine; uname -m
say kernel; uname -r
say userland_bits; getconf LONG_BIT
say page_size; getconf PAGESIZE
say cores; nproc || getconf _NPROCESSORS_ONLN
for file in /proc/cpuinfo /proc/meminfo /proc/device-tree/model /proc/device-tree/compatible; do
  say "$file"; [ -r "$file" ] && cat "$file" | tr '\000' '\n'
done
say cgroup
climb() {
  path=$2
  while :; do
    folder=$1$path
    [ -r "$folder/$3" ] &&
      echo "$(cat "$folder/$3") $(cat "$folder/$4") $(sed -n 's/^inactive_file //p' "$folder/memory.stat")"
    case $path in ''|/) break ;; esac
    path=${path%/*}
  done
}
climb /sys/fs/cgroup "$(sed -n 's/^0:://p' /proc/self/cgroup)" memory.max memory.current
climb /sys/fs/cgroup/memory "$(sed -n 's/^[0-9]*:\([^:]*,\)*memory\(,[^:]*\)*://p' /proc/self/cgroup)" \
  memory.limit_in_bytes memory.usage_in_bytes
if grep -q '^isa.*: rv64[a-z]*v' /proc/cpuinfo; then
  say vlenb
  program=$(mktemp) && printf '%b' 'VLENB_PROGRAM' >"$program" && chmod 700 "$program" && { "$program"; echo $?; }
  rm -f "$program"
fi
exit 0
""".replace("VLENB_PROGRAM", "".join(f"\\0{byte:03o}" for byte in _VLENB_ELF + _VLENB_CODE))
"""Prints sections, each after a line `== NAME`. Needs sh, uname, cat, tr, sed; another missing tool costs a section."""

_ARCHITECTURES = {"aarch64": "aarch64", "arm64": "aarch64", "armv8l": "aarch64", "riscv64": "riscv64"}
_ARCHITECTURES |= {"x86_64": "x86_64", "amd64": "x86_64"}
_ARM_CORES = {
    ("0x41", "0xd03"): "cortex-a53",
    ("0x41", "0xd05"): "cortex-a55",
    ("0x41", "0xd07"): "cortex-a57",
    ("0x41", "0xd08"): "cortex-a72",
    ("0x41", "0xd09"): "cortex-a73",
    ("0x41", "0xd0a"): "cortex-a75",
    ("0x41", "0xd0b"): "cortex-a76",
    ("0x41", "0xd0c"): "neoverse-n1",
    ("0x41", "0xd41"): "cortex-a78",
    ("0x4e", "0x004"): "carmel",
}
_ARM_FEATURES = {"asimd": "neon", "neon": "neon", "asimdhp": "fp16", "asimddp": "dotprod"}
_RISCV_CORES = {"sifive,u74-mc": "sifive-u74", "sifive,u74": "sifive-u74", "spacemit,x60": "spacemit-x60"}
_RISCV_VENDORS = {"0x489": "sifive-u74", "0x710": "spacemit-x60"}
_RISCV_VECTOR_BITS = {"spacemit-x60": 256}
_BOARD_MODELS = (
    (r"Raspberry Pi (5|500|Compute Module 5)\b", "rpi5"),
    (r"Raspberry Pi (4|400|Compute Module 4)\b", "rpi4"),
    (r"Raspberry Pi (3|Compute Module 3|Zero 2)\b", "rpi3"),
    (r"Xavier", "jetson-xavier"),
    (r"VisionFive 2|VisionFive V2", "visionfive2"),
    (r"BPI-F3|BananaPi.*F3|spacemit k1", "bpi-f3"),
)
_TARGET_OF_CORE = {
    "cortex-a53": "rpi3",
    "cortex-a72": "rpi4",
    "cortex-a76": "rpi5",
    "carmel": "jetson-xavier",
    "sifive-u74": "visionfive2",
    "spacemit-x60": "bpi-f3",
}
_GENERIC_TARGETS = {
    "aarch64": ("generic-arm64",),
    "riscv64": ("generic-riscv64-v", "generic-riscv64"),
    "x86_64": ("x86-64-avx512", "x86-64-avx2"),
}
_UNLIMITED_BYTES = 1 << 60

MOST_CORES = 16
"""That kernels are cut for on a machine which boards.toml does not know: a batch has no work for more such parts."""


@dataclass(frozen=True)
class BoardFacts:
    """What a probe reads of a board before anything is built for it.

    `arch` is a target's (aarch64, riscv64, x86_64) or, of a 32-bit kernel, what `uname -m` says. `vector_bits` is 0
    without vectors and, of a RISC-V core with `v` among its features, where the length could not be read.
    `memory_available_bytes` is the smaller of the kernel's MemAvailable and what the cgroups leave. `model` is the
    device tree's, `cpu` LLVM's name of the core where all cores are the same known one; both may be empty. `emulated`:
    the machine is QEMU's, so nothing timed on it is a board's speed. `cores` is what a process may use; `physical_cores`
    the machine's own, each counted once however many threads it runs.
    """

    arch: str
    cores: int
    features: tuple[str, ...]
    vector_bits: int
    memory_available_bytes: int
    swap_bytes: int
    page_size: int
    kernel: str
    userland_bits: int
    emulated: bool
    model: str = ""
    cpu: str = ""
    physical_cores: int = 0


def parse_probe(text: str) -> BoardFacts:
    """Facts from the output of `PROBE_SCRIPT`; CorruptInputError where not even `uname -m` answered."""
    sections = read_sections(text)
    machine = sections.get("machine", "")
    if not machine:
        raise CorruptInputError("the board's probe printed no machine name. Is its login shell a POSIX sh?")
    arch = _ARCHITECTURES.get(machine, machine)
    cpuinfo = sections.get("/proc/cpuinfo", "")
    features, cpu = _read_cpu(arch, cpuinfo)
    memory = _memory_table(sections.get("/proc/meminfo", ""))
    compatible = sections.get("/proc/device-tree/compatible", "")
    return BoardFacts(
        arch=arch,
        cores=_number(sections.get("cores"), max(1, len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)))),
        features=features,
        vector_bits=_vector_bits(arch, features, cpu, _number(sections.get("vlenb"), 0)),
        memory_available_bytes=_available_bytes(memory, sections.get("cgroup", "")),
        swap_bytes=memory.get("SwapTotal", 0),
        page_size=_number(sections.get("page_size"), 4096),
        kernel=sections.get("kernel", ""),
        userland_bits=_number(sections.get("userland_bits"), 32 if machine == "armv8l" else 64),
        emulated=_is_emulated(arch, cpuinfo, compatible),
        model=sections.get("/proc/device-tree/model", "").split("\n")[0],
        cpu=cpu,
        physical_cores=_physical_cores(cpuinfo),
    )


def choose_target(facts: BoardFacts) -> str:
    """Name of the target to build for a board: its own by model or core, else the widest generic one it can run.

    Raises CompatibilityError (13) with the reason where no target runs on it.
    """
    candidates = [name for pattern, name in _BOARD_MODELS if re.search(pattern, facts.model, re.IGNORECASE)]
    if facts.cpu in _TARGET_OF_CORE:
        candidates.append(_TARGET_OF_CORE[facts.cpu])
    candidates.extend(_GENERIC_TARGETS.get(facts.arch, ()))
    last = None
    for name in candidates:
        target = find_target(name)
        # An unknown vector length is a coin toss between right and wrong numbers: nobody is sent there by default.
        if target.rvv and facts.vector_bits == 0:
            continue
        try:
            check_runs_on(target, facts)
        except CompatibilityError as refused:
            last = refused
            continue
        return name
    if last is not None:
        raise last
    _check_kernel(facts)
    known = ", ".join(sorted({target.arch for target in load_targets().values()}))
    raise CompatibilityError(f"there is no target for a {facts.arch} CPU. Known architectures: {known}.")


def target_of(facts: BoardFacts) -> Target:
    """The target that `choose_target` names. Of a generic one, with as many cores as the machine has, if more than are usual.

    The machine's own cores, not those that this process may use: a build does not change from one command to the next.
    """
    target = find_target(choose_target(facts))
    if target.name not in _GENERIC_TARGETS[facts.arch]:
        return target
    return replace(target, cores=max(target.cores, min(facts.physical_cores, MOST_CORES)))


def check_runs_on(program: Target | Mapping[str, Any], facts: BoardFacts) -> None:
    """CompatibilityError (13) with the reason where a target's programs, or a build's manifest, cannot run on a board.

    A 64-bit kernel with a 32-bit userland is fine: the binary is static. A manifest is matched by what it says itself
    (features, vector_bits), with its target's architecture.
    """
    target = program if isinstance(program, Target) else find_target(str(program["target"]))
    features = target.features if isinstance(program, Target) else tuple(program["features"])
    vector_bits = target.vector_bits if isinstance(program, Target) else int(program["vector_bits"])
    _check_kernel(facts)
    if target.arch != facts.arch:
        raise CompatibilityError(
            f"built for {target.name} ({target.arch}), but the board's CPU is {facts.arch}. Build for its own target."
        )
    missing = [name for name in features if name not in facts.features]
    if missing:
        raise CompatibilityError(
            f"built for {target.name}, which needs {', '.join(missing)}; the board's CPU has not. "
            f"Build with --target {_GENERIC_TARGETS[target.arch][-1]}, or for its own target."
        )
    if target.rvv and facts.vector_bits not in (0, vector_bits):
        raise CompatibilityError(
            f"built for {target.name} with vectors of {vector_bits} bits; the board's have {facts.vector_bits}, where "
            "it would compute wrong numbers. Build for the board's own target."
        )


def cpu_fields(target: Target) -> dict[str, str]:
    """What /proc/cpuinfo says of a core of the CPU that `target` is emulated with: what `parse_probe` reads there."""
    if target.arch == "aarch64":
        implementer, part = next(key for key, name in _ARM_CORES.items() if name == target.qemu[1])
        own = {name: flag for flag, name in _ARM_FEATURES.items() if flag != "neon"}
        flags = ["fp", *(own.get(name, name) for name in target.features), "evtstrm", "crc32", "cpuid"]
        return {"Features": " ".join(flags), "CPU implementer": implementer, "CPU part": part}
    vectors = f"v_zvl{target.vector_bits}b" if "v" in target.features else ""
    uarch = next((key for key, name in _RISCV_CORES.items() if name == target.cpu), None)
    return {"isa": f"rv64imafdc{vectors}", **({"uarch": uarch} if uarch else {})}


def _check_kernel(facts: BoardFacts) -> None:
    if facts.arch not in _ARCHITECTURES and re.fullmatch(r"arm(v[4-8].*)?|i[3-6]86|riscv32|mips.*|ppc", facts.arch):
        hint = " (Raspberry Pi: arm_64bit=1 in config.txt)" if facts.arch.startswith("arm") else ""
        raise CompatibilityError(
            f"the board runs a 32-bit kernel ({facts.arch}); programs are 64-bit. Boot a 64-bit kernel{hint}; "
            "its userland may stay 32-bit."
        )


def read_sections(text: str) -> dict[str, str]:
    """The sections of a probe's output by name; of two of one name the later."""
    parts = re.split(r"^== (.+)$", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    return {name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isdecimal() and int(text) > 0 else otherwise


def _fields(cpuinfo: str, key: str) -> list[str]:
    return [match.strip() for match in re.findall(rf"^{key}[ \t]*:(.*)$", cpuinfo, re.MULTILINE | re.IGNORECASE)]


def _physical_cores(cpuinfo: str) -> int:
    """x86-64 says of each processor which core of which package it is a thread of."""
    cores = set(zip(_fields(cpuinfo, "physical id"), _fields(cpuinfo, "core id"), strict=False))
    return len(cores) or len(_fields(cpuinfo, "processor"))


def _read_cpu(arch: str, cpuinfo: str) -> tuple[tuple[str, ...], str]:
    """Features that every core has, sorted, under the names of boards.toml; and the one core they all are, or ''."""
    if arch == "aarch64":
        flags = _in_all(_fields(cpuinfo, "Features"))
        names = {_ARM_FEATURES.get(flag, flag) for flag in flags}
        pairs = zip(_fields(cpuinfo, "CPU implementer"), _fields(cpuinfo, "CPU part"), strict=False)
        return tuple(sorted(names)), _only({_ARM_CORES.get(pair, "") for pair in pairs})
    if arch == "riscv64":
        # "hart isa" is one core's; "isa" what all cores share. Without either line there is nothing to trust.
        names = _in_all([_split_isa(isa) for isa in _fields(cpuinfo, "isa")])
        cores = {_RISCV_CORES.get(uarch, "") for uarch in _fields(cpuinfo, "uarch")}
        cores = cores or {_RISCV_VENDORS.get(vendor, "") for vendor in _fields(cpuinfo, "mvendorid")}
        return tuple(sorted(names)), _only(cores)
    if arch == "x86_64":
        return tuple(sorted(_in_all(_fields(cpuinfo, "flags")))), ""
    return (), ""


def _in_all(lines: list[str]) -> set[str]:
    return set.intersection(*(set(line.split()) for line in lines)) if lines else set()


def _only(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else ""


def _split_isa(isa: str) -> str:
    """'rv64imafdcv_zba' as words: 'rv64gc c d f ... v zba'; rv64gc only where all of imafdc are there."""
    base, *extensions = isa.lower().split("_")
    letters = set(base.removeprefix("rv64").replace("g", "imafd"))
    words = letters | set(extensions)
    return " ".join(words | ({"rv64gc"} if set("imafdc") <= letters else set()))


def _vector_bits(arch: str, features: tuple[str, ...], cpu: str, vlenb: int) -> int:
    if arch == "aarch64":
        return 128 if "neon" in features else 0
    if arch == "x86_64":
        return 512 if "avx512f" in features else 256 if "avx2" in features else 128
    if arch == "riscv64" and "v" in features:
        # Anything else is not what the program says, but what became of it: 126 and 132 are no powers of two.
        if vlenb in (16, 32, 64, 128):
            return vlenb * 8
        listed = [int(name[3:-1]) for name in features if re.fullmatch(r"zvl\d+b", name)]
        return _RISCV_VECTOR_BITS.get(cpu, max(listed, default=0))
    return 0


def _memory_table(meminfo: str) -> dict[str, int]:
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}


def _available_bytes(memory: dict[str, int], cgroups: str) -> int:
    # MemAvailable came with Linux 3.14; before that, what is free or can be dropped.
    free = memory.get("MemAvailable", memory.get("MemFree", 0) + memory.get("Cached", 0))
    for limit, used, cached in re.findall(r"^(\d+) (\d+) ?(\d*)$", cgroups, re.MULTILINE):
        if int(limit) < _UNLIMITED_BYTES:
            free = min(free, max(0, int(limit) - int(used) + int(cached or 0)))
    return free


def _is_emulated(arch: str, cpuinfo: str, compatible: str) -> bool:
    # Under qemu-user /proc/cpuinfo is often the host's own; a QEMU machine says so in its device tree.
    foreign = arch != "x86_64" and bool(re.search(r"^vendor_id\s*:", cpuinfo, re.MULTILINE))
    return foreign or any(name in compatible for name in ("linux,dummy-virt", "riscv-virtio"))
