"""cross/probe.py: facts from recorded probe output of each board, the target chosen for it, and what is refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cross.errors import CompatibilityError, CorruptInputError, TasteError
from cross.probe import PROBE_SCRIPT, BoardFacts, check_runs_on, choose_target, parse_probe, target_of
from cross.target import find_target, load_targets

PROBES = Path(__file__).parent / "probes"


def facts_of(name: str) -> BoardFacts:
    return parse_probe((PROBES / f"{name}.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("rpi3", "rpi3"),
        ("rpi4", "rpi4"),
        ("rpi5", "rpi5"),
        ("jetson-xavier", "jetson-xavier"),
        ("visionfive2", "visionfive2"),
        ("bpi-f3", "bpi-f3"),
        ("rk3399-mixed-cores", "generic-arm64"),
        ("rpi4-32-bit-userland", "rpi4"),
        ("rpi4-32-bit-personality", "rpi4"),
        ("rpi4-container", "rpi4"),
        ("qemu-arm64", "rpi4"),
        # A RISC-V core with V of unknown length gets no vectors: the wrong length computes wrong numbers.
        ("qemu-riscv64", "generic-riscv64"),
        ("x86-64-avx2", "x86-64-avx2"),
        ("x86-64-avx512", "x86-64-avx512"),
    ],
)
def test_the_target_of_each_recorded_board(name: str, target: str) -> None:
    facts = facts_of(name)
    assert choose_target(facts) == target
    check_runs_on(find_target(target), facts)


def with_cores(name: str, packages: int, cores: int) -> BoardFacts:
    """An x86-64 machine that runs two threads a core."""
    text = (PROBES / f"{name}.txt").read_text(encoding="utf-8")
    before, _, rest = text.partition("processor\t: 0\n")
    processor = rest.partition("\n\n")[0]
    places = [(package, core) for package in range(packages) for core in range(cores)] * 2
    threads = [
        f"processor\t: {number}\nphysical id\t: {package}\ncore id\t\t: {core}\n{processor}\n"
        for number, (package, core) in enumerate(places)
    ]
    return parse_probe("\n".join((before, *threads, rest[rest.index("== /proc/meminfo") :])))


@pytest.mark.parametrize(("packages", "cores", "wanted"), ((1, 1, 2), (1, 2, 2), (1, 6, 6), (2, 6, 12), (2, 32, 16)))
def test_a_generic_target_has_the_cores_of_the_machine(packages: int, cores: int, wanted: int) -> None:
    facts = with_cores("x86-64-avx512", packages, cores)
    assert facts.physical_cores == packages * cores
    assert target_of(facts) == replace(find_target("x86-64-avx512"), cores=wanted)


def test_a_board_has_the_cores_that_boards_toml_says() -> None:
    facts = replace(facts_of("rpi4"), physical_cores=8)
    assert target_of(facts) == find_target("rpi4")
    assert facts_of("rk3399-mixed-cores").physical_cores == target_of(facts_of("rk3399-mixed-cores")).cores == 6


def test_facts_of_a_raspberry_pi_4() -> None:
    facts = facts_of("rpi4")
    assert (facts.arch, facts.cores, facts.vector_bits, facts.page_size) == ("aarch64", 4, 128, 4096)
    assert facts.memory_available_bytes == 3512345 * 1024
    assert facts.swap_bytes == 102396 * 1024
    assert (facts.kernel, facts.userland_bits, facts.emulated) == ("6.6.31+rpt-rpi-v8", 64, False)
    assert (facts.model, facts.cpu) == ("Raspberry Pi 4 Model B Rev 1.4", "cortex-a72")
    assert "neon" in facts.features and "dotprod" not in facts.features


def test_features_carry_the_names_of_boards_toml() -> None:
    assert {"neon", "fp16", "dotprod"} <= set(facts_of("rpi5").features)
    assert facts_of("rpi5").page_size == 16384
    assert {"rv64gc", "v", "zfh"} <= set(facts_of("bpi-f3").features)
    assert facts_of("bpi-f3").vector_bits == 256
    assert "v" not in facts_of("visionfive2").features and facts_of("visionfive2").vector_bits == 0


def test_features_are_those_that_every_core_has() -> None:
    text = (PROBES / "rpi5.txt").read_text(encoding="utf-8")
    one_core_less = text.replace(" asimddp", "", 1)
    assert "dotprod" not in parse_probe(one_core_less).features
    assert choose_target(replace(parse_probe(one_core_less), model="")) == "generic-arm64"


def test_a_cgroup_limit_caps_the_available_memory() -> None:
    # 512 MiB limit, 128 MiB used of which 32 MiB are reclaimable cache; the kernel says 3.3 GiB.
    assert facts_of("rpi4-container").memory_available_bytes == (512 - 128 + 32) * 2**20


@pytest.mark.parametrize("name", ["qemu-arm64", "qemu-riscv64", "qemu-user-arm64"])
def test_an_emulated_machine_is_told_from_a_board(name: str) -> None:
    assert facts_of(name).emulated


def test_a_32_bit_kernel_is_refused_and_a_32_bit_userland_is_not() -> None:
    with pytest.raises(CompatibilityError, match=r"32-bit kernel \(armv7l\).*arm_64bit=1") as refused:
        choose_target(facts_of("rpi3-32-bit-kernel"))
    assert refused.value.exit_code == 13
    with pytest.raises(CompatibilityError, match="32-bit kernel"):
        check_runs_on(find_target("rpi3"), facts_of("rpi3-32-bit-kernel"))
    assert facts_of("rpi4-32-bit-userland").userland_bits == 32
    check_runs_on(find_target("rpi4"), facts_of("rpi4-32-bit-userland"))


@pytest.mark.parametrize(
    ("target", "board", "reason"),
    [
        ("rpi5", "rpi4", "needs fp16, dotprod.*--target generic-arm64"),
        ("jetson-xavier", "rpi4", "needs fp16;.*--target generic-arm64"),
        ("bpi-f3", "visionfive2", "needs v; .*--target generic-riscv64"),
        ("generic-riscv64-v", "bpi-f3", "vectors of 128 bits; the board's have 256"),
        ("rpi4", "visionfive2", r"rpi4 \(aarch64\).* is riscv64"),
        ("x86-64-avx512", "x86-64-avx2", "needs avx512f"),
    ],
)
def test_what_a_cpu_could_not_run_is_refused_with_the_reason(target: str, board: str, reason: str) -> None:
    with pytest.raises(CompatibilityError, match=reason):
        check_runs_on(find_target(target), facts_of(board))


def test_a_manifest_is_matched_by_what_it_says() -> None:
    manifest = {"target": "generic-arm64", "features": ["neon"], "vector_bits": 128}
    check_runs_on(manifest, facts_of("rpi4"))
    with pytest.raises(CompatibilityError, match="needs sve"):
        check_runs_on({**manifest, "features": ["neon", "sve"]}, facts_of("rpi4"))
    with pytest.raises(CompatibilityError, match="256 bits; the board's have 128"):
        check_runs_on(
            {"target": "bpi-f3", "features": ["rv64gc", "v"], "vector_bits": 256},
            replace(facts_of("bpi-f3"), vector_bits=128),
        )


def test_where_no_target_runs_the_reason_is_said() -> None:
    with pytest.raises(CompatibilityError, match="avx2, fma"):
        choose_target(facts_of("x86-64-old"))
    with pytest.raises(CompatibilityError, match="no target for a s390x CPU"):
        choose_target(replace(facts_of("rpi4"), arch="s390x", model="", cpu=""))


def test_every_target_accepts_the_facts_of_its_own_emulated_board() -> None:
    for target in load_targets().values():
        vector_bits = target.vector_bits or 128
        facts = replace(facts_of("rpi4"), arch=target.arch, features=target.features, vector_bits=vector_bits)
        check_runs_on(target, facts)


def test_the_script_runs_here() -> None:
    done = subprocess.run(["sh", "-c", PROBE_SCRIPT], capture_output=True, text=True, check=True)
    facts = parse_probe(done.stdout)
    assert facts.cores >= 1 and facts.memory_available_bytes > 0 and facts.page_size >= 4096 and facts.kernel


@pytest.mark.parametrize(
    ("vlenb", "bits", "target"), [("32", 256, "bpi-f3"), ("16", 128, "generic-riscv64-v"), ("132", 0, None)]
)
def test_a_vector_length_that_was_read_decides_what_runs(vlenb: str, bits: int, target: str | None) -> None:
    text = (PROBES / "qemu-riscv64.txt").read_text(encoding="utf-8") + f"\n== vlenb\n{vlenb}\n"
    facts = parse_probe(text)
    assert facts.vector_bits == bits
    for name in ("bpi-f3", "generic-riscv64-v"):
        if target not in (name, None):
            with pytest.raises(CompatibilityError, match=f"the board's have {bits}"):
                check_runs_on(find_target(name), facts)
        else:
            check_runs_on(find_target(name), facts)


@pytest.mark.needs("qemu")
@pytest.mark.parametrize(("cpu", "code"), [("rv64,v=true,vlen=256", 32), ("rv64,v=true,vlen=128", 16), ("rv64", -4)])
def test_the_program_of_the_script_reads_vlenb(tmp_path: Path, cpu: str, code: int) -> None:
    line = next(line for line in PROBE_SCRIPT.splitlines() if "printf '%b'" in line)
    program = tmp_path / "vlenb"
    octal = line.split("'")[3]
    subprocess.run(["sh", "-c", f"printf '%b' '{octal}' >{program}; chmod 700 {program}"], check=True)
    assert subprocess.run(["qemu-riscv64", "-cpu", f"{cpu}", program], check=False).returncode == code


def test_no_answer_is_an_error_and_missing_tools_are_not() -> None:
    with pytest.raises(CorruptInputError, match="POSIX sh"):
        parse_probe("")
    bare = parse_probe("== machine\naarch64\n== /proc/cpuinfo\nprocessor : 0\nprocessor : 1\n")
    assert (bare.cores, bare.page_size, bare.userland_bits, bare.memory_available_bytes) == (2, 4096, 64, 0)


@settings(max_examples=40)
@given(st.text(max_size=200))
def test_no_text_of_a_board_raises_anything_but_our_errors(text: str) -> None:
    for probe in (text, f"== machine\n{text}", f"== machine\nriscv64\n== /proc/cpuinfo\nisa : {text}"):
        try:
            choose_target(parse_probe(probe))
        except TasteError:
            pass
