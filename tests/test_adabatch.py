"""AdaBatch: the table equals the formula, the board does what the table says, and goes on inside an interval bit for bit."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from cross.errors import UsageError
from cross.load_model import load_model
from host_control.training.options import TrainOptions, resolve_options
from host_control.training.schedule import Schedule
from tests.native_builds import ARM, CLASSES, HOST, refuse, run, succeed
from tests.packed_data import keyed_order, normalised, pack
from tests.test_checkpoints import at_step, live_until, of
from tests.test_native import make_weights, reference_step
from tests.test_training_plan import flags

Array = np.ndarray[Any, Any]
COUNT = 50
ADABATCH = ("--batch-schedule", "adabatch")


def options(*words: object, samples: int = COUNT, batch_size: int = 4) -> TrainOptions:
    args = flags(*ADABATCH, *map(str, words), "--batch-size", str(batch_size))
    return resolve_options(args, load_model("mlp", input_shape=(1, 8, 8), classes=3), samples, batch_size)


def table(words: dict[str, Any], samples: int, batch_size: int, steps: int) -> list[tuple[int, int, int, float]]:
    """(effective batch, batch size, updates, lr) of every epoch, as the paper's loop has them; `steps` 0: by epochs."""
    r, lr, rows, done = words["start"], words["lr"], [], 0
    for epoch in range(10**6):
        updates = math.ceil(samples / r)
        left = steps - done if steps else math.ceil((words["epochs"] - epoch) * updates - 1e-9)
        if left <= 0:
            return rows
        rows.append((r, min(r, batch_size), min(updates, left), lr))
        done += rows[-1][2]
        if (epoch + 1) % words["interval"] == 0:
            grown = min(math.floor(words["factor"] * r), words["cap"], samples)
            lr *= words["decay"] * grown / r
            r = grown
    raise AssertionError


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """Flags, training samples and batch size."""
    samples = draw(st.integers(4, 5000))
    cap = draw(st.integers(2, min(samples, 700)))
    start = draw(st.integers(2, cap))
    words = {
        "start": start,
        "cap": cap,
        "factor": draw(st.one_of(st.integers(2, 5), st.floats(1.5, 9))),
        "interval": draw(st.integers(1, 9)),
        "decay": draw(st.floats(0.05, 1)),
        "lr": draw(st.floats(1e-3, 1)),
        "epochs": draw(st.one_of(st.integers(1, 60), st.floats(0.1, 30))),
    }
    return words, samples, draw(st.integers(1, cap))


def plan_flags(words: dict[str, Any]) -> list[object]:
    names = {"start": "effective-batch-start", "cap": "effective-batch-cap", "factor": "batch-factor"}
    names |= {"decay": "lr-decay"}
    return [word for name, value in words.items() for word in (f"--{names.get(name, name)}", value)]


@settings(max_examples=300, deadline=None)
@given(plan=plans(), steps=st.one_of(st.just(0), st.integers(1, 3000)))
def test_the_table_equals_the_formula(plan: tuple[dict[str, Any], int, int], steps: int) -> None:
    words, samples, batch_size = plan
    given_words = plan_flags(words) if not steps else plan_flags(words | {"steps": steps, "epochs": None})
    cut = given_words.index("--epochs") if steps else len(given_words)
    made = options(*given_words[:cut], *given_words[cut + 2 :], samples=samples, batch_size=batch_size)
    schedule = Schedule(made, samples)
    expected = table(words, samples, batch_size, steps)
    rows = schedule.rows()
    assert [row["epoch"] for row in rows] == list(range(len(expected)))
    assert [(row["effective_batch"], row["batch_size"], row["updates"]) for row in rows] == [e[:3] for e in expected]
    assert [row["lr"] for row in rows] == pytest.approx([e[3] for e in expected], rel=1e-6)
    assert schedule.updates == sum(e[2] for e in expected)
    assert len(rows) - 1 < schedule.epochs <= len(rows)
    intervals = schedule.interval_rows()
    assert sum(row["updates"] for row in intervals) == schedule.updates and intervals[-1]["last"] == len(rows) - 1
    for row in rows[:4]:
        assert sum(schedule.micro_batches(row["effective_batch"])) == row["effective_batch"]


def test_defaults_are_the_papers() -> None:
    made = options("--epochs", 100, samples=50000, batch_size=64)
    assert made.adabatch is not None and made.warmup == 0 and made.schedule == "adabatch"
    rows = Schedule(made, 50000).rows()
    assert [rows[e]["effective_batch"] for e in (0, 19, 20, 40, 60, 80, 99)] == [16, 16, 32, 64, 128, 256, 256]
    assert [row["lr"] / rows[0]["lr"] for row in (rows[20], rows[40])] == pytest.approx([0.75, 0.5625])
    assert [rows[e]["batch_size"] for e in (0, 40, 60)] == [16, 64, 64]
    small = options(samples=40).adabatch
    assert small is not None and (small.start, small.cap) == (16, 40)


def test_the_warm_up_is_on_top() -> None:
    made = options(*ADABATCH, "--interval", 1, "--epochs", 2, "--lr", 0.8, "--warmup", 0.75, "--lr-decay", 0.5)
    schedule = Schedule(made, COUNT)
    assert (schedule.updates, schedule.warmup_updates) == (4 + 2, 5)
    # 16 grows to 32 after four updates: the rate stays 0.8 x 0.5 x 2.
    assert [schedule.rate(step) for step in range(6)] == pytest.approx([0.16, 0.32, 0.48, 0.64, 0.8, 0.8])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--effective-batch-start", 20, "--effective-batch-cap", 10), "start 20 is above --effective-batch-cap 10"),
        (("--effective-batch-cap", 51), "--effective-batch-cap 51 is more than the 50 training samples"),
        (("--effective-batch-start", 51), "--effective-batch-start 51 is more than the 50"),
        (("--effective-batch-start", 4, "--batch-factor", 1.2), "times --batch-factor 1.2 is 4 again"),
        (("--schedule", "cosine"), "--schedule cosine with --batch-schedule adabatch"),
        (("--effective-batch", 8), "Use --effective-batch-start"),
        (("--steps", 5), "needs --interval"),
        (("--effective-batch-cap", 3, "--effective-batch-start", 2), "--batch-size 4 is above --effective-batch-cap 3"),
        (("--batch-schedule", "fixed", "--interval", 5), "--interval is of --batch-schedule adabatch"),
    ],
)
def test_flags_that_do_not_fit_together(words: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(*words)


@pytest.mark.parametrize(
    "words", [("--batch-factor", 1), ("--batch-factor", "nan"), ("--interval", 0), ("--lr-decay", 0), ("--lr-decay", 2)]
)
def test_values_that_are_none(words: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert words[0] in capsys.readouterr().err


# On the board.


@pytest.fixture(scope="session")
def program(build: Callable[..., Path]) -> Path:
    return build(HOST, "taste-train")


@pytest.fixture(scope="session")
def images() -> tuple[Array, Array]:
    draw = np.random.default_rng(2)
    x = draw.integers(0, 256, (COUNT, 2, 4, 5)).astype(np.uint8)
    return x, draw.integers(0, CLASSES, COUNT).astype(np.int32)


@pytest.fixture(scope="session")
def packed(images: tuple[Array, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("packed") / "train.safetensors", *images)


GROWING = ("--effective-batch-start", 6, "--batch-factor", 2.5, "--effective-batch-cap", 41, "--lr", 0.02)
GROWING += ("--lr-decay", 0.5, "--interval", 2, "--weight-decay", 0, "--grad-clip", 0, "--momentum", 0)


@pytest.mark.parametrize("length", [("--epochs", 9), ("--epochs", 3.3), ("--epochs", 0.5), ("--steps", 40)])
@pytest.mark.parametrize("batch_size", [4, 41])
def test_the_board_does_what_the_table_says(
    program: Path, packed: Path, length: tuple[object, ...], batch_size: int
) -> None:
    made = options(*GROWING, *length, "--warmup", 0.3, batch_size=batch_size)
    schedule = Schedule(made, COUNT)
    events = succeed(program, "train", "--samples", packed, *made.arguments(), "--report-rate", 1e9)
    steps = of(events, "step")
    sizes = []
    for row in schedule.rows():
        whole, rest = divmod(COUNT, row["effective_batch"])
        sizes += ([row["effective_batch"]] * whole + [rest] * (rest > 0))[: row["updates"]]
    assert [e["effective_batch"] for e in steps] == sizes and len(steps) == schedule.updates
    assert [e["lr"] for e in steps] == pytest.approx([schedule.rate(i) for i in range(len(steps))], rel=1e-6)
    assert events[-1]["steps"] == schedule.updates
    assert schedule.epochs - 0.5 < events[-1]["epochs"] <= math.ceil(schedule.epochs)


def test_a_growing_batch_follows_numpy(
    program: Path, images: tuple[Array, Array], packed: Path, tmp_path: Path
) -> None:
    """Exact accumulation in micro-batches of 5, ragged tails, and running statistics at the pace of the grown batch."""
    x, y = images
    weights = make_weights(3)
    save_file(weights, tmp_path / "start")
    exact = {name: values.astype(np.float64) for name, values in weights.items() if name != "scale.mean"}
    mean = weights["scale.mean"].astype(np.float64)
    made = options(*GROWING, "--epochs", 6, "--bn-time-constant", "--warmup", 0, batch_size=5)
    words = ("--samples", packed, "--weights", tmp_path / "start", "--save", tmp_path / "end", *made.arguments())
    events = succeed(program, "train", *words, "--report-rate", 1e9)
    losses = []
    for epoch, size in enumerate([6, 6, 15, 15, 37, 37]):
        order = keyed_order(0, epoch, COUNT)
        for first in range(0, COUNT, size):
            rows = order[first : first + size]
            for at in range(0, len(rows), 5):
                part = normalised(x[rows[at : at + 5]]).reshape(-1, 40).astype(np.float64)
                hidden = np.maximum(part @ exact["hidden.weight"].T + exact["hidden.bias"], 0)
                mean += (1 - 0.9 ** (len(part) / len(rows))) * (1.25 * hidden.mean(axis=0) - mean)
            loss, gradients = reference_step(exact, normalised(x[rows]), y[rows])
            for name in exact:
                exact[name] -= 0.02 * 0.5 ** (epoch // 2) * size / 6 * gradients[name]
            losses.append(loss)
    assert [e["loss"] for e in of(events, "step")] == pytest.approx(losses, rel=1e-4)
    saved = load_file(tmp_path / "end")
    for name in exact:
        assert np.linalg.norm(saved[name] - exact[name]) <= 1e-4 * np.linalg.norm(exact[name])
    assert np.allclose(saved["scale.mean"], mean, rtol=1e-3, atol=1e-4)


def resumed(program: Path, packed: Path, folder: Path, points: list[int], emulator: tuple[str, ...] = ()) -> None:
    """Killed, and asked to stop, in the middle of intervals and at their ends: the hash is the straight run's."""
    made = options(*GROWING, "--epochs", 7, "--momentum", 0.9, "--augment", "crop-flip")
    words = ("train", "--samples", packed, *made.arguments(), "--threads", 1)
    straight = succeed(program, *words, emulator=emulator)[-1]
    assert straight["steps"] == 2 * 9 + 2 * 4 + 2 * 2 + 2
    for number, point in enumerate(points):
        command = [*emulator, str(program), *map(str, words), "--checkpoint", str(folder / str(point)), "--resume"]
        how = signal.SIGKILL if number % 2 else signal.SIGTERM
        stopped = live_until([*command, "--checkpoint-every", "1steps"], at_step(point), how)
        assert point <= of(stopped, "checkpoint")[-1]["step"] < straight["steps"]
        rest = succeed(program, *command[len(emulator) + 1 :], emulator=emulator)
        assert of(rest, "resume")[0]["step"] >= point and rest[-1]["sha256"] == straight["sha256"]


def test_goes_on_inside_an_interval(program: Path, packed: Path, tmp_path: Path) -> None:
    resumed(program, packed, tmp_path, [5, 18, 21, 27])


@pytest.mark.faults
@pytest.mark.needs("qemu")
def test_goes_on_inside_an_interval_under_qemu(build: Callable[..., Path], packed: Path, tmp_path: Path) -> None:
    resumed(build(ARM, "taste-train"), packed, tmp_path, [7, 20], ARM.emulator)


def test_another_schedule_and_bad_values_are_refused(program: Path, packed: Path, tmp_path: Path) -> None:
    base = ("train", "--samples", packed, "--batch-size", 4, "--lr", 0.01, "--epochs", 4, "--effective-batch", 6)
    grow = {"--interval": 1, "--batch-factor": 2, "--effective-batch-cap": 20, "--lr-decay": 0.5}

    def words(**other: object) -> list[object]:
        changed = grow | {f"--{name.replace('_', '-')}": value for name, value in other.items()}
        return [*base, *(word for pair in changed.items() for word in pair)]

    refuse(2, "needs all of", program, *base, "--interval", 1)
    refuse(2, "needs all of", program, *base, "--lr-decay", 0.5)
    refuse(2, "Leave one of them out", program, *words(), "--schedule", "cosine")
    refuse(2, "effective batch 6 with a cap of 5", program, *words(effective_batch_cap=5))
    refuse(2, "above the 50 samples", program, *words(effective_batch_cap=51))
    refuse(2, "does not grow by 1", program, *words(batch_factor=1))
    refuse(2, "--interval '0'", program, *words(interval=0))
    refuse(2, "decay 1.5", program, *words(lr_decay=1.5))
    folder = ("--checkpoint", tmp_path / "run")
    assert run(program, *words(), *folder, "--steps", 9)[0] == 2, "--epochs and --steps"
    succeed(program, *words(), *folder)
    for name, value in (("interval", 2), ("batch_factor", 3), ("effective_batch_cap", 19), ("lr_decay", 0.25)):
        # Other epochs and updates are refused too, but this is what is said first or second.
        code, _, err = run(program, *words(**{name: value}), *folder, "--resume")
        assert code == 13 and err.startswith("error: ") and err.count("\n") == 1
