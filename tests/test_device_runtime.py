"""Python on the board: libtaste.so through cffi gives taste-train's numbers, tensors by name, errors as exceptions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from device_runtime import BACKWARD, FORWARD, LOSS, DeviceError, Learner, Library, ReplayBuffer, Trainer, load_library
from tests.native_builds import CLASSES, HIDDEN, HOST, INPUTS, LIBRARY, MODEL, NATIVE, PROGRAM, ROOT, compile_c, zig
from tests.packed_data import MEAN, STD, keyed_order, pack

Array = np.ndarray[Any, Any]
ROWS = 8
SHARED = ("-shared", "-fvisibility=hidden", f"-Wl,--version-script={NATIVE / 'libtaste.map'}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toolchain = zig("x86_64-linux-gnu.2.17", *SHARED)
    return compile_c(toolchain, LIBRARY + MODEL, tmp_path_factory.mktemp("device") / "libtaste.so")


@pytest.fixture(scope="module")
def library(shared: Path) -> Library:
    return load_library(shared)


@pytest.fixture
def batch() -> tuple[Array, Array]:
    random = np.random.default_rng(4)
    x = random.standard_normal((ROWS, 2, 4, 5), dtype=np.float32)
    return x, random.integers(0, CLASSES, ROWS).astype(np.int32)


def test_the_library_describes_its_model(library: Library) -> None:
    assert (library.name, library.classes, library.input_shape) == ("mlp", CLASSES, (2, 4, 5))
    assert [block.name for block in library.programs["train"].blocks] == ["hidden", "scale", "head"]
    assert library.programs["train"].blocks[1].output_gradient == "scaled.gradient"
    assert library.programs["eval"].loss is None and not library.programs["eval"].updates
    assert library.find_tensor("hidden.weight").shape == (HIDDEN, INPUTS)
    assert library.find_tensor("x", "train").shape_at(3) == (3, 2, 4, 5)


def test_steps_are_those_of_taste_train(library: Library, batch: tuple[Array, Array], tmp_path: Path) -> None:
    x, y = batch
    save_file({"x": x, "y": y}, tmp_path / "samples")
    program = compile_c(HOST, LIBRARY + MODEL + PROGRAM, tmp_path / "taste-train")
    arguments = ["train", "--samples", tmp_path / "samples", "--batch-size", ROWS, "--steps", 3, "--lr", 0.05]
    arguments += ["--momentum", 0.9, "--weight-decay", 0.001, "--seed", 3, "--save", tmp_path / "saved"]
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True)
    with Trainer(library, ROWS, seed=3) as trainer:
        losses = [trainer.step(x, y, learning_rate=0.05, momentum=0.9, weight_decay=0.001).loss for _ in range(3)]
        trainer.save_weights(tmp_path / "ours")
    theirs, ours = load_file(tmp_path / "saved"), load_file(tmp_path / "ours")
    assert losses == sorted(losses, reverse=True) and set(theirs) == set(ours)
    # Another C library: its expf and logf may differ in the last bit.
    assert all(np.allclose(theirs[name], ours[name], rtol=1e-5, atol=1e-7) for name in theirs)


def test_threads_do_not_change_the_bits(library: Library, batch: tuple[Array, Array]) -> None:
    x, y = batch
    results = []
    for threads in (1, 2, 3):
        with Trainer(library, ROWS, threads=threads) as trainer:
            trainer.step(x, y, learning_rate=0.1, gradient_clip=0.5)
            trainer.step(x[:3], y[:3], learning_rate=0.1, gradient_clip=0.5)
            results.append(trainer.parameters())
    for other in results[1:]:
        assert all(np.array_equal(results[0][name], other[name]) for name in other)


def test_a_fused_update_has_the_same_bits(library: Library, batch: tuple[Array, Array]) -> None:
    x, y = batch
    hyper: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    with Trainer(library, ROWS) as apart, Trainer(library, ROWS, programs=("train_fused", "eval")) as fused:
        for rows in (ROWS, 3, ROWS):
            assert apart.step(x[:rows], y[:rows], **hyper).loss == fused.step(x[:rows], y[:rows], **hyper).loss
        theirs, ours = apart.parameters(), fused.parameters()
        assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
        assert np.array_equal(apart.slot("head.weight"), fused.slot("head.weight"))
        for refused in (lambda: fused.gradient("head.weight"), lambda: fused.step(x, y, **hyper, gradient_clip=1.0)):
            with pytest.raises(DeviceError, match="gradient"):
                refused()


def test_blocks_run_alone_and_boundaries_are_tensors(library: Library, batch: tuple[Array, Array]) -> None:
    x, y = batch
    with Trainer(library, ROWS) as whole, Trainer(library, ROWS) as tail:
        whole.load(x, y)
        whole.run(FORWARD | LOSS | BACKWARD, batch_size=ROWS)
        hidden = np.maximum(
            x.reshape(ROWS, -1) @ whole.read_parameter("hidden.weight").T + whole.read_parameter("hidden.bias"), 0
        )
        assert np.allclose(whole.read_tensor("hidden", batch_size=ROWS), hidden, atol=1e-5)
        tail.load(x, y)
        tail.write_tensor("hidden", whole.read_tensor("hidden", batch_size=ROWS))
        tail.run(FORWARD | LOSS | BACKWARD, batch_size=ROWS, first_block=1)
        for name in ("logits", "hidden.gradient"):
            assert np.array_equal(tail.read_tensor(name, batch_size=ROWS), whole.read_tensor(name, batch_size=ROWS))
        assert np.array_equal(tail.gradient("head.weight"), whole.gradient("head.weight"))
        assert np.array_equal(whole.predict(x), whole.read_tensor("logits", batch_size=ROWS))


def test_accumulated_micro_batches_are_one_batch(library: Library, batch: tuple[Array, Array]) -> None:
    x, y = batch
    with Trainer(library, ROWS) as whole, Trainer(library, 3, accumulate=True) as parts:
        whole.gradients(x, y)
        for first in range(0, ROWS, 3):
            parts.gradients(x[first : first + 3], y[first : first + 3], effective_batch=ROWS)
        assert np.allclose(parts.gradient("hidden.weight"), whole.gradient("hidden.weight"), rtol=1e-5, atol=1e-7)
        parts.update(learning_rate=0.1, momentum=0.9)
        whole.update(learning_rate=0.1, momentum=0.9)
        assert np.allclose(parts.slot("head.bias"), whole.slot("head.bias"), rtol=1e-5, atol=1e-7)


def torch_mlp(torch: Any, start: dict[str, Array]) -> tuple[Any, Any]:
    """The test model in PyTorch, float32: its parameters, and a function x -> logits."""
    w = {name: torch.tensor(values, requires_grad=True) for name, values in start.items() if name != "scale.mean"}

    def forward(x: Any) -> Any:
        hidden = torch.relu(x.flatten(1) @ w["hidden.weight"].T + w["hidden.bias"])
        return 1.25 * hidden @ w["head.weight"].T + w["head.bias"]

    return w, forward


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("optimizer", "ours", "theirs"),
    [
        ("sgd", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
        ("sgd", {"momentum": 0.8}, {"momentum": 0.8}),
        ("adam", {"betas": (0.8, 0.99)}, {"betas": (0.8, 0.99)}),
        ("adamw", {"epsilon": 1e-6}, {"eps": 1e-6}),
    ],
)
@pytest.mark.parametrize("no_decay_norm", [False, True])
def test_optimizers_are_those_of_torch(
    library: Library,
    batch: tuple[Array, Array],
    optimizer: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    no_decay_norm: bool,
) -> None:
    import torch

    x, y = batch
    with Trainer(library, ROWS, slots=2) as trainer:
        w, forward = torch_mlp(torch, trainer.parameters())
        flat = [p for p in w.values() if p.dim() < 2]
        deep = [p for p in w.values() if p.dim() >= 2]
        groups = [{"params": deep}, {"params": flat, "weight_decay": 0.0 if no_decay_norm else 0.05}]
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
        reference = kind(groups, lr=0.003, weight_decay=0.05, **theirs)
        trainer.set_label_smoothing(0.1)
        for step in range(6):
            rate = 0.003 * (1 - step / 10)
            for group in reference.param_groups:
                group["lr"] = rate
            reference.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                forward(torch.tensor(x)), torch.tensor(y, dtype=torch.long), label_smoothing=0.1
            )
            loss.backward()
            done = trainer.gradients(x, y)
            assert done.loss == pytest.approx(loss.item(), rel=1e-5)
            # Adam divides by the gradient's size: where that is rounding, so is the step. Both go on from one gradient.
            for name, parameter in w.items():
                ours_now = trainer.gradient(name)
                assert np.allclose(ours_now, parameter.grad.numpy(), rtol=1e-4, atol=1e-6)
                parameter.grad = torch.tensor(ours_now)
            reference.step()
            trainer.update(
                learning_rate=rate, optimizer=optimizer, weight_decay=0.05, no_decay_norm=no_decay_norm, **ours
            )
        for name, expected in w.items():
            assert np.allclose(trainer.read_parameter(name), expected.detach().numpy(), rtol=1e-6, atol=1e-6), name
        if optimizer != "sgd":
            second = reference.state[w["head.weight"]]["exp_avg_sq"].numpy()
            assert np.allclose(trainer.slot("head.weight", 1), second, rtol=1e-4, atol=1e-9)


def test_frozen_parameters_stay_and_take_no_state(tmp_path: Path, batch: tuple[Array, Array]) -> None:
    toolchain = zig("x86_64-linux-gnu.2.17", *SHARED, "-DFREEZE_HEAD_BIAS")
    frozen = load_library(compile_c(toolchain, LIBRARY + MODEL, tmp_path / "libtaste.so"))
    x, y = batch
    with Trainer(frozen, ROWS, slots=2) as trainer:
        trainer.write_parameter("head.bias", np.arange(CLASSES, dtype=np.float32))
        before = trainer.parameters()
        trainer.step(x, y, learning_rate=0.1, optimizer="adamw", weight_decay=0.1, gradient_clip=1.0)
        after = trainer.parameters()
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed == {"hidden.weight", "hidden.bias", "head.weight", "scale.mean"}
        for read in (trainer.gradient, trainer.slot):
            with pytest.raises(DeviceError) as caught:
                read("head.bias")
            assert caught.value.exit_code == 2


def test_weights_go_out_and_in(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with Trainer(library, 1, seed=1) as first, Trainer(library, 1, seed=2) as second:
        first.save_weights(path)
        before = second.parameters()
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DeviceError, match="Copy the file again") as caught:
            second.load_weights(path)
        assert caught.value.exit_code == 14
        save_file({name: values for name, values in first.parameters().items() if name != "head.bias"}, path)
        with pytest.raises(DeviceError, match="no tensor 'head.bias'") as caught:
            second.load_weights(path)
        assert caught.value.exit_code == 13
        assert all(np.array_equal(before[name], values) for name, values in second.parameters().items())
        first.save_weights(path)
        second.load_weights(path)
        assert all(np.array_equal(values, second.read_parameter(name)) for name, values in first.parameters().items())
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]
    with pytest.raises(DeviceError, match="cannot read") as caught:
        Trainer(library, 1, weights=tmp_path / "none")
    assert caught.value.exit_code == 12


def test_errors_are_exceptions_with_the_exit_code(library: Library, batch: tuple[Array, Array], tmp_path: Path) -> None:
    x, y = batch
    with Trainer(library, 4) as trainer:
        cases: list[tuple[int, str, Callable[[], object]]] = [
            (10, "opened for 4 rows", lambda: trainer.step(x, y, learning_rate=0.1)),
            (2, "x has shape", lambda: trainer.predict(x[:, :1])),
            (2, "'y' is given with shape", lambda: trainer.step(x[:2], y[:3], learning_rate=0.1)),
            (2, "'y' is given as float64", lambda: trainer.step(x[:2], y[:2] * 1.0, learning_rate=0.1)),
            (2, "unknown optimizer", lambda: trainer.step(x[:2], y[:2], learning_rate=0.1, optimizer="lion")),
            (2, "needs 2 slots", lambda: trainer.step(x[:2], y[:2], learning_rate=0.1, optimizer="adam")),
            (2, "label smoothing 1", lambda: trainer.set_label_smoothing(1.0)),
            (2, "has label 5", lambda: trainer.step(x[:2], y[:2] * 0 + 5, learning_rate=0.1)),
            (2, "batch size 0", lambda: trainer.predict(x[:0])),
            (2, "no tensor 'nothing'", lambda: trainer.read_parameter("nothing")),
            (2, "not [1002]", lambda: trainer.write_parameter("hidden.bias", np.zeros(3))),
            (15, "first seen in 'head.bias'", lambda: _poisoned(trainer, x[:4], y[:4])),
        ]
        for code, words, wrong in cases:
            with pytest.raises(DeviceError) as caught:
                wrong()
            assert caught.value.exit_code == code and words in str(caught.value)
    (tmp_path / "libtaste.so").write_bytes(b"not a library")
    with pytest.raises(DeviceError, match="Deploy the build for this board") as caught:
        load_library(tmp_path / "libtaste.so")
    assert caught.value.exit_code == 12


def _poisoned(trainer: Trainer, x: Array, y: Array) -> None:
    trainer.write_parameter("head.bias", np.full(CLASSES, np.nan))
    trainer.step(x, y, learning_rate=0.1)


def test_threads_of_python_take_turns_and_affinity_comes_back(library: Library, batch: tuple[Array, Array]) -> None:
    x, y = batch
    before = os.sched_getaffinity(0)
    with Trainer(library, ROWS, threads=2) as trainer:
        workers = [threading.Thread(target=trainer.step, args=(x, y), kwargs={"learning_rate": 0.01}) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert np.isfinite(trainer.predict(x)).all()
        assert os.sched_getaffinity(0) == before


def test_import_needs_nothing_but_numpy_and_cffi(shared: Path) -> None:
    """In a process that sees this package alone; two copies of the library work side by side."""
    script = (
        "import sys, device_runtime as d; "
        "a, b = d.load_library(sys.argv[1]), d.load_library(sys.argv[1]); "
        "d.Trainer(a, 2, threads=1), d.Trainer(b, 2, threads=1); "
        "bad = {'cross', 'host_control', 'torch', 'tvm', 'onnx', 'safetensors'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script, str(shared)], cwd=ROOT, check=True, timeout=60)


# Learning from a stream


def stream(count: int) -> tuple[Array, Array]:
    random = np.random.default_rng(6)
    y = np.sort(random.integers(0, CLASSES, count)).astype(np.int32)
    patterns = random.integers(0, 200, (CLASSES, 2, 4, 5))
    return (patterns[y] + random.integers(0, 56, (count, 2, 4, 5))).astype(np.uint8), y


@pytest.mark.parametrize("groups", [None, (0, 0, 0, 1, 1)])
def test_a_learner_does_what_taste_train_learn_does(
    library: Library, tmp_path: Path, groups: tuple[int, ...] | None
) -> None:
    """Both get the stream in the same order, draw the same rows and end with the same weights."""
    x, y = stream(50)
    pack(tmp_path / "train", x, y)
    pack(tmp_path / "test", x[::7], y[::7])
    of = groups or (0, 0, 0, 0, 0)
    program = compile_c(HOST, LIBRARY + MODEL + PROGRAM, tmp_path / "taste-train")
    command = ["learn", "--samples", tmp_path / "train", "--test", tmp_path / "test", "--batch-size", 6, "--seed", 3]
    command += ["--buffer", 11, "--lr", 0.05, "--momentum", 0.9, "--save", tmp_path / "saved"]
    command += ["--task-of", ",".join(map(str, of)), "--scenario", "til" if groups else "cil"]
    subprocess.run([program, *map(str, command)], check=True, capture_output=True)
    saved = load_file(tmp_path / "saved")
    with Trainer(library, 8, seed=3, threads=1) as trainer:
        learner = Learner(
            trainer, mean=MEAN, std=STD, buffer=11, batch_size=6, lr=0.05, seed=3, groups=groups, momentum=0.9
        )
        for task in range(max(of) + 1):
            rows = np.flatnonzero(np.array(of)[y] == task)
            steps = [learner.observe(x[row], int(y[row])) for row in rows[keyed_order(3, task, len(rows))]]
            assert sum(step is not None for step in steps) == len(rows) // 3
            learner.flush()
        assert learner.flush() is None and learner.buffer is not None and len(learner.buffer) == 11
        trained = [t.name for t in library.tensors if t.kind == "parameter"]
        assert set(trained) < set(saved)
        for name in trained:  # running statistics are brought up to date before the program evaluates
            # The test model's exp is the C library's: musl's here, glibc's there.
            assert np.allclose(trainer.read_parameter(name), saved[name], rtol=1e-5, atol=1e-6), name
        kept = learner.evaluate()
        assert set(kept) <= set(range(CLASSES)) and np.mean(list(kept.values())) > 0.5
        logits = learner.predict(x)
        assert logits.shape == (50, CLASSES) and np.array_equal(learner.predict(x[1]), logits[1])
        assert learner.evaluate(x[:3], y[:3]).keys() == {0}


def test_a_replay_buffer_goes_on_from_its_bytes(library: Library) -> None:
    def opened(capacity: int = 5) -> ReplayBuffer:
        return ReplayBuffer(library, (2, 3), capacity=capacity, classes=4, policy="class-balanced", seed=1)

    one, other = opened(), opened()
    for i in range(40):
        one.add(np.full((2, 3), i, np.uint8), i % 4)
    other.restore(one.to_bytes())
    for i in range(40, 60):
        for buffer in (one, other):
            buffer.add(np.full((2, 3), i, np.uint8), i % 3)
        assert all(np.array_equal(a, b) for a, b in zip(one.draw(3), other.draw(3), strict=True))
    assert one.to_bytes() == other.to_bytes() and len(one) == 5
    samples, labels = one.content()
    assert len(set(samples[:, 0, 0])) == 5 and all(
        s % 4 == label for s, label in zip(samples[:, 0, 0], labels, strict=True) if s < 40
    )
    for code, words, call in (
        (13, "Use the options", lambda: opened(6).restore(one.to_bytes())),
        (14, "no replay buffer", lambda: opened().restore(bytes(one.size_bytes))),
        (2, "one a class", lambda: opened(3)),
        (2, "label 4", lambda: one.add(np.zeros((2, 3), np.uint8), 4)),
        (2, "not uint8", lambda: one.add(np.zeros((2, 3)), 1)),
    ):
        with pytest.raises(DeviceError, match=words) as raised:
            call()
        assert raised.value.exit_code == code


def test_what_a_learner_refuses(library: Library) -> None:
    x, _ = stream(1)
    with Trainer(library, 8) as trainer:
        learner = Learner(trainer, mean=MEAN, std=STD, buffer=5, batch_size=8)
        for words, call in (
            ("--max-classes 6", lambda: learner.observe(x[0], 5)),
            ("not uint8", lambda: learner.observe(x[0].astype(np.float32), 0)),
            ("takes 1 to 8", lambda: Learner(trainer, mean=MEAN, std=STD, batch_size=20)),
            ("One a plane", lambda: Learner(trainer, mean=MEAN, std=[1.0], batch_size=8)),
            ("below 1", lambda: Learner(trainer, mean=MEAN, std=STD, batch_size=8, replay_ratio=1)),
            ("one a class", lambda: Learner(trainer, mean=MEAN, std=STD, batch_size=8, buffer=4)),
            ("Give one a class", lambda: Learner(trainer, mean=MEAN, std=STD, batch_size=8, groups=[1])),
            ("Give x and y", Learner(trainer, mean=MEAN, std=STD, batch_size=8, buffer=0).evaluate),
        ):
            with pytest.raises(DeviceError, match=words):
                call()
