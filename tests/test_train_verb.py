"""taste-train train: packed data, order, augmentation, schedules, evaluation, accumulation, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.native_builds import CLASSES, HOST, refuse, run, succeed
from tests.packed_data import (
    MEAN,
    STD,
    augmented,
    keyed_order,
    normalised,
    pack,
)
from tests.test_native import make_weights, reference_step

Array = np.ndarray[Any, Any]
COUNT = 23


@pytest.fixture(scope="session")
def program(build: Callable[..., Path]) -> Path:
    return build(HOST, "taste-train")


@pytest.fixture
def images() -> tuple[Array, Array]:
    random = np.random.default_rng(8)
    x = random.integers(0, 256, (COUNT, 2, 4, 5)).astype(np.uint8)
    return x, random.integers(0, CLASSES, COUNT).astype(np.int32)


@pytest.fixture
def packed(images: tuple[Array, Array], tmp_path: Path) -> Path:
    return pack(tmp_path / "train.safetensors", *images)


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == "step"]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000, 4097])
def test_the_order_is_a_permutation(count: int) -> None:
    """Of the twin in Python; the next test shows that the program has the same."""
    orders = [keyed_order(seed, epoch, count) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count > 60:
        assert all(np.mean(a == b) < 0.1 for a, b in zip(orders, orders[1:] + orders[:1], strict=True))
        assert abs(np.corrcoef(orders[0], np.arange(count))[0, 1]) < 0.35


@pytest.mark.parametrize("augment", ["none", "flip", "crop-flip", "crop-flip-cutout"])
def test_epochs_follow_numpy(
    program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path, augment: str
) -> None:
    """Two and a half epochs in effective batches of 9 (tails of 5) and micro-batches of 4, in the order of the keys."""
    x, y = images
    weights = make_weights(3)
    save_file(weights, tmp_path / "start")
    exact = {name: values.astype(np.float64) for name, values in weights.items() if name != "scale.mean"}
    arguments = ("train", "--samples", packed, "--weights", tmp_path / "start", "--batch-size", 4, "--seed", 5)
    arguments += ("--effective-batch", 9, "--lr", 0.02, "--epochs", 2.5, "--augment", augment)
    arguments += ("--schedule", "cosine", "--warmup", 0.25, "--save", tmp_path / "end")
    events = succeed(program, *arguments)
    rates, losses, epochs = [], [], []
    total = 8  # 2.5 epochs of 3 steps
    for step in range(total):
        epoch, first = step // 3, step % 3 * 9
        order = keyed_order(5, epoch, COUNT)
        positions = np.arange(first, min(first + 9, COUNT))
        rows = order[positions]
        batch = np.stack([augmented(x[r], augment, 5, epoch, int(p)) for r, p in zip(rows, positions, strict=True)])
        loss, gradients = reference_step(exact, batch, y[rows])
        rate = 0.02 * (step + 1) / 2 if step < 2 else 0.01 * (1 + np.cos(np.pi * (step - 2) / (total - 2)))
        for name in exact:
            exact[name] -= rate * gradients[name]
        losses.append(loss)
        rates.append(rate)
        epochs.append(epoch + (positions[-1] + 1) / COUNT)
    steps = steps_of(events)
    assert [e["lr"] for e in steps] == pytest.approx(rates, rel=1e-6)
    assert [e["epoch"] for e in steps] == pytest.approx(epochs)
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-4)
    saved = load_file(tmp_path / "end")
    for name in exact:
        assert np.linalg.norm(saved[name] - exact[name]) <= 1e-5 * np.linalg.norm(exact[name])
    result = events[-1]
    assert (result["steps"], result["epochs"]) == (total, pytest.approx(epochs[-1]))
    assert 0 <= steps[-1]["accuracy"] <= 1 and result["samples_per_s"] > 0


def test_normalised_bytes_have_the_same_bits_as_numpy(
    program: Path, images: tuple[Array, Array], tmp_path: Path
) -> None:
    """One multiply and one add in float32: the packed file and the float32 file of the same values give the same run."""
    x, y = images
    pack(tmp_path / "packed", x, y)
    save_file({"x": normalised(x), "y": y}, tmp_path / "floats")
    for name in ("packed", "floats"):
        succeed(program, "eval", "--samples", tmp_path / name, "--batch-size", 4, "--logits", tmp_path / f"{name}.out")
    outs = [load_file(tmp_path / f"{name}.out")["logits"] for name in ("packed", "floats")]
    assert np.array_equal(*outs)
    limited = succeed(program, "eval", "--samples", tmp_path / "packed", "--batch-size", 4, "--limit", 6)
    assert limited[-1]["samples"] == 6


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (("constant",), lambda step: 0.1),
        (("linear",), lambda step: 0.1 * (1 - step / 12)),
        (("step", "--step-every", 2, "--step-gamma", 0.5), lambda step: 0.1 * 0.5 ** (step // 3 // 2)),
    ],
)
def test_schedules(program: Path, packed: Path, schedule: tuple[Any, ...], rate: Callable[[int], float]) -> None:
    arguments = ("train", "--samples", packed, "--batch-size", 8, "--lr", 0.1, "--epochs", 4, "--report-rate", 1e9)
    events = succeed(program, *arguments, "--schedule", *schedule)
    assert [e["lr"] for e in steps_of(events)] == pytest.approx([rate(step) for step in range(12)], rel=1e-6)


def test_evaluation_in_between_and_at_the_end(
    program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path
) -> None:
    test = pack(tmp_path / "test.safetensors", images[0][:7], images[1][:7])
    arguments = ("train", "--samples", packed, "--test", test, "--batch-size", 4, "--lr", 0.01, "--epochs", 5)
    events = succeed(program, *arguments, "--eval-every", 2, "--save", tmp_path / "saved")
    found = [e for e in events if e["event"] == "eval"]
    assert [e["epoch"] for e in found] == [2, 4, 5] and all(e["samples"] == 7 for e in found)
    again = succeed(program, "eval", "--samples", test, "--batch-size", 3, "--weights", tmp_path / "saved")[-1]
    assert events[-1]["test_accuracy"] == again["accuracy"] == found[-1]["accuracy"]
    assert events[-1]["test_loss"] == pytest.approx(again["loss"], rel=1e-6)
    without = succeed(program, *arguments, "--save", tmp_path / "other")
    assert without[-1]["sha256"] == events[-1]["sha256"]


def test_what_was_stopped_before_its_test_is_tested_when_it_goes_on(
    program: Path, packed: Path, tmp_path: Path
) -> None:
    arguments = ("train", "--samples", packed, "--test", packed, "--batch-size", 4, "--lr", 0.01, "--eval-every", 1)
    arguments += ("--epochs", 3, "--checkpoint", tmp_path / "run")
    events = succeed(program, *arguments, "--checkpoint-every", "6steps")
    whole, digest = [e for e in events if e["event"] == "eval"], events[-1]["sha256"]
    # What remains is the checkpoint at the end of epoch 2, as if the run had been stopped there.
    at = {metadata(f)["step"]: f for f in (tmp_path / "run").glob("*.safetensors")}
    at["18"].unlink()
    events = succeed(program, *arguments, "--resume")
    again = [e for e in events if e["event"] == "eval"]
    assert events[-1]["sha256"] == digest
    assert [(e["epoch"], e["loss"]) for e in again] == [(e["epoch"], e["loss"]) for e in whole[1:]]


def metadata(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    found: dict[str, str] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    return found


def test_the_result_names_the_hash_of_the_weights(program: Path, packed: Path, tmp_path: Path) -> None:
    import hashlib

    arguments = ("train", "--samples", packed, "--lr", 0.01, "--epochs", 1, "--batch-size", 4, "--augment", "crop-flip")
    digests = set()
    for threads in (1, 2):
        events = succeed(program, *arguments, "--threads", threads, "--save", tmp_path / "saved")
        raw = (tmp_path / "saved").read_bytes()
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        assert events[-1]["sha256"] == hashlib.sha256(data).hexdigest()
        digests.add(events[-1]["sha256"])
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("zones", "told"),
    [
        ([], None),
        ([("x86_pkg_temp", "41500"), ("acpitz", "27800")], 41.5),
        # As a Jetson: a constant, a zone that is switched off, one that is hotter than the CPU's.
        ([("PMIC-Die", "100000"), ("CV0-therm", ""), ("GPU-therm", "71000"), ("CPU-therm", "63250")], 63.25),
    ],
)
def test_steps_tell_temperature_and_memory(
    program: Path, packed: Path, tmp_path: Path, zones: list[tuple[str, str]], told: float | None
) -> None:
    for zone, (kind, text) in enumerate(zones):
        folder = tmp_path / f"sys/class/thermal/thermal_zone{zone}"
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "temp").write_text(f"{text}\n")
    arguments = ("train", "--samples", packed, "--lr", 0.1, "--epochs", 1, "--batch-size", 8)
    events = succeed(program, *arguments, "--system-root", tmp_path, "--power-every", 0.05)
    assert {power["temperature_c"] for power in events if power["event"] == "power"} == {told}
    for step in steps_of(events):
        assert step["temperature_c"] == told and 0 < step["rss_bytes"] <= events[-1]["peak_rss_bytes"]
    assert events[-1]["accuracy"] == steps_of(events)[-1]["accuracy"]


def test_small_steps_are_told_at_most_ten_times_a_second(program: Path, packed: Path) -> None:
    arguments = ("train", "--samples", packed, "--lr", 1e-6, "--epochs", 100, "--batch-size", 1)
    few = steps_of(succeed(program, *arguments, "--report-rate", 1e-9))
    assert len(few) <= 110 and sum(e["epoch"] == int(e["epoch"]) for e in few) == 100


@pytest.mark.parametrize("slowed", [False, True])
def test_running_statistics_at_the_pace_of_effective_batches(
    program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path, slowed: bool
) -> None:
    """With weights that stay, the running mean is a sum over micro-batches of 4 (5 at the epoch's end: 9 and 5 samples)."""
    weights = make_weights(3)
    save_file(weights, tmp_path / "start")
    arguments = ("train", "--samples", packed, "--weights", tmp_path / "start", "--batch-size", 4, "--seed", 5)
    arguments += ("--effective-batch", 9, "--lr", 0, "--epochs", 1, "--save", tmp_path / "end")
    succeed(program, *arguments, *(["--bn-time-constant"] if slowed else []))
    order, mean = keyed_order(5, 0, COUNT), weights["scale.mean"].astype(np.float64)
    for first, effective in ((0, 9), (9, 9), (18, 5)):
        for at in range(first, first + effective, 4):
            rows = order[at : min(at + 4, first + effective)]
            x = normalised(images[0][rows]).reshape(len(rows), -1)
            hidden = np.maximum(x @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
            pace = 1 - 0.9 ** (len(rows) / effective) if slowed else 0.1
            mean += pace * (1.25 * hidden.mean(axis=0) - mean)
    assert np.allclose(load_file(tmp_path / "end")["scale.mean"], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "optimizer"), [(1, "sgd"), (400, "adamw")])
def test_training_takes_the_memory_that_was_planned(
    program: Path, packed: Path, tmp_path: Path, batch: int, optimizer: str
) -> None:
    """With everything that takes some: reading ahead, accumulation, evaluation, checkpoints, augmentation."""
    x, y = np.zeros((900, 2, 4, 5), np.uint8), np.zeros(900, np.int32)
    big = pack(tmp_path / "big", x, y)
    arguments = (
        "train",
        "--samples",
        big,
        "--test",
        big,
        "--batch-size",
        batch,
        "--effective-batch",
        450,
        "--lr",
        0.01,
    )
    arguments += ("--epochs", 1, "--optimizer", optimizer, "--augment", "crop-flip", "--threads", 1)
    events = succeed(program, *arguments, "--checkpoint", tmp_path / "run", "--save", tmp_path / "saved")
    planned, peak = events[-1]["planned_bytes"], events[-1]["peak_rss_bytes"]
    assert peak <= 1.01 * planned and planned - peak <= max(0.03 * planned, 2 << 20)
    sizes = ("--batch-size", batch, "--effective-batch", 450, "--optimizer", optimizer, "--threads", 1)
    assert succeed(program, "info", *sizes)[0]["planned_bytes"] == planned == events[0]["planned_bytes"]


def test_label_smoothing_is_that_of_the_definition(
    program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path
) -> None:
    weights = make_weights(3)
    save_file(weights, tmp_path / "start")
    arguments = ("train", "--samples", packed, "--weights", tmp_path / "start", "--batch-size", COUNT, "--steps", 1)
    smooth = steps_of(succeed(program, *arguments, "--lr", 0.1, "--label-smoothing", 0.2))[0]["loss"]
    x, y = images
    exact = {name: values.astype(np.float64) for name, values in weights.items()}
    plain = [reference_step(exact, normalised(x), np.full(COUNT, c, np.int32))[0] for c in range(CLASSES)]
    truth = reference_step(exact, normalised(x), y)[0]
    assert smooth == pytest.approx(0.8 * truth + 0.2 * np.mean(plain), rel=1e-5)


def test_windows_of_text_follow_numpy(build: Callable[..., Path], tmp_path: Path) -> None:
    """Tokens in, one label a position: the model is a table of logits (tests/native/tables_text.c)."""
    program = build(HOST, "taste-train-text")
    draw = np.random.default_rng(6)
    x = draw.integers(0, 7, (11, 6)).astype(np.uint8)
    y = ((x * 3 + draw.integers(0, 2, x.shape)) % 7).astype(np.uint8)
    path = pack(tmp_path / "text", x, y)
    table = draw.standard_normal((7, 7)).astype(np.float32)
    save_file({"table": table}, tmp_path / "start")
    arguments = ("train", "--samples", path, "--test", path, "--weights", tmp_path / "start", "--batch-size", 3)
    arguments += ("--effective-batch", 4, "--epochs", 2, "--lr", 0.5, "--seed", 1, "--save", tmp_path / "end")
    events = succeed(program, *arguments)
    exact = table.astype(np.float64)

    def forward(rows: Array) -> tuple[float, float, Array]:
        logits = exact[x[rows]]
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        truth = np.eye(7)[y[rows]]
        return -np.log((p * truth).sum(-1)).mean(), (logits.argmax(-1) == y[rows]).mean(), (p - truth) / y[rows].size

    steps = steps_of(events)
    assert len(steps) == 6
    for number, step in enumerate(steps):
        order = keyed_order(1, number // 3, 11)
        rows = order[number % 3 * 4 : number % 3 * 4 + 4]
        loss, accuracy, slope = forward(rows)
        assert (step["loss"], step["accuracy"]) == (pytest.approx(loss, rel=1e-5), pytest.approx(accuracy))
        np.add.at(exact, x[rows], -0.5 * slope)
    assert np.allclose(load_file(tmp_path / "end")["table"], exact, rtol=1e-5, atol=1e-6)
    loss, accuracy, _ = forward(np.arange(11))
    assert events[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert events[-1]["test_accuracy"] == pytest.approx(accuracy)
    refuse(2, "the loss of text has none", program, *arguments, "--label-smoothing", 0.1)
    refuse(2, "no packed images", program, *arguments, "--augment", "flip")
    pack(path, x, np.full_like(y, 7))
    refuse(2, "has label 7", program, *arguments)
    pack(path, x, y[:, :5])
    refuse(13, "y of", program, *arguments)


def test_what_training_refuses(program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path) -> None:
    x, y = images
    base = ("train", "--samples", packed, "--batch-size", 4, "--lr", 0.1)
    cases: list[tuple[int, str, tuple[Any, ...]]] = [
        (2, "one of --epochs E and --steps K", (*base, "--epochs", 1, "--steps", 1)),
        (2, "--warmup '2'", (*base, "--epochs", 1, "--warmup", 2)),
        (2, "--schedule 'cos'", (*base, "--epochs", 1, "--schedule", "cos")),
        (2, "--optimizer ''", (*base, "--epochs", 1, "--optimizer", "")),
        (2, "--momentum 0.9 with Adam", (*base, "--epochs", 1, "--optimizer", "adam", "--momentum", 0.9)),
        (2, "--beta1 1", (*base, "--epochs", 1, "--optimizer", "adam", "--beta1", 1)),
        (2, "label smoothing 1", (*base, "--epochs", 1, "--label-smoothing", 1)),
        (2, "--resume without a folder", (*base, "--epochs", 1, "--resume")),
        (2, "--checkpoint-every '5x'", (*base, "--epochs", 1, "--checkpoint-every", "5x")),
        (12, "cannot open", (*base, "--epochs", 1, "--test", tmp_path / "none")),
        (12, "not a regular file", (*base, "--steps", 10**9, "--save", tmp_path)),
        (12, "not a regular file", (*base, "--steps", 10**9, "--save", "/dev/full")),
        (12, "cannot create", (*base, "--steps", 10**9, "--save", tmp_path / "none" / "saved")),
    ]
    for code, words, arguments in cases:
        refuse(code, words, program, *arguments)
    save_file({"x": normalised(x), "y": y}, tmp_path / "floats")
    floats = ("train", "--samples", tmp_path / "floats", "--batch-size", 4, "--lr", 0.1, "--steps", 1)
    refuse(2, "no packed images", program, *floats, "--augment", "flip")
    assert run(program, *floats)[0] == 0


def test_damaged_and_foreign_data_are_refused(
    program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path
) -> None:
    x, y = images
    other = tmp_path / "other"
    train = ("train", "--samples", other, "--batch-size", 4, "--lr", 0.1, "--steps", 1)
    whole = packed.read_bytes()
    other.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    refuse(14, "SHA-256", program, *train)
    other.write_bytes(whole[:-1])
    refuse(14, str(other), program, *train)
    for metadata in ({}, {"mean": "[0.5]", "std": "[0.5]"}, {"mean": "[0.5, 0.5]", "std": "[0, 0.5]"}, {"mean": "x"}):
        save_file({"x": x, "y": y}, other, metadata=metadata)
        refuse(14, "no mean and std for 2 channels", program, *train)
    pack(other, x[:, :1], y)
    refuse(13, "x of", program, *train)
    pack(other, x, y + CLASSES)
    refuse(2, "has label", program, *train)
    assert json.loads(json.dumps(MEAN)) == MEAN and len(STD) == 2
