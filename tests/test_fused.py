"""`train_fused` against `train` in real builds: the same bits at the end of a run, in less memory; and when which is taken."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host import host_target
from tests.native_builds import succeed
from tests.packed_data import pack

APART = ("--grad-clip", 1e30)
"""A limit that no gradient reaches: it scales by 1, to the bit, but needs all gradients at once."""

OPTIMIZERS = {
    "plain": (),
    "momentum": ("--momentum", 0.9, "--weight-decay", 5e-4),
    "nesterov": ("--momentum", 0.9, "--nesterov", "--weight-decay", 5e-4, "--no-decay-norm"),
    "adamw": ("--optimizer", "adamw", "--weight-decay", 0.01),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(3)
    x, y = draw.integers(0, 256, (22, 3, 32, 32)).astype(np.uint8), draw.integers(0, 10, 22).astype(np.int32)
    return pack(tmp_path_factory.mktemp("fused") / "train", x, y, [0.5] * 3, [0.25] * 3)


def train(program: Path, samples: Path, *flags: object) -> list[dict[str, Any]]:
    arguments = ("--samples", samples, "--lr", 0.05, "--epochs", 2, "--augment", "flip")
    return succeed(program, "train", *arguments, *flags)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_end_with_the_same_bits(optimizer: str, samples: Path, built: Callable[..., Path]) -> None:
    """Batches of 8, 8 and 6 on one and two threads."""
    program, flags = built("resnet8", host_target()) / "taste-train", (*OPTIMIZERS[optimizer], "--batch-size", 8)
    apart = train(program, samples, *flags, *APART)
    assert apart[0]["program"] == apart[-1]["program"] == "train"
    for threads in (1, 2):
        fused = train(program, samples, *flags, "--threads", threads)
        assert fused[0]["program"] == fused[-1]["program"] == "train_fused"
        assert fused[-1]["sha256"] == apart[-1]["sha256"] and fused[-1]["loss"] == apart[-1]["loss"]


def test_a_checkpoint_of_one_goes_on_in_the_other(samples: Path, tmp_path: Path, built: Callable[..., Path]) -> None:
    """The effective batch is 8 samples throughout; in micro-batches of 4 they are added up."""
    program, flags = built("mlp", host_target()) / "taste-train", ("--effective-batch", 8, "--momentum", 0.9)
    folder = ("--checkpoint", tmp_path / "run", "--checkpoint-every", "2steps")
    whole = train(program, samples, *flags, "--batch-size", 8)
    train(program, samples, *flags, *folder, "--batch-size", 8)
    (tmp_path / "run" / "checkpoint-0.safetensors").unlink()
    fused = train(program, samples, *flags, *folder, "--batch-size", 8, "--resume")
    assert any(e["event"] == "resume" and 0 < e["step"] < 6 for e in fused)
    assert fused[-1]["program"] == "train_fused" and fused[-1]["sha256"] == whole[-1]["sha256"]
    (tmp_path / "run" / "checkpoint-0.safetensors").unlink(missing_ok=True)
    parts = train(program, samples, *flags, *folder, "--batch-size", 4, "--resume")
    assert parts[0]["program"] == parts[-1]["program"] == "train"


def test_a_step_is_fused_where_nothing_needs_all_gradients(samples: Path, built: Callable[..., Path]) -> None:
    program, tmp = built("mlp", host_target()) / "taste-train", samples.parent
    control = tmp / "control"
    control.write_text("")
    for flags, wanted in (
        ((), "train_fused"),
        (("--effective-batch", 6), "train_fused"),
        (("--effective-batch", 12), "train"),
        (("--grad-clip", 1), "train"),
        (("--control", control), "train"),
        (("--dump-gradients", tmp / "gradients"), "train"),
    ):
        plan = train(program, samples, "--batch-size", 6, *flags)[0]
        assert plan["program"] == wanted, flags
        if not {"--control", "--dump-gradients"} & set(flags):
            foreseen = succeed(program, "info", "--batch-size", 6, *flags)[0]["planned_bytes"]
            assert foreseen == plan["planned_bytes"], flags
    for flags, wanted in (((), "train_fused"), (("--program", "train"), "train"), (("--program", "eval"), "eval")):
        measured = succeed(program, "bench", "--batch-size", 2, "--seconds", 0.01, "--min-steps", 2, *flags)
        assert measured[0]["program"] == measured[-1]["program"] == wanted
    profile = succeed(program, "profile", "--batch-size", 2, "--seconds", 0.01)[-1]
    names = [row["name"] for row in profile["kernels"]]
    assert profile["program"] == "train_fused" and "optimizer" not in names
    assert sum(name.startswith("update ") for name in names) == 6


def test_gradients_take_no_memory_of_their_own(built: Callable[..., Path]) -> None:
    """mlp is almost nothing but parameters: of their gradients, only the largest layer's is left."""
    folder = built("mlp", host_target())
    manifest = json.loads((folder / "manifest.json").read_text())
    programs = succeed(folder / "taste-train", "info", "--threads", 1)[0]["programs"]
    saved = programs["train"]["fixed_bytes"] - programs["train_fused"]["fixed_bytes"]
    largest = manifest["programs"]["train_fused"]["fixed_bytes"] - manifest["programs"]["train"]["fixed_bytes"]
    assert abs(manifest["parameter_bytes"] - largest - saved) <= 2 * 4096  # pages
    assert programs["train"]["per_sample_bytes"] == programs["train_fused"]["per_sample_bytes"]
    for name in ("train", "train_fused"):
        command = (folder / "taste-train", "bench", "--batch-size", 4, "--seconds", 0.1, "--min-steps", 2)
        done = subprocess.run([*map(str, command), "--program", name], capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["program"] == name and result["peak_rss_bytes"] <= 1.01 * result["planned_bytes"]
        assert result["planned_bytes"] - result["peak_rss_bytes"] <= max(0.03 * result["planned_bytes"], 2 << 20)
