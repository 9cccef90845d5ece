"""Profiles: the limit kernel against numpy, what a program says of its kernels, and the host's verb."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.errors import CompatibilityError
from cross.fuse_updates import fuse_updates
from cross.kernels.limit import STEPS, limit_of, multiply_add_limit
from cross.load_model import load_model
from cross.lower import LoweredProgram
from host_control.boards.profile import by_operator, read_profile
from host_control.cli import main
from tests.kernel_tensors import HOST, Runner
from tests.run_program import lower_model

BATCH = 4


@pytest.fixture(scope="module")
def folder(built: Callable[..., Path]) -> Path:
    return built("mlp", "x86-64-avx2")


def _run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "taste-train"), "profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module", params=["train", "train_fused"])
def record(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    done = _run(folder, "--batch-size", BATCH, "--seconds", 0.1, "--threads", 1, "--program", request.param)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _lowered(name: str) -> LoweredProgram:
    kernels = fuse_updates(lower_model(load_model("mlp")))
    return next(p for p in kernels.programs if p.stored.graph.name == name)


def test_the_limit_kernel_multiplies_and_adds() -> None:
    limit = limit_of(HOST)
    values = np.random.default_rng(0).uniform(-1, 1, (3, limit.row_elements)).astype(np.float32)
    values[:, -2 * limit.width : -limit.width] = 0.75
    found = Runner(multiply_add_limit(HOST))(values.copy())
    sums, term = limit.sums * limit.width, values[:, -limit.width :]
    expected = np.tile(term / 0.25, (1, limit.sums))
    assert np.allclose(found[:, :sums], expected, rtol=1e-5)
    assert np.array_equal(found[:, sums:], values[:, sums:])
    assert limit.row_flops == 2 * STEPS * sums


@pytest.mark.needs("avx2")
def test_every_call_is_there_once_and_an_optimizer_of_its_own_last(record: dict[str, Any]) -> None:
    names = [call.name for call in _lowered(record["program"]).calls]
    last = ["optimizer"] if record["program"] == "train" else []
    assert [kernel["name"] for kernel in record["kernels"]] == names + last
    assert record["batch_size"] == BATCH and record["threads"] == 1 and record["runs"] >= 3


@pytest.mark.needs("avx2")
def test_rates_follow_from_the_tables(record: dict[str, Any]) -> None:
    program = _lowered(record["program"])
    for kernel, call in zip(record["kernels"], program.calls, strict=False):
        storages = [program.storages[name] for name in call.arguments]
        written = 0 if call.kernel else 3 * storages[0].bytes  # the parameter; its momentum read and written
        assert kernel["bytes"] == sum(s.bytes * (BATCH if s.batched else 1) for s in storages) + written
        flops = call.fixed_flops + BATCH * call.per_sample_flops
        assert kernel["gflops"] * kernel["ms"] * 1e6 == pytest.approx(flops, rel=1e-5)
        assert kernel["limit_share"] * record["limit_gflops"] == pytest.approx(kernel["gflops"], rel=1e-5)
        computes = flops / record["limit_gflops"] > kernel["bytes"] / record["limit_gb_per_s"]
        assert kernel["bound"] == ("compute" if computes else "memory")
        assert 0 < kernel["best_ms"] <= kernel["ms"]
    assert sum(kernel["share"] for kernel in record["kernels"]) == pytest.approx(1)


@pytest.mark.needs("avx2")
def test_the_limit_is_out_of_reach(record: dict[str, Any]) -> None:
    assert all(kernel["limit_share"] < 1 for kernel in record["kernels"])


@pytest.mark.needs("avx2")
def test_the_forward_program_has_no_optimizer(folder: Path) -> None:
    done = _run(folder, "--batch-size", 1, "--seconds", 0.01, "--program", "eval")
    assert "optimizer" not in [kernel["name"] for kernel in json.loads(done.stdout.splitlines()[-1])["kernels"]]


@pytest.mark.needs("avx2")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", 1], "without a batch size"),
        (["--batch-size", 1, "--program", "nothing"], "no program 'nothing'"),
        (["--batch-size", 1, "--lr", 1], "does not know '--lr'"),
        (["--batch-size", 1, "--threads", 300], "300 threads"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(folder: Path, arguments: list[object], words: str) -> None:
    done = _run(folder, *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.needs("avx2")
def test_the_verb_reports_what_the_program_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "profile",
        "--build",
        str(folder),
        "--batch-size",
        "2",
        "--seconds",
        "0.05",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["event"], result["verb"], result["batch_size"]) == ("result", "profile", 2)
    assert result == {"event": "result", **json.loads((tmp_path / "out" / "result.json").read_text())}
    assert main([*words[:-1], str(tmp_path / "again")]) == 0
    text = capsys.readouterr().out
    assert "update" in text and "bound by" in text and "GFLOP/s" in text


def test_a_recorded_board_has_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"board": "x", "throughput": [{"batch_size": 1, "samples_per_s": 1.0}]}))
    out = str(tmp_path / "out")
    code = main(["profile", "--board", f"recorded:{table}", "--model", "mlp", "--batch-size", "1", "--out", out])
    error = capsys.readouterr().err
    assert code != 0 and error.startswith("error: ") and error.count("\n") == 1


def test_operators_add_up(record: dict[str, Any]) -> None:
    profile = read_profile(record, "here")
    operators = by_operator(profile.kernels)
    assert sum(o.calls for o in operators) == len(profile.kernels)
    assert sum(o.ms for o in operators) == pytest.approx(profile.ms, rel=1e-4)
    flops = sum(k.gflops * k.ms for k in profile.kernels)
    assert sum(o.gflops * o.ms for o in operators) == pytest.approx(flops)


def test_another_versions_record_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(CompatibilityError, match="limit_gflops"):
        read_profile({key: value for key, value in record.items() if key != "limit_gflops"}, "here")
