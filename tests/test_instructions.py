"""benchmarks/instructions.py and its plugin: exact counts under QEMU, blocks to kernels, errors, and what boards.toml says of V."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counting import Counts, build_plugin, by_function, count, read_counts, read_symbols
from benchmarks.instructions import GETSID, by_operator, main
from cross.compile_kernels import operator_of
from cross.errors import CorruptInputError
from cross.target import find_target
from cross.toolchain import run_compiler

KERNEL = "taste_conv2d_0123456789ab"
START = """
__asm__(".globl _start\\n_start: ldr w0, [sp]\\n bl run\\n mov x0, 0\\n mov x8, 93\\n svc 0");
__attribute__((noinline)) void hot(unsigned n) { while (n--) __asm__ volatile("nop; nop; nop"); }
"""
"""Linux's first instructions of a program: `run(argc)`, then exit(0); no C library."""
LOOP = """
float data[1 << 18];
void run(unsigned argc) {
    hot(1000u * argc);
    for (unsigned i = 0; i < sizeof data / sizeof *data; i += 16) data[i] += 1;
}
"""
MARKED = f"""
static void mark(void) {{ __asm__ volatile("mov x0, 0; mov x8, {GETSID}; svc 0" ::: "x0", "x8", "memory"); }}
void run(unsigned argc) {{
    hot(5000u * argc);
    mark();
    hot(1000);
    mark();
    hot(7000);
}}
"""


def compiled(code: str, folder: Path) -> Path:
    source, program = folder / "program.c", folder / "program"
    source.write_text(START + code)
    flags = ["-O2", "-g0", "-static", "-nostdlib", "-ffreestanding"]
    run_compiler("aarch64-linux-musl", [*flags, source, "-o", program]).check_returncode()
    return program


def test_blocks_of_one_address_add_up_and_runs_are_subtracted() -> None:
    long = read_counts("block 4096 3 10\nblock 4096 2 5\nblock 8192 1 7\nmemory 100 20 3\n")
    short = read_counts("block 4096 3 10\nblock 8192 1 7\nmemory 60 15 3\n")
    assert (long.instructions, long.memory) == (47, (100, 20, 3))
    assert long - short == Counts({4096: 10}, (40, 5, 0))


@pytest.mark.parametrize("text", ("block 1 2\n", "block 1 2 x\n", "blocks 1 2 3\n"))
def test_a_garbled_count_is_corrupt_input(text: str) -> None:
    with pytest.raises(CorruptInputError, match="the counting plugin wrote"):
        read_counts(text)


def test_the_body_of_a_kernel_counts_as_the_kernel() -> None:
    names = ["start", f"__tvm_ffi_{KERNEL}", f"{KERNEL}_compute_", "__tvm_parallel_lambda", "taste_session_step"]
    symbols = [(100 * (i + 1), name) for i, name in enumerate(names)]
    counts = Counts({50: 1, 110: 2, 210: 4, 350: 8, 499: 16, 500: 32, 777: 64})
    assert by_function(counts, symbols) == {"?": 1, "start": 2, KERNEL: 28, "taste_session_step": 96}


def test_kernels_are_summed_by_operator() -> None:
    rows = [
        {"operator": name, "calls": 1, "instructions": count, "flops": 2}
        for name, count in (("a", 1), ("b", 5), ("a", 3))
    ]
    assert [(row["operator"], row["calls"], row["instructions"]) for row in by_operator(rows)] == [
        ("b", 1, 5),
        ("a", 2, 4),
    ]


@pytest.mark.needs("qemu")
def test_a_loop_is_counted_to_the_instruction(tmp_path: Path) -> None:
    program = compiled(LOOP, tmp_path)
    target, plugin = find_target("rpi4"), build_plugin(tmp_path)
    once, twice = (
        count(target, [str(program), *["more"] * more], plugin, tmp_path / "out", caches=True) for more in (0, 1)
    )
    hot = by_function(twice - once, read_symbols(program))["hot"]
    assert 4 * 1000 <= hot <= 6 * 1000 and hot % 1000 == 0, "three nops and the loop around them"
    assert once.memory is not None
    accesses, l1, l2 = once.memory
    lines = (1 << 18) * 4 // 64
    # Every line of the array once: it is larger than the first cache and meets the second for the first time.
    assert lines <= l1 <= lines + 200 and lines <= l2 <= l1 and accesses >= 2 * lines


@pytest.mark.needs("qemu")
def test_only_what_lies_between_two_marks_is_counted(tmp_path: Path) -> None:
    program = compiled(MARKED, tmp_path)
    counts = count(find_target("rpi4"), [str(program)], build_plugin(tmp_path), tmp_path / "out", mark=GETSID)
    hot = by_function(counts, read_symbols(program))["hot"]
    assert 4 * 1000 <= hot <= 6 * 1000, "neither the 5,000 rounds before nor the 7,000 after"
    assert counts.instructions < hot + 200


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    (
        (["--targets", "rpi9"], 2, "unknown target 'rpi9'"),
        (["--targets", "x86-64-avx512"], 22, "an emulator of x86-64-avx512 is not installed"),
        (["--targets", "rpi4", "--scalar"], 2, "--scalar is for targets with V"),
        (["--targets", "visionfive2", "--torch-root", "/nowhere"], 2, "visionfive2 is riscv64"),
        (["--targets", "rpi4", "--torch-root", "/nowhere"], 22, "/nowhere is no arm64 root with PyTorch"),
    ),
)
def test_what_cannot_be_counted(arguments: list[str], code: int, words: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_operators_without_vectors_are_compiled_without(tmp_path: Path) -> None:
    """The table of boards.toml decides, operator by operator."""
    vectors = replace(find_target("bpi-f3"), scalar_kernels=())
    scalar = replace(vectors, scalar_kernels=("conv2d",))
    assert [operator_of(name) for name in (KERNEL, "taste_multiply_add_limit")] == ["conv2d", "multiply_add"]
    assert vectors.takes_vectors("conv2d") and not scalar.takes_vectors("conv2d") and scalar.takes_vectors("map")
    assert not find_target("visionfive2").takes_vectors("conv2d")
