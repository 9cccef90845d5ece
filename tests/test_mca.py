"""benchmarks/mca.py: which loop it takes, what it makes of llvm-mca's words, and what it says where that is missing."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from benchmarks import mca
from benchmarks.mca import Loop, Tools, cycles_of, heaviest_loop, main
from cross.target import find_target

DISASSEMBLY = """
0000000000000000 <taste_conv2d_0123456789ab_compute_>:
       0:      \tmov\tx8, x0
       4:      \tldr\tq0, [x8], #0x10
       8:      \tldr\tq1, [x9], #0x10
       c:      \tfmla\tv2.4s, v1.4s, v0.s[0]
      10:      \tfmla\tv3.4s, v1.4s, v0.s[1]   // a comment
      14:      \tsubs\tx10, x10, #0x1
      18:      \tb.ne\t0x8 <taste_conv2d_0123456789ab_compute_+0x8>
      1c:      \tfmla\tv2.4s, v1.4s, v0.s[0]
      20:      \tfmla\tv4.4s, v1.4s, v0.s[0]
      24:      \tfmla\tv5.4s, v1.4s, v0.s[0]
      28:      \tb.ne\t0x4 <taste_conv2d_0123456789ab_compute_+0x4>

0000000000000000 <__tvm_parallel_lambda>:
       0:      \tfmla\tv2.4s, v1.4s, v0.s[0]
       4:      \tcbnz\tx3, 0x0 <__tvm_parallel_lambda>
       8:      \tret
"""


def test_the_innermost_loop_with_most_multiply_adds_is_taken() -> None:
    loop = heaviest_loop(DISASSEMBLY)
    assert loop == Loop(
        ("ldr q1, [x9], #0x10", "fmla v2.4s, v1.4s, v0.s[0]", "fmla v3.4s, v1.4s, v0.s[1]", "subs x10, x10, #0x1"), 2
    )


def test_straight_code_has_no_loop() -> None:
    assert heaviest_loop("<f>:\n 0: fmla v2.4s, v1.4s, v0.s[0]\n 4: ret\n") is None


def test_cycles_are_those_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def run(command: Any, text: str = "") -> str:
        given.append(text)
        return "Iterations:        100\nInstructions:      400\nTotal Cycles:      650\n"

    monkeypatch.setattr(mca, "_output", run)
    tools = Tools("llvm-mca-22", "llvm-objdump-22")
    assert cycles_of(tools, find_target("rpi4"), ["fmla v0.4s, v1.4s, v2.4s"]) == 6.5
    assert cycles_of(tools, find_target("bpi-f3"), ["vfmacc.vf v0, ft0, v1"]) == 6.5
    assert given == [
        "fmla v0.4s, v1.4s, v2.4s\n",
        "# LLVM-MCA-RISCV-LMUL M1\n# LLVM-MCA-RISCV-SEW E32\nvfmacc.vf v0, ft0, v1\n",
    ]


def test_without_llvm_mca_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["--targets", "rpi4"]) == 22
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(
        "error: llvm-mca and llvm-objdump 19 or later are not installed. On Debian: apt-get install llvm-22."
    )


def test_unknown_targets_are_refused(capsys: Any) -> None:
    assert main(["--targets", "rpi9"]) == 2
    assert "unknown target 'rpi9'" in capsys.readouterr().err
