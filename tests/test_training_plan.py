"""Defaults, batches and learning rates of a run before it begins, and the record of one that is interrupted."""

from __future__ import annotations

import csv
import json
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cross.errors import UsageError
from cross.load_model import load_model
from host_control.preparation import Built
from host_control.training.batch_size import find_study
from host_control.training.metrics import Metrics, read_records
from host_control.training.options import TrainOptions, add_training_flags, resolve_options
from host_control.training.recipe import default_effective_batch
from host_control.training.schedule import Schedule


def flags(*words: str, model: str = "mlp", weights: Path | None = None) -> Namespace:
    parser = ArgumentParser()
    add_training_flags(parser)
    fixed = {
        "model": model,
        "weights": weights,
        "init": "file",
        "seed": 0,
        "threads": None,
        "cores": None,
        "memory": None,
    }
    return Namespace(**{**vars(parser.parse_args(words)), **fixed})


def options(*words: str, samples: int = 1000, batch_size: int = 10, model: str = "mlp", **more: Any) -> TrainOptions:
    args = flags(*words, "--batch-size", str(batch_size), model=model, **more)
    return resolve_options(args, load_model(model, input_shape=(1, 8, 8), classes=3), samples, batch_size)


@given(samples=st.integers(1, 5000), effective=st.integers(1, 300), batch=st.integers(1, 64), minimum=st.integers(1, 2))
def test_micro_batches_hold_every_sample_once(samples: int, effective: int, batch: int, minimum: int) -> None:
    effective = min(effective, samples)
    made = options("--effective-batch", str(max(effective, batch)), samples=5000, batch_size=batch)
    plan = Schedule(made, samples, minimum)
    rows = plan.micro_batches(effective)
    assert sum(rows) == effective and max(rows) <= batch
    if batch > minimum and effective >= minimum:
        assert min(rows) >= minimum
    if minimum == 1:
        assert rows == [batch] * (effective // batch) + [effective % batch] * (effective % batch > 0)


def test_the_ragged_tail_of_the_paper() -> None:
    plan = Schedule(options("--effective-batch", "128", samples=1000), 1000)
    assert plan.micro_batches(128) == [10] * 12 + [8]
    assert plan.updates_per_epoch == 8 and plan.micro_batches(1000 % 128) == [10] * 10 + [4]
    assert "12 x 10 + 8 micro-batches; the last one of an epoch 104 = 10 x 10 + 4" in plan.sentences()[1]


def test_learning_rates_of_every_schedule() -> None:
    common = ("--effective-batch", "100", "--epochs", "4", "--lr", "0.8", "--batch-size", "10", "--warmup", "0.2")

    def rates(*words: str) -> list[float]:
        plan = Schedule(resolve_options(flags(*common, *words), load_model("mlp"), 1000, 10), 1000)
        assert plan.updates == 40 and plan.warmup_updates == 8
        return [plan.rate(step) for step in range(40)]

    rising = [0.1 * k for k in range(1, 9)]
    assert rates("--schedule", "constant") == pytest.approx(rising + [0.8] * 32)
    assert rates("--schedule", "linear")[8:] == pytest.approx([0.8 * (1 - k / 32) for k in range(32)])
    cosine = rates()
    assert cosine[:8] == pytest.approx(rising) and cosine[8] == 0.8
    assert cosine[24] == pytest.approx(0.4) and cosine[39] == pytest.approx(0.4 * (1 + math.cos(math.pi * 31 / 32)))
    stepped = rates("--schedule", "step", "--step-every", "2", "--step-gamma", "0.5")
    assert stepped[8:] == pytest.approx([0.8] * 12 + [0.4] * 20)


def test_rows_of_a_dry_run_and_fractions_of_an_epoch() -> None:
    plan = Schedule(options("--effective-batch", "100", "--epochs", "2.5", "--warmup", "0"), 1000)
    rows = plan.rows()
    assert [(row["epoch"], row["updates"]) for row in rows] == [(0, 10), (1, 10), (2, 5)]
    assert rows[0] == {"epoch": 0, "effective_batch": 100, "batch_size": 10, "updates": 10, "lr": plan.options.lr}
    assert Schedule(options("--steps", "7"), 1000).updates == 7


def test_defaults_follow_model_weights_and_size_of_the_data(tmp_path: Path) -> None:
    fresh, plain = options(samples=60000, model="resnet8"), options(samples=60000, model="mlp")
    assert (fresh.effective_batch, fresh.lr, fresh.grad_clip, fresh.optimizer) == (128, 0.1, 0.0, "sgd")
    assert (plain.lr, plain.grad_clip, plain.weight_decay, plain.momentum) == (0.01, 1.0, 5e-4, 0.9)
    trained = options(samples=60000, model="resnet8", weights=tmp_path)
    assert (trained.lr, trained.grad_clip, trained.warmup, trained.schedule) == (0.05, 1.0, 0.1, "cosine")
    small = options(samples=512, batch_size=4, model="resnet8", weights=tmp_path)
    assert (small.effective_batch, small.lr) == (32, 0.025)
    assert [default_effective_batch(n) for n in (1, 5, 100, 1000, 2048, 10**6)] == [1, 5, 8, 32, 128, 128]
    assert options("--optimizer", "adamw").lr == 1e-3
    assert (options(samples=60000).epochs, small.epochs, options(samples=40, batch_size=4).epochs) == (10, 25, 40)


def test_flags_that_contradict_are_refused() -> None:
    for words, message in (
        (("--effective-batch", "4"), "smaller than --batch-size 10"),
        (("--effective-batch", "2000"), "more than the 1000 training samples"),
        (("--nesterov", "--momentum", "0"), "--nesterov is a form of sgd's momentum"),
    ):
        with pytest.raises(UsageError, match=message):
            options(*words)


def test_arguments_of_the_board_say_every_value() -> None:
    words = options("--nesterov", "--grad-clip", "0", "--lr", "0.1", "--epochs", "3").arguments()
    assert "--nesterov" in words and "--grad-clip" not in words and "--steps" not in words and "--beta1" not in words
    pairs = dict(zip(words, words[1:], strict=False))
    assert (pairs["--lr"], pairs["--epochs"], pairs["--schedule"], pairs["--batch-size"]) == (
        "0.1",
        "3.0",
        "cosine",
        "10",
    )
    adam = options("--optimizer", "adam", "--steps", "5").arguments()
    assert "--epochs" not in adam and "--momentum" not in adam and adam[adam.index("--beta2") + 1] == "0.999"


def test_a_run_that_goes_on_has_one_record_of_each_step(tmp_path: Path) -> None:
    def step(number: int, loss: float) -> dict[str, Any]:
        return {"event": "step", "step": number, "epoch": number / 4, "loss": loss, "lr": 0.1}

    first = Metrics(tmp_path)
    for number in range(1, 8):
        first.add(step(number, 1.0))
        if number % 4 == 0:
            first.add({"event": "eval", "epoch": number / 4, "loss": 0.5, "accuracy": 0.5, "samples": 9})
    first.add({"event": "plan", "planned_bytes": 1})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    again = Metrics(tmp_path)
    again.add({"event": "resume", "step": 3, "epoch": 0.75})
    for number in range(4, 9):
        again.add(step(number, float("nan")))
    again.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["event"] == "step"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r["loss"] for r in records if r["event"] == "step"] == [1.0] * 3 + [None] * 5
    assert not [r for r in records if r["event"] == "eval"]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == [str(n) for n in range(1, 9)] and rows[3]["loss"] == ""


def write_study(
    folder: Path, *, bs_opt: int = 12, complete: bool = True, threads: int | None = None, **more: Any
) -> None:
    folder.mkdir(parents=True)
    build = {"model": "m", "target": "t", "version": "1", "build_id": "b"} | more
    (folder / "study.json").write_text(json.dumps({"complete": complete, "threads": threads, "cores": None}))
    (folder / "result.json").write_text(json.dumps({"verb": "tune", "program": "train", "bs_opt": bs_opt}))
    (folder / "environment.json").write_text(json.dumps({"board_name": "pi", "build": build}))


def test_the_study_of_this_very_build_is_found(tmp_path: Path) -> None:
    built = Built(tmp_path, {"model": "m", "target": "t", "version": "1", "build_id": "b"})
    args = flags()
    assert find_study(built, "pi", args, tmp_path) is None
    write_study(tmp_path / "other-build", build_id="c")
    write_study(tmp_path / "incomplete", complete=False)
    write_study(tmp_path / "threads", threads=1)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "study.json").write_text("{")
    assert find_study(built, "pi", args, tmp_path) is None
    write_study(tmp_path / "right", bs_opt=6)
    assert find_study(built, "another", args, tmp_path) is None
    found = find_study(built, "pi", args, tmp_path)
    assert found is not None and (found.batch_size, found.source) == (6, str(tmp_path / "right"))
