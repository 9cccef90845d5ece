"""The C runtime: its own tests on the host, under sanitizers and QEMU; taste-train's verbs, numbers and error exits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.native_builds import (
    ADDRESS,
    ARM,
    CLASSES,
    HIDDEN,
    HOST,
    INPUTS,
    RISCV,
    THREAD,
    Toolchain,
    refuse,
    run,
    succeed,
)
from tests.packed_data import normalised, pack

Build = Callable[..., Path]
Array = np.ndarray[Any, Any]
ROWS = 10


@pytest.fixture(scope="session")
def program(build: Build) -> Path:
    return build(HOST, "taste-train")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    random = np.random.default_rng(5)
    x = random.standard_normal((ROWS, 2, 4, 5), dtype=np.float32)
    y = random.integers(0, CLASSES, ROWS).astype(np.int32)
    save_file({"x": x, "y": y}, tmp_path / "samples.safetensors")
    return tmp_path / "samples.safetensors"


# The runtime's own checks, in C.


def test_runtime_on_this_machine(build: Build) -> None:
    checks = build(HOST, "checks")
    result = subprocess.run([checks], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "0 failures\n")


def test_a_broken_check_is_seen(build: Build) -> None:
    result = subprocess.run([build(HOST, "checks"), "broken"], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1 and "1 failures" in result.stdout


@pytest.mark.needs("clang")
@pytest.mark.parametrize("toolchain", [ADDRESS, THREAD], ids=lambda t: t.name)
def test_runtime_under_sanitizers(build: Build, toolchain: Toolchain) -> None:
    result = subprocess.run([build(toolchain, "checks")], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0 failures\n", "")


@pytest.mark.needs("qemu")
@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=lambda t: t.name)
def test_runtime_and_program_under_qemu(
    build: Build, program: Path, toolchain: Toolchain, samples: Path, tmp_path: Path
) -> None:
    checks = [*toolchain.emulator, str(build(toolchain, "checks"))]
    result = subprocess.run(checks, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "0 failures\n")
    emulated = build(toolchain, "taste-train")
    arguments = ("train", "--samples", samples, "--batch-size", 4, "--steps", 3, "--lr", 0.05, "--save")
    here = succeed(program, *arguments, tmp_path / "here")
    there = succeed(emulated, *arguments, tmp_path / "there", emulator=toolchain.emulator)
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (here, there)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = load_file(tmp_path / "here"), load_file(tmp_path / "there")
    assert all(np.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6) for name in ours)
    assert succeed(emulated, "info", emulator=toolchain.emulator)[0]["emulated"] is True
    draw = np.random.default_rng(1)
    images, labels = draw.integers(0, 256, (9, 2, 4, 5)).astype(np.uint8), draw.integers(0, CLASSES, 9).astype(np.int32)
    packed = pack(tmp_path / "packed", images, labels)
    arguments = ("train", "--samples", packed, "--batch-size", 2, "--epochs", 2, "--lr", 0.01, "--augment", "crop-flip")
    here, there = succeed(program, *arguments), succeed(emulated, *arguments, emulator=toolchain.emulator)
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (here, there)]
    assert len(losses[0]) == 10 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    # One multiply and one add, also where the CPU has both in one instruction that rounds once.
    save_file({"x": normalised(images), "y": labels}, tmp_path / "floats")
    for name in ("packed", "floats"):
        files = ("--samples", tmp_path / name, "--logits", tmp_path / f"{name}.out")
        succeed(emulated, "eval", *files, "--batch-size", 4, emulator=toolchain.emulator)
    assert (tmp_path / "packed.out").read_bytes() == (tmp_path / "floats.out").read_bytes()


# taste-train's verbs.


def test_info_gives_a_closed_form_of_the_memory(program: Path) -> None:
    info = succeed(program, "info", "--threads", 2)[0]
    assert info["blocks"] == ["hidden", "scale", "head"] and info["input_shape"] == [2, 4, 5]
    assert (info["classes"], info["minimum_batch"], info["features"]) == (CLASSES, 1, [])
    for name, line in info["programs"].items():
        for batch in (1, 2, 33, 500):
            arguments = ("info", "--threads", 2, "--batch-size", batch, "--program", name)
            planned = succeed(program, *arguments)[0]["planned_bytes"]
            assert 0 <= line["fixed_bytes"] + batch * line["per_sample_bytes"] - planned <= 2 * 4096


@pytest.mark.parametrize(("name", "batch", "threads"), [("train", 1, 1), ("train", 600, 2), ("eval", 600, 1)])
def test_planned_memory_is_what_is_used(program: Path, name: str, batch: int, threads: int) -> None:
    if threads > len(os.sched_getaffinity(0)):
        pytest.skip(f"needs {threads} cores")
    arguments = ("--program", name, "--batch-size", batch, "--threads", threads, "--seconds", 0.05, "--min-steps", 2)
    result = succeed(program, "bench", *arguments)[-1]
    planned, peak = result["planned_bytes"], result["peak_rss_bytes"]
    assert peak <= 1.01 * planned and planned - peak <= max(0.03 * planned, 2 << 20)


def test_bench_reports_windows_and_a_result(program: Path) -> None:
    events = succeed(program, "bench", "--batch-size", 3, "--seconds", 0.2, "--min-steps", 5)
    assert events[0]["event"] == "plan" and {e["event"] for e in events[1:-1]} == {"counters"}
    result = events[-1]
    assert result["event"] == "result" and result["verb"] == "bench" and result["batch_size"] == 3
    rates = [e["samples_per_s"] for e in events[1:-1]]
    assert result["samples_per_s"] == pytest.approx(float(np.median(rates)), rel=1e-6)
    low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75])
    assert result["spread"] == pytest.approx((high - low) / middle, rel=1e-5)
    assert result["steps"] >= 5 and result["elapsed_s"] >= 0.2 and result["emulated"] is False
    assert result["tainted"] is (result["taint"] is not None) and np.isfinite(result["loss"])
    assert min(result["forward_s"], result["backward_s"], result["optimizer_s"]) > 0


def test_bench_stops_early_where_a_step_is_long(program: Path) -> None:
    """Every step is "long" against so short a time: the end comes when two windows agree, or after min_steps."""
    result = succeed(program, "bench", "--batch-size", 64, "--seconds", 0.0001, "--min-steps", 40)[-1]
    assert 2 <= result["steps"] <= 40


def reference_step(weights: dict[str, Any], x: Array, y: Array) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the test model in float64."""
    rows = len(x)
    flat = x.reshape(rows, -1).astype(np.float64)
    hidden = np.maximum(flat @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    logits = 1.25 * hidden @ weights["head.weight"].T + weights["head.bias"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    d_logits = (np.exp(log_p) - np.eye(CLASSES)[y]) / rows
    d_hidden = 1.25 * d_logits @ weights["head.weight"] * (hidden > 0)
    gradients = {
        "hidden.weight": d_hidden.T @ flat,
        "hidden.bias": d_hidden.sum(axis=0),
        "head.weight": d_logits.T @ (1.25 * hidden),
        "head.bias": d_logits.sum(axis=0),
    }
    return float(-log_p[np.arange(rows), y].mean()), gradients


def make_weights(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"hidden.weight": (HIDDEN, INPUTS), "hidden.bias": (HIDDEN,), "head.weight": (CLASSES, HIDDEN)}
    shapes |= {"head.bias": (CLASSES,), "scale.mean": (HIDDEN,)}
    return {name: 0.1 * random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_train_follows_numpy(program: Path, samples: Path, tmp_path: Path) -> None:
    weights = make_weights(1)
    save_file(weights, tmp_path / "start")
    data = load_file(samples)
    files = ("--weights", tmp_path / "start", "--save", tmp_path / "end", "--dump-gradients", tmp_path / "gradients")
    hyper = ("--lr", 0.01, "--momentum", 0.9, "--nesterov", "--weight-decay", 0.001, "--warmup", 0.5)
    events = succeed(program, "train", "--samples", samples, "--batch-size", 4, "--steps", 4, *hyper, *files)
    exact = {name: weights[name].astype(np.float64) for name in weights if name != "scale.mean"}
    momentum = {name: np.zeros_like(exact[name]) for name in exact}
    losses = []
    for step in range(4):
        rows = [np.arange(4), np.arange(4, 8), np.arange(8, 10), np.arange(4)][step]
        loss, gradients = reference_step(exact, data["x"][rows], data["y"][rows])
        losses.append(loss)
        for name in exact:
            d = gradients[name] + 0.001 * exact[name]
            momentum[name] = 0.9 * momentum[name] + d
            exact[name] -= 0.01 * min(1, (step + 1) / 2) * (d + 0.9 * momentum[name])
    assert [e["loss"] for e in events if e["event"] == "step"] == pytest.approx(losses, rel=1e-5, abs=1e-7)
    saved, dumped = load_file(tmp_path / "end"), load_file(tmp_path / "gradients")
    for name in exact:
        assert np.linalg.norm(saved[name] - exact[name]) <= 1e-5 * np.linalg.norm(exact[name])
        assert np.linalg.norm(dumped[name] - gradients[name]) <= 1e-4 * np.linalg.norm(gradients[name])
    assert events[-1]["first_loss"] == pytest.approx(losses[0], rel=1e-5) and set(saved) == set(weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["end", "gradients", "samples.safetensors", "start"]


def test_micro_batches_follow_the_whole_batch(program: Path, samples: Path, tmp_path: Path) -> None:
    common = ("train", "--samples", samples, "--steps", 3, "--lr", 0.05, "--momentum", 0.9, "--grad-clip", 0.5)
    whole = succeed(program, *common, "--batch-size", ROWS, "--save", tmp_path / "whole")
    parts = succeed(program, *common, "--batch-size", 4, "--effective-batch", ROWS, "--save", tmp_path / "parts")
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    a, b = load_file(tmp_path / "whole"), load_file(tmp_path / "parts")
    assert np.allclose(a["hidden.weight"], b["hidden.weight"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_for_any_number_of_threads(program: Path, samples: Path, tmp_path: Path, threads: int) -> None:
    arguments = ("train", "--samples", samples, "--batch-size", 7, "--steps", 3, "--lr", 0.1, "--save")
    succeed(program, *arguments, tmp_path / "one", "--threads", 1)
    succeed(program, *arguments, tmp_path / "more", "--threads", threads)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "more").read_bytes()


def test_eval_counts_every_sample_once(program: Path, samples: Path, tmp_path: Path) -> None:
    weights = make_weights(2)
    save_file(weights, tmp_path / "weights")
    data = load_file(samples)
    exact = {name: weights[name].astype(np.float64) for name in weights}
    loss, _ = reference_step(exact, data["x"], data["y"])
    files = ("--weights", tmp_path / "weights", "--logits", tmp_path / "logits")
    result = succeed(program, "eval", "--samples", samples, "--batch-size", 4, *files)[-1]
    logits = load_file(tmp_path / "logits")["logits"]
    assert logits.shape == (ROWS, CLASSES) and result["samples"] == ROWS
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["accuracy"] == pytest.approx(float((logits.argmax(axis=1) == data["y"]).mean()))


def test_seeded_weights_are_those_of_the_contract(program: Path, samples: Path, tmp_path: Path) -> None:
    arguments = ("train", "--samples", samples, "--batch-size", 1, "--steps", 1, "--lr", 0, "--seed", 11, "--save")
    succeed(program, *arguments, tmp_path / "seeded")
    saved = load_file(tmp_path / "seeded")

    def splitmix64(x: Array) -> Array:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))

    def fnv1a(text: str) -> int:
        value = 0xCBF29CE484222325
        for byte in text.encode():
            value = (value ^ byte) * 0x100000001B3 % 2**64
        return value

    key = splitmix64(np.array([11 ^ fnv1a("hidden.weight")], np.uint64))
    unit = (splitmix64(key + np.arange(HIDDEN * INPUTS, dtype=np.uint64)) >> np.uint64(40)).astype(np.float32)
    expected = (2 * (unit * np.float32(2**-24)) - 1) * np.float32(0.15811388)
    assert np.array_equal(saved["hidden.weight"].ravel(), expected)
    assert not saved["head.bias"].any()


# Error exits: one line, its code, nothing left behind.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no verb"),
        (("dance",), "no verb 'dance'"),
        (("bench",), "without a batch size"),
        (("bench", "--batch-size", "0"), "--batch-size '0'"),
        (("bench", "--batch-size", "-1"), "--batch-size '-1'"),
        (("bench", "--batch-size", "4x"), "--batch-size '4x'"),
        (("bench", "--batch-size", "99999999999999999999"), "--batch-size"),
        (("bench", "--batch-size"), "--batch-size ''"),
        (("bench", "--batch-size", "4", "--seconds", "nan"), "--seconds 'nan'"),
        (("bench", "--batch-size", "4", "--cores", "0,0"), "--cores"),
        (("bench", "--batch-size", "4", "--cores", "1000"), "core 1000"),
        (("bench", "--batch-size", "4", "--threads", "9999"), "9999 threads"),
        (("bench", "--batch-size", "4", "--program", "dream"), "no program 'dream'"),
        (("bench", "--batch-size", "4", "--lr", "1"), "bench does not know '--lr'"),
        (("train", "--batch-size", "4"), "without samples"),
        (("train", "--batch-size", "4", "--samples", "x"), "--epochs E and --steps K, and --lr L"),
        (("train", "--batch-size", "4", "--samples", "x", "--steps", "1", "--lr", "1", "--nesterov"), "--momentum"),
        (
            ("train", "--batch-size", "4", "--effective-batch", "2", "--samples", "x", "--steps", "1", "--lr", "1"),
            "effective",
        ),
    ],
)
def test_usage_is_refused(program: Path, arguments: tuple[str, ...], words: str) -> None:
    refuse(2, words, program, *arguments)


def test_what_does_not_fit_is_refused_with_what_does(program: Path) -> None:
    line = succeed(program, "info", "--threads", 1)[0]["programs"]["train"]
    limit = line["fixed_bytes"] + 20 * line["per_sample_bytes"] + 100
    bench = ("bench", "--threads", 1, "--memory", limit, "--seconds", 0.01, "--min-steps", 2, "--batch-size")
    refuse(10, "Largest that fits: 20.", program, *bench, 96)
    succeed(program, *bench, 20)
    refuse(10, "No batch size fits: take", program, "bench", "--batch-size", 4, "--memory", 1000)


def test_free_memory_of_the_system_counts(program: Path, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    bench = ("bench", "--batch-size", 500, "--system-root", tmp_path)
    refuse(10, "free are 2.0 MiB", program, *bench)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 9000000 kB\n")
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("4000000\n")
    (group.parent / "memory.current").write_text("3000000\n")
    (group.parent / "memory.stat").write_text("anon 100\ninactive_file 1097152\n")
    refuse(10, "free are 2.0 MiB", program, *bench)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/c\n")
    legacy = tmp_path / "sys/fs/cgroup/memory/c"
    legacy.mkdir(parents=True)
    (legacy / "memory.limit_in_bytes").write_text("3145728\n")
    (legacy / "memory.usage_in_bytes").write_text("0\n")
    refuse(10, "free are 3.0 MiB", program, *bench)


def test_throttling_and_swapping_taint(program: Path, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    firmware = tmp_path / "sys/devices/platform/soc/soc:firmware"
    firmware.mkdir(parents=True)
    (firmware / "get_throttled").write_text("50005\n")
    bench = ("bench", "--batch-size", 1, "--seconds", 0.01, "--min-steps", 2, "--system-root", tmp_path)
    result = succeed(program, *bench)[-1]
    assert result["tainted"] is True and "0x50005" in result["taint"]
    (firmware / "get_throttled").write_text("50000\n")
    result = succeed(program, *bench)[-1]
    assert result["tainted"] is False and result["taint"] is None


def test_another_cpu_is_refused(build: Build) -> None:
    refuse(13, "lacks 'sve9'", build(HOST, "taste-train-other-cpu"), "bench", "--batch-size", 4)


def test_damaged_and_foreign_weights_are_refused(program: Path, samples: Path, tmp_path: Path) -> None:
    weights, path = make_weights(3), tmp_path / "weights"
    train = ("eval", "--samples", samples, "--batch-size", 4, "--weights", path)
    refuse(12, "cannot open", program, *train)
    save_file(weights, path)
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        refuse(14, str(path), program, *train)
    path.write_bytes(b"\xff" * 8 + whole[8:])
    refuse(14, str(path), program, *train)
    save_file({name: weights[name] for name in weights if name != "scale.mean"}, path)
    refuse(13, "no tensor 'scale.mean'", program, *train)
    save_file({**weights, "head.bias": np.zeros(CLASSES + 1, np.float32)}, path)
    refuse(13, "'head.bias' as F32 [6]", program, *train)
    save_file({**weights, "head.bias": np.zeros(CLASSES, np.float64)}, path)
    refuse(13, "'head.bias' as F64", program, *train)
    save_file({**weights, "more": np.zeros(3, np.float16)}, path)
    succeed(program, *train)


def test_samples_of_another_model_are_refused(program: Path, samples: Path, tmp_path: Path) -> None:
    data, path = load_file(samples), tmp_path / "other"
    train = ("train", "--samples", path, "--batch-size", 4, "--steps", 1, "--lr", 0.1)
    changes: list[tuple[dict[str, Array], int, str]] = [
        ({"x": np.zeros((3, 2, 4, 6), np.float32)}, 13, "x of"),
        ({"x": data["x"].astype(np.float64)}, 13, "F64"),
        ({"y": data["y"].astype(np.int64)}, 13, "I64"),
        ({"y": data["y"][:3]}, 13, "10 samples"),
        ({"y": data["y"] + CLASSES}, 2, "has label"),
    ]
    for change, code, words in changes:
        save_file({**data, **change}, path)
        refuse(code, words, program, *train)
    save_file({"x": data["x"]}, path)
    refuse(14, "no tensor 'y'", program, *train)
    save_file({"y": data["y"]}, path)
    refuse(14, "no tensor 'x'", program, *train)
    assert succeed(program, "eval", "--samples", samples, "--batch-size", 64)[-1]["samples"] == ROWS


def test_a_loss_that_is_not_finite_ends_the_run(program: Path, samples: Path, tmp_path: Path) -> None:
    data, path = load_file(samples), tmp_path / "bad"
    data["x"][5, 0, 0, 0] = np.nan
    save_file(data, path)
    saved = tmp_path / "saved"
    train = ("--batch-size", 4, "--steps", 9, "--save", saved)
    refuse(
        15, f"step 2: sample 5 of {path} has NaN at value 0", program, "train", "--samples", path, "--lr", 0.1, *train
    )
    got, events, stderr = run(program, "train", "--samples", samples, "--lr", 1e30, *train)
    assert got == 15 and "step 2" in stderr and [e["event"] for e in events] == ["plan", "step", "error"]
    # The arena lends the input's place to activations: what overflowed there is not said of the input.
    assert "the loss is NaN" in stderr and "first seen in 'x'" not in stderr, stderr
    assert not saved.exists()


def test_nothing_is_left_where_saving_fails(program: Path, samples: Path, tmp_path: Path) -> None:
    train = ("train", "--samples", samples, "--batch-size", 4, "--steps", 1, "--lr", 0.1, "--save")
    refuse(12, "cannot create", program, *train, tmp_path / "none" / "saved")
    (tmp_path / "folder").mkdir()
    refuse(12, "not a regular file", program, *train, tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "samples.safetensors"]
    with open("/dev/full", "w") as full:
        result = subprocess.run([program, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 11 and "standard output" in result.stderr


def test_every_fault_while_saving_leaves_the_old_file(build: Build, tmp_path: Path) -> None:
    """The planted twin writes in place: a loop that does not catch it counts for nothing."""
    loop = build(HOST, "fault-loop")
    for name, code in (("right", 0), ("planted", 1)):
        (tmp_path / name).mkdir()
        result = subprocess.run([loop, tmp_path / name, name], capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == code, result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_training_saves(program: Path, samples: Path, tmp_path: Path, number: signal.Signals) -> None:
    saved = tmp_path / "saved"
    arguments = ("train", "--samples", samples, "--batch-size", 4, "--steps", 10**9, "--lr", 1e-6, "--save", saved)
    with open(tmp_path / "events", "w") as events:
        process = subprocess.Popen([program, *map(str, arguments)], stdout=events, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while '"step":3' not in (tmp_path / "events").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted after step" in stderr and "saved" in stderr
    assert set(load_file(saved)) == set(make_weights(0))
