"""taste-train learn against an oracle in numpy: streams, replay, masks, rates, accuracy matrix; resume; what it refuses."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.native_builds import ADDRESS, ARM, CLASSES, HOST, RISCV, Toolchain, refuse, run, succeed
from tests.packed_data import keyed_order, normalised, pack
from tests.replay_buffer import ReplayBuffer
from tests.test_checkpoints import live_until
from tests.test_native import make_weights, reference_step

Array = np.ndarray[Any, Any]
Build = Callable[..., Path]
COUNT, TESTED = 57, 30


@pytest.fixture(scope="session")
def program(build: Build) -> Path:
    return build(HOST, "taste-train")


@dataclass(frozen=True)
class Data:
    x: Array
    y: Array
    test_x: Array
    test_y: Array
    folder: Path

    @property
    def flags(self) -> tuple[object, ...]:
        return ("--samples", self.folder / "train", "--test", self.folder / "test")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Classes that can be told apart: each has a pattern of its own, with noise."""
    folder, draw = tmp_path_factory.mktemp("learn"), np.random.default_rng(3)
    patterns = draw.integers(0, 200, (CLASSES, 2, 4, 5))

    def split(count: int) -> tuple[Array, Array]:
        y = np.concatenate([np.arange(CLASSES), draw.integers(0, CLASSES, count - CLASSES)]).astype(np.int32)
        return (patterns[y] + draw.integers(0, 56, (count, 2, 4, 5))).astype(np.uint8), y

    (x, y), (test_x, test_y) = split(COUNT), split(TESTED)
    pack(folder / "train", x, y)
    pack(folder / "test", test_x, test_y)
    save_file(make_weights(3), folder / "weights")
    return Data(x, y, test_x, test_y, folder)


def tasks_of(tasks: int, order_seed: int) -> Array:
    """The task of each class."""
    found = np.zeros(CLASSES, int)
    for position, c in enumerate(keyed_order(order_seed, 0, CLASSES)):
        found[c] = position * tasks // CLASSES
    return found


def masked_step(weights: dict[str, Any], x: Array, y: Array, groups: Array | None) -> tuple[float, dict[str, Any]]:
    """reference_step where the loss sees only the classes of the label's group."""
    if groups is None:
        return reference_step(weights, x, y)
    total, loss = {name: np.zeros_like(values) for name, values in weights.items()}, 0.0
    for group in np.unique(groups[y]):
        rows, inside = groups[y] == group, np.flatnonzero(groups == group)
        # A model of these classes only, on these rows only.
        part = {**weights, "head.weight": weights["head.weight"].copy(), "head.bias": weights["head.bias"].copy()}
        part["head.bias"][np.setdiff1d(np.arange(CLASSES), inside)] = -1e9
        its_loss, gradients = reference_step(part, x[rows], y[rows])
        share = rows.sum() / len(y)
        loss += its_loss * share
        for name in total:
            total[name] += gradients[name] * share
    return loss, total


def predicted(weights: dict[str, Any], x: Array, groups: Array | None, y: Array) -> Array:
    hidden = np.maximum(normalised(x).reshape(len(x), -1) @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    logits = 1.25 * hidden @ weights["head.weight"].T + weights["head.bias"]
    if groups is not None:
        logits = np.where(groups[None, :] == groups[y][:, None], logits, -np.inf)
    return np.asarray(logits.argmax(axis=1))


@dataclass(frozen=True)
class Setting:
    flags: tuple[object, ...] = ()
    scenario: str = "cil"
    policy: str = "reservoir"
    batch: int = 6
    replay: int = 3
    buffer: int = 12
    passes: int = 1
    per_class: int = COUNT
    seen_only: bool = False
    rate: float = 0.01


SETTINGS = {
    "cil": Setting(),
    "til": Setting(("--scenario", "til"), scenario="til"),
    "seen": Setting(("--loss-classes", "seen", "--memory-policy", "ring"), policy="ring", seen_only=True),
    "none": Setting(("--buffer", 0), replay=0, buffer=0),
    "balanced": Setting(
        ("--memory-policy", "class-balanced", "--replay-ratio", 0.7, "--passes", 2, "--samples-per-class", 8),
        policy="class-balanced", replay=4, passes=2, per_class=8,
    ),
}  # fmt: skip


def follow(
    data: Data, s: Setting, tasks: int, seed: int, order_seed: int
) -> tuple[list[float], list[list[float]], Any]:
    """Losses of all updates, the accuracy matrix, the weights at the end."""
    exact = {n: v.astype(np.float64) for n, v in load_file(data.folder / "weights").items() if n != "scale.mean"}
    of = tasks_of(tasks, order_seed)
    kept = np.concatenate([np.flatnonzero(data.y == c)[: s.per_class] for c in range(CLASSES)])
    buffer = ReplayBuffer(s.policy, s.buffer, CLASSES, seed)
    losses, matrix = [], []
    for task in range(tasks):
        groups = of if s.scenario == "til" else (of > task).astype(int) if s.seen_only else None
        rows = np.sort(kept[of[data.y[kept]] == task])
        rows = rows[keyed_order(seed, task, len(rows))]
        for first in range(0, len(rows), s.batch - s.replay):
            chunk = rows[first : first + s.batch - s.replay]
            for _ in range(s.passes):
                replayed = [buffer.samples[slot] for slot in buffer.draw(s.replay)]
                batch = np.concatenate([chunk, np.array(replayed, int)])
                loss, gradients = masked_step(exact, normalised(data.x[batch]), data.y[batch], groups)
                for name in exact:
                    exact[name] -= s.rate * gradients[name]
                losses.append(loss)
            for row in chunk if s.buffer else ():
                buffer.add(int(row), int(data.y[row]))
        matrix.append([])
        for k in range(task + 1):
            tested = of[data.test_y] == k
            right = predicted(exact, data.test_x[tested], groups, data.test_y[tested]) == data.test_y[tested]
            matrix[-1].append(float(right.mean()))
    return losses, matrix, exact


def learn(data: Data, *more: object) -> list[object]:
    base = ("learn", *data.flags, "--weights", data.folder / "weights", "--batch-size", 6, "--buffer", 12, "--tasks", 3)
    rest = ("--seed", 4, "--order-seed", 2, "--lr", 0.01, "--lr-rule", "constant", "--threads", 1, "--report-rate", 1e9)
    return [*base, *rest, *more]


def of(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_follows_numpy(program: Path, data: Data, tmp_path: Path, name: str) -> None:
    setting = SETTINGS[name]
    losses, matrix, exact = follow(data, setting, 3, 4, 2)
    events = succeed(program, *learn(data, *setting.flags, "--save", tmp_path / "end"))
    assert [e["loss"] for e in of(events, "step")] == pytest.approx(losses, rel=1e-4)
    saved = load_file(tmp_path / "end")
    for tensor in exact:
        assert np.linalg.norm(saved[tensor] - exact[tensor]) <= 1e-5 * np.linalg.norm(exact[tensor])
    result = events[-1]
    assert [e["accuracy"] for e in of(events, "eval")] == [pytest.approx(row) for row in matrix]
    assert result["accuracy_matrix"] == [pytest.approx(row) for row in matrix]
    assert result["updates"] == len(losses) and result["diverged"] is False
    assert result["replay"] is (setting.replay > 0)
    final = matrix[-1]
    best = [max(matrix[t][k] for t in range(k, 3)) for k in range(3)]
    assert result["final_average_accuracy"] == pytest.approx(np.mean(final))
    assert result["forgetting"] == pytest.approx(np.mean(np.subtract(best, final)), abs=1e-9)
    moved = [final[k] - matrix[k][k] for k in range(2)]
    assert result["backward_transfer"] == pytest.approx(np.mean(moved), abs=1e-9)
    assert [sorted(e["classes"]) for e in of(events, "task")] == [
        sorted(np.flatnonzero(tasks_of(3, 2) == task).tolist()) for task in range(3)
    ]


@pytest.mark.parametrize(
    ("batch", "flags", "rate"),
    [
        (2, (), 0.01), (20, (), 0.1), (40, (), 0.2), (100, (), 0.4), (100, ("--lr-cap", 9), 0.5),
        (4, ("--lr-rule", "constant"), 0.1),
    ],
)  # fmt: skip
def test_the_rate_and_the_number_of_updates(
    program: Path, data: Data, batch: int, flags: tuple[object, ...], rate: float
) -> None:
    base = ("learn", *data.flags, "--tasks", 5, "--buffer", 10, "--lr", 0.1, "--seed", 1)
    events = succeed(program, *base, "--batch-size", batch, *flags)
    result = events[-1]
    sizes = [e["samples"] for e in of(events, "task")]
    assert sum(sizes) == COUNT and result["lr"] == pytest.approx(rate)
    assert result["updates"] == sum(-(-size // (batch // 2)) for size in sizes)


def test_domains_and_a_list_of_tasks(program: Path, data: Data, tmp_path: Path) -> None:
    """By a tensor `domain`: tasks hold all classes. By a list: the classes that it says."""
    folder, draw = tmp_path, np.random.default_rng(1)
    files = {}
    for name, x, y in (("train", data.x, data.y), ("test", data.test_x, data.test_y)):
        domain = np.concatenate([np.arange(4), draw.integers(0, 4, len(y) - 4)]).astype(np.int32)
        files[name] = pack(folder / name, x, y, domain=domain)
    flags = ("learn", "--samples", files["train"], "--test", files["test"], "--batch-size", 4, "--lr", 0.05)
    events = succeed(program, *flags, "--scenario", "domain", "--tasks", 4, "--buffer", 9)
    assert sorted(sum((e["domains"] for e in of(events, "task")), [])) == [0, 1, 2, 3]
    events = succeed(program, *flags, "--task-of", "1,1,0,0,2", "--buffer", 9)
    assert [e["classes"] for e in of(events, "task")] == [[2, 3], [0, 1], [4]]


def test_replay_forgets_less(program: Path, data: Data) -> None:
    finals = {}
    for buffer in (0, 30):
        flags = ("learn", *data.flags, "--batch-size", 4, "--tasks", 5, "--lr", 0.1, "--buffer", buffer)
        results = [succeed(program, *flags, "--seed", seed, "--order-seed", seed)[-1] for seed in range(3)]
        finals[buffer] = np.mean([r["final_average_accuracy"] for r in results])
    assert finals[30] - finals[0] >= 0.3


def test_a_diverged_run_is_a_result(program: Path, data: Data) -> None:
    code, events, stderr = run(program, *learn(data, "--lr", 1e30))
    assert code == 0 and "diverged" in stderr
    assert events[-1]["diverged"] is True and events[-1]["final_average_accuracy"] is None


# Going on after an end


def resume_points(
    program: Path, data: Data, tmp_path: Path, points: Sequence[int], emulator: tuple[str, ...] = ()
) -> None:
    flags = ("--momentum", 0.9, "--augment", "crop-flip", "--memory-policy", "class-balanced")
    straight = succeed(program, *learn(data, *flags), emulator=emulator)[-1]
    for number, point in enumerate(points):
        folder = tmp_path / f"run{number}"
        command = [str(a) for a in learn(data, *flags, "--checkpoint", folder, "--resume")]
        how = signal.SIGKILL if number % 2 else signal.SIGTERM
        every = ("--checkpoint-every", "1steps")
        first = live_until(
            [*emulator, str(program), *command, *every],
            lambda events, point=point: any(e["event"] == "checkpoint" and e["step"] >= point for e in events[-1:]),  # type: ignore[misc]
            how,
        )
        stopped = of(first, "checkpoint")[-1]["step"]
        assert stopped >= point
        rest = succeed(program, *command, emulator=emulator)
        assert of(rest, "resume")[0]["step"] >= stopped
        for key in ("sha256", "updates", "accuracy_matrix", "buffer_samples", "samples"):
            assert rest[-1][key] == straight[key], key


def test_a_resumed_stream_has_the_bits_of_a_straight_one(program: Path, data: Data, tmp_path: Path) -> None:
    resume_points(program, data, tmp_path, [1, 6, 7, 13])


@pytest.mark.faults
def test_streams_resumed_at_many_points(program: Path, data: Data, tmp_path: Path) -> None:
    resume_points(program, data, tmp_path, random.Random(1).choices(range(1, 19), k=16))


@pytest.mark.needs("qemu")
@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=lambda t: t.name)
def test_learning_under_qemu(build: Build, program: Path, toolchain: Toolchain, data: Data, tmp_path: Path) -> None:
    """The same streams, draws and buffer: losses agree in the order of the rows, and resuming gives the same bits."""
    emulated = build(toolchain, "taste-train")
    here, there = succeed(program, *learn(data)), succeed(emulated, *learn(data), emulator=toolchain.emulator)
    losses = [[e["loss"] for e in of(events, "step")] for events in (here, there)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    resume_points(emulated, data, tmp_path, [4, 9], toolchain.emulator)


@pytest.mark.needs("clang")
def test_learning_under_sanitizers(build: Build, data: Data, tmp_path: Path) -> None:
    sanitized = build(ADDRESS, "taste-train")
    for policy in ("class-balanced", "ring"):
        flags = ("--memory-policy", policy, "--scenario", "til", "--checkpoint", tmp_path / policy)
        succeed(sanitized, *learn(data, *flags, "--checkpoint-every", "1steps"))
        succeed(sanitized, *learn(data, *flags, "--resume"))


def test_a_checkpoint_of_other_options_is_refused(program: Path, data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    succeed(program, *learn(data, "--checkpoint", folder))
    for flags, words in (
        (("--buffer", 13), "buffer"), (("--order-seed", 9), "order_seed"), (("--passes", 2), "passes"),
        (("--scenario", "til"), "scenario"), (("--memory-policy", "ring"), "memory_policy"),
    ):  # fmt: skip
        refuse(13, words, program, *learn(data, "--checkpoint", folder, "--resume", *flags))
    refuse(2, "Give --resume", program, *learn(data, "--checkpoint", folder))


def test_what_is_refused(program: Path, data: Data, tmp_path: Path) -> None:
    refuse(2, "Use --buffer 5 or more", program, *learn(data, "--buffer", 4))
    refuse(23, "is in no task", program, *learn(data, "--task-of", "0,0,1,1"))
    refuse(23, "has no samples", program, *learn(data, "--tasks", 6))
    refuse(23, "has no samples", program, *learn(data, "--task-of", "0,0,1,1,3"))
    refuse(23, "no tensor 'domain'", program, *learn(data, "--scenario", "domain"))
    refuse(2, "below 1", program, *learn(data, "--replay-ratio", 1))
    refuse(2, "is no list of tasks", program, *learn(data, "--task-of", "0,,1"))
    refuse(2, "Give --test", program, "learn", "--samples", data.folder / "train", "--lr", 1, "--batch-size", 4)
    pack(tmp_path / "more", data.x, data.y + 1)
    refuse(2, "--max-classes 6", program, *learn(data, "--samples", tmp_path / "more"))
    save_file({"x": normalised(data.x), "y": data.y}, tmp_path / "floats")
    refuse(2, "packed images", program, *learn(data, "--samples", tmp_path / "floats"))
    refuse(10, "Largest that fits", program, *learn(data, "--batch-size", 100000, "--memory", 10**8))
