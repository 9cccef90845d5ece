"""Checkpoints of taste-train: bit-exact resume, kills at any time, other options refused, one run a folder, no lost save.

Every harness has a planted bug that it must find: a build that reports a checkpoint before it is written, one that does not
look at the hash, a run that never syncs, a writer that writes in place.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.native_builds import ADDRESS, ARM, CLASSES, HOST, RISCV, THREAD, Toolchain, refuse, run, succeed
from tests.packed_data import pack
from tests.test_native import make_weights

Build = Callable[..., Path]
COUNT = 50


@pytest.fixture(scope="session")
def program(build: Build) -> Path:
    return build(HOST, "taste-train")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(2)
    x = draw.integers(0, 256, (COUNT, 2, 4, 5)).astype(np.uint8)
    y = draw.integers(0, CLASSES, COUNT).astype(np.int32)
    return pack(tmp_path_factory.mktemp("packed") / "train.safetensors", x, y)


def train(packed: Path, steps: int, *more: object) -> list[str]:
    """A run with everything that has a state: Adam, a schedule, augmentation, accumulation."""
    base = ("train", "--samples", packed, "--batch-size", 4, "--effective-batch", 12, "--steps", steps, "--lr", 0.003)
    rest = ("--optimizer", "adamw", "--weight-decay", 0.01, "--schedule", "cosine", "--warmup", 0.1, "--seed", 9)
    return [str(a) for a in (*base, *rest, "--augment", "crop-flip-cutout", "--threads", 1, *more)]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


def live_until(command: list[str], stop: Callable[[list[dict[str, Any]]], bool], number: int) -> list[dict[str, Any]]:
    """Starts a run, sends it a signal as soon as `stop` says so, returns the whole lines it wrote."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        events: list[dict[str, Any]] = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                events.append(json.loads(line))
            if stop(events):
                process.send_signal(number)
                stop = _never
        process.wait(timeout=120)
    return events


def _never(events: list[dict[str, Any]]) -> bool:
    return False


def at_step(step: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda events: any(e["event"] == "checkpoint" and e["step"] >= step for e in events[-1:])


def resume_points(
    program: Path, packed: Path, tmp_path: Path, points: list[int], total: int, emulator: tuple[str, ...] = ()
) -> None:
    """A run that is stopped at points (asked to, or killed) ends with the hash of the straight one."""
    straight = succeed(program, *train(packed, total), emulator=emulator)[-1]["sha256"]
    for number, point in enumerate(points):
        folder = tmp_path / f"run{number}"
        command = train(packed, total, "--checkpoint", folder, "--resume")
        how = signal.SIGKILL if number % 2 else signal.SIGTERM
        first = live_until([*emulator, str(program), *command, "--checkpoint-every", "1steps"], at_step(point), how)
        stopped = of(first, "checkpoint")[-1]["step"]
        assert point <= stopped < total, (point, stopped)
        rest = succeed(program, *command, emulator=emulator)
        assert of(rest, "resume")[0]["step"] >= stopped
        assert rest[-1]["sha256"] == straight and rest[-1]["steps"] == total
        assert sorted(p.name for p in folder.iterdir()) == [*(f"checkpoint-{g}.safetensors" for g in (0, 1)), "lock"]


def test_a_resumed_run_has_the_bits_of_a_straight_one(program: Path, packed: Path, tmp_path: Path) -> None:
    resume_points(program, packed, tmp_path, [1, 2, 3, 4], 25)


def test_a_run_that_was_over_takes_no_step_and_tells_no_loss(program: Path, packed: Path, tmp_path: Path) -> None:
    command = train(packed, 3, "--checkpoint", tmp_path / "run")
    whole, again = succeed(program, *command), succeed(program, *command, "--resume")
    assert again[-1]["sha256"] == whole[-1]["sha256"] and of(again, "step") == []
    assert whole[-1]["loss"] > 0 and again[-1]["loss"] is None and again[-1]["first_loss"] is None


@pytest.mark.faults
def test_resume_at_many_points(program: Path, packed: Path, tmp_path: Path) -> None:
    resume_points(program, packed, tmp_path, random.Random(1).sample(range(1, 40), 20), 60)


@pytest.mark.faults
@pytest.mark.needs("qemu")
@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=lambda t: t.name)
def test_resume_under_qemu(build: Build, toolchain: Toolchain, packed: Path, tmp_path: Path) -> None:
    points = random.Random(2).choices(range(1, 12), k=20)
    resume_points(build(toolchain, "taste-train"), packed, tmp_path, points, 20, toolchain.emulator)


@pytest.mark.faults
def test_a_forgotten_position_is_found_by_resuming(build: Build, packed: Path, tmp_path: Path) -> None:
    """The planted bug goes on at the beginning of the epoch."""
    planted = build(HOST, "taste-train -DTASTE_PLANT_FORGET_POSITION")
    with pytest.raises(AssertionError):
        resume_points(planted, packed, tmp_path, [1, 2, 6], 25)
    assert other_batch_sizes(planted, packed, tmp_path / "sizes", 5) > 0


def text_windows(folder: Path) -> Path:
    """Data of the smallest model (tests/native/tables_text.c): its steps and checkpoints take microseconds, so a life of a
    few milliseconds is mostly one of writing, syncing and renaming."""
    draw = np.random.default_rng(6)
    x, y = (draw.integers(0, 7, (COUNT, 6)).astype(np.uint8) for _ in range(2))
    return pack(folder / "text", x, y)


def kill_loop(command: list[str], kills: int, longest_s: float, seed: int) -> tuple[list[str], int]:
    """Kills a run `kills` times at random and starts it again: (what was lost, the last committed step)."""
    draw, lost, committed = random.Random(seed), [], 0
    print(f"seed {seed}")
    for number in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            time.sleep(draw.uniform(0, longest_s))
            process.kill()
            out, err = process.communicate(timeout=120)
        events = [json.loads(line) for line in out.decode().split("\n")[:-1]]
        resumed = [e["step"] for e in of(events, "resume")]
        if (resumed or of(events, "step")) and sum(resumed) < committed:
            lost.append(f"life {number}: {committed} was committed, {resumed} is there")
        if of(events, "error") or of(events, "warning"):
            lost.append(f"life {number}: {events[-1]} {err.decode()}")
        if process.returncode != -signal.SIGKILL:
            lost.append(f"life {number}: it ended by itself, {process.returncode}")
        committed = max([committed, *(e["step"] for e in of(events, "checkpoint"))])
    return lost, committed


def survive(
    program: Path, arguments: Callable[..., list[str]], folder: Path, kills: int, longest_s: float, *emulator: str
) -> None:
    """Kills lose nothing that was committed, and the run ends with the hash of one that nobody killed."""
    folder.mkdir()
    every = ("--checkpoint-every", "1steps", "--resume")
    lives = [*emulator, str(program), *arguments(10**6, "--checkpoint", folder / "measured", *every)]
    steps = (kill_loop(lives, 3, longest_s, seed=2)[1] + 4) * kills  # three times what the killed ones come to
    options = ("--checkpoint", folder / "run", *every)
    lost, committed = kill_loop([*emulator, str(program), *arguments(steps, *options)], kills, longest_s, 4)
    assert lost == [] and committed > 0
    done = succeed(program, *arguments(steps, *options[:3], "1000000steps", "--resume"), emulator=emulator)
    straight = succeed(program, *arguments(steps), emulator=emulator)
    assert of(done, "resume")[0]["step"] >= committed and done[-1]["sha256"] == straight[-1]["sha256"]


def train_text(data: Path) -> Callable[..., list[str]]:
    """`train` of the smallest model, with all that is saved but augmentation."""
    return lambda *arguments: train(data, *arguments, "--augment", "none")


@pytest.mark.faults
def test_kills_lose_nothing_that_was_committed(build: Build, tmp_path: Path) -> None:
    program = build(HOST, "taste-train-text")
    survive(program, train_text(text_windows(tmp_path)), tmp_path / "kills", 460, 0.02)


@pytest.mark.faults
def test_kills_between_larger_writes(program: Path, packed: Path, tmp_path: Path) -> None:
    """Half a MiB a checkpoint, in several writes."""
    survive(program, partial(train, packed), tmp_path / "kills", 40, 0.12)


@pytest.mark.faults
@pytest.mark.needs("qemu")
@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=lambda t: t.name)
def test_kills_under_qemu(build: Build, toolchain: Toolchain, packed: Path, tmp_path: Path) -> None:
    text = train_text(text_windows(tmp_path))
    survive(build(toolchain, "taste-train-text"), text, tmp_path / "small", 90, 0.2, *toolchain.emulator)
    survive(build(toolchain, "taste-train"), partial(train, packed), tmp_path / "kills", 10, 0.8, *toolchain.emulator)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["taste-train", "taste-train-text"])
def test_a_checkpoint_reported_too_early_is_found_by_kills(
    build: Build, packed: Path, tmp_path: Path, kind: str
) -> None:
    planted = build(HOST, f"{kind} -DTASTE_PLANT_EARLY_EVENT")
    options = ("--checkpoint", tmp_path / "run", "--checkpoint-every", "1steps", "--resume")
    small = kind == "taste-train-text"
    arguments = train_text(text_windows(tmp_path)) if small else partial(train, packed)
    command = [str(planted), *arguments(10**6, *options)]
    longest_s, kills = (0.02, 40) if small else (0.12, 12)
    assert any(kill_loop(command, kills, longest_s, seed)[0] for seed in range(10))


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["faults", "power", "rot"])
def test_promises_of_the_disk(build: Build, tmp_path: Path, mode: str) -> None:
    """tests/native/checkpoint_loop.c: the right build keeps them, the planted one is caught."""
    planted = "checkpoint-loop -DTASTE_PLANT_SKIP_HASH" if mode == "rot" else "checkpoint-loop"
    for name, what, code in (("right", "checkpoint-loop", 0), ("planted", planted, 1)):
        (tmp_path / name).mkdir()
        command = [str(build(HOST, what)), str(tmp_path / name), mode, name]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == code, result.stdout[-2000:]


# What a run in a folder does and refuses.


@pytest.mark.needs("clang")
@pytest.mark.parametrize("toolchain", [ADDRESS, THREAD], ids=lambda t: t.name)
def test_a_run_under_sanitizers(build: Build, toolchain: Toolchain, packed: Path, tmp_path: Path) -> None:
    """With the reading thread, evaluation, checkpoints and a resume."""
    program = build(toolchain, "taste-train")
    base = train(packed, 12, "--test", packed, "--eval-every", 1, "--checkpoint", tmp_path / "run", "--threads", 2)
    done = succeed(program, *base, "--checkpoint-every", "4steps")
    (tmp_path / "run/checkpoint-1.safetensors").write_bytes(b"x" * 2000)
    again = run(program, *base, "--resume", "--batch-size", 7)
    assert (again[0], again[1][-1]["steps"], len(of(done, "eval"))) == (0, 12, 3)


def other_batch_sizes(program: Path, packed: Path, tmp_path: Path, cases: int) -> int:
    """Runs that are killed at a random step and go on with another batch size: how many saw other samples than a straight
    run. With weights that do not move, a step's loss tells which samples it saw, and how augmented."""
    draw, wrong = random.Random(5), 0
    tmp_path.mkdir(exist_ok=True)
    for case in range(cases):
        effective = draw.choice([7, 12, 25])  # epochs of 50 have ragged tails, and 2 to 8 steps
        sizes, seed = draw.choices(range(1, effective + 1), k=2), draw.randrange(10**6)
        common = ["train", "--samples", packed, "--effective-batch", effective, "--steps", 13, "--lr", 0]
        common += ["--seed", seed, "--augment", "crop-flip", "--report-rate", 1e9, "--threads", 1]
        every = ["--checkpoint", tmp_path / str(case), "--checkpoint-every", "1steps", "--resume"]
        straight = [e["loss"] for e in of(succeed(program, *common, "--batch-size", effective), "step")]
        assert len(set(straight)) == 13
        command, stop = [*common, *every, "--batch-size", sizes[0]], draw.randint(1, 8)
        first = live_until([str(program), *map(str, command)], at_step(stop), signal.SIGKILL)
        rest = succeed(program, *common, *every, "--batch-size", sizes[1])
        begun = of(rest, "resume")[0]["step"]
        assert begun >= stop
        seen = [e["loss"] for e in of(first, "step")][:begun] + [e["loss"] for e in of(rest, "step")]
        wrong += seen != pytest.approx(straight, rel=1e-5)
    return wrong


def test_another_batch_size_goes_on_with_the_same_samples(program: Path, packed: Path, tmp_path: Path) -> None:
    assert other_batch_sizes(program, packed, tmp_path, 3) == 0


@pytest.mark.faults
def test_many_other_batch_sizes_go_on_with_the_same_samples(program: Path, packed: Path, tmp_path: Path) -> None:
    assert other_batch_sizes(program, packed, tmp_path, 100) == 0


OTHERS: list[tuple[str, tuple[object, ...], str]] = [
    ("lr", ("--lr", 0.004), "lr 0.00300000003, this run has 0.00400000019"),
    ("steps", ("--steps", 21), "steps 20, this run has 21"),
    ("schedule", ("--schedule", "linear"), "schedule 2, this run has 3"),
    ("warmup", ("--warmup", 0.2), "warmup_steps 2, this run has 4"),
    ("seed", ("--seed", 8), "seed 9, this run has 8"),
    ("effective", ("--effective-batch", 13), "effective_batch 12, this run has 13"),
    ("decay", ("--weight-decay", 0.02), "weight_decay"),
    ("norms", ("--no-decay-norm",), "no_decay_norm 0, this run has 1"),
    ("optimizer", ("--optimizer", "adam"), "optimizer 2, this run has 1"),
    ("beta1", ("--beta1", 0.8), "beta1"),
    ("beta2", ("--beta2", 0.8), "beta2"),
    ("eps", ("--eps", 0.1), "eps"),
    ("clip", ("--grad-clip", 1), "grad_clip 0, this run has 1"),
    ("smoothing", ("--label-smoothing", 0.1), "label_smoothing"),
    ("augment", ("--augment", "flip"), "augment 3, this run has 1"),
    ("statistics", ("--bn-time-constant",), "bn_time_constant 0, this run has 1"),
    ("gamma", ("--step-gamma", 0.2), "step_gamma"),
    ("every", ("--step-every", 2), "step_every"),
]


def test_another_run_is_not_gone_on_with(program: Path, packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    base = train(packed, 20, "--checkpoint", folder, "--resume")
    straight = succeed(program, *base)
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    for _, change, words in OTHERS:
        refuse(13, words, program, *base, *change)
    draw = np.random.default_rng(3)
    x = draw.integers(0, 256, (COUNT, 2, 4, 5)).astype(np.uint8)
    other = pack(tmp_path / "other", x, draw.integers(0, CLASSES, COUNT).astype(np.int32))
    refuse(13, "data ", program, *base, "--samples", other)
    refuse(2, "holds a checkpoint of step 20", program, *(a for a in base if a != "--resume"))
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    again = succeed(program, *base, "--batch-size", 3, "--threads", 2)
    assert again[-1]["sha256"] == straight[-1]["sha256"] and not of(again, "step")


def test_another_build_is_refused(program: Path, packed: Path, tmp_path: Path) -> None:
    """The same program with another build id, and a hash that fits the change: what another build would leave."""
    import hashlib

    folder = tmp_path / "run"
    base = train(packed, 3, "--checkpoint", folder, "--resume")
    succeed(program, *base)
    (path,) = folder.glob("checkpoint-0*")
    changed = path.read_bytes().replace(b"0123456789abcdef", b"0123456789abcde0", 1)
    at = changed.index(b'"sha256":"') + 10
    zeros = changed[:at] + b"0" * 64 + changed[at + 64 :]
    path.write_bytes(changed[:at] + hashlib.sha256(zeros).hexdigest().encode() + changed[at + 64 :])
    refuse(13, "build_id 0123456789abcde0, this run has 0123456789abcdef", program, *base)


def test_a_damaged_generation_falls_back_to_the_one_before(program: Path, packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    base = train(packed, 30, "--checkpoint", folder, "--checkpoint-every", "7steps", "--resume")
    straight = succeed(program, *base)[-1]["sha256"]
    paths = sorted(folder.glob("checkpoint-*"))
    steps = [e["step"] for e in of(succeed(program, *base), "resume")]
    assert steps == [30] and len(paths) == 2
    newest = next(p for p in paths if b'"step":"30"' in p.read_bytes()[:1000])
    raw = bytearray(newest.read_bytes())
    raw[5000] ^= 1
    newest.write_bytes(raw)
    code, events, stderr = run(program, *base)
    assert (code, of(events, "resume")[0]["step"], events[-1]["sha256"]) == (0, 28, straight)
    assert stderr.startswith("warning: ") and stderr.count("\n") == 1 and str(newest) in stderr
    assert of(events, "warning") and run(program, *base)[2] == ""
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    refuse(14, "no whole checkpoint", program, *base)


def test_one_run_a_folder(program: Path, packed: Path, tmp_path: Path) -> None:
    base = train(packed, 10**6, "--checkpoint", tmp_path / "run", "--checkpoint-every", "1steps", "--resume")
    with subprocess.Popen([str(program), *base], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        while '"checkpoint"' not in holder.stdout.readline():
            pass
        refuse(16, f"in use by process {holder.pid}", program, *base)
        holder.kill()
    runs = [subprocess.Popen([str(program), *base], stdout=subprocess.DEVNULL, stderr=-3) for _ in range(4)]
    deadline = time.monotonic() + 60
    while sum(r.poll() is None for r in runs) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(str(r.poll()) for r in runs) == ["16", "16", "16", "None"]
    for r in runs:
        r.terminate()
        r.wait(timeout=60)
    assert sorted(r.returncode for r in runs) == [16, 16, 16, 130]


def test_data_that_become_shorter_are_an_error_and_no_signal(program: Path, packed: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(packed.read_bytes())
    base = train(data, 10**6)
    with subprocess.Popen([str(program), *base], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while '"step"' not in process.stdout.readline():
            pass
        data.write_bytes(b"")
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 14 and "became shorter" in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(program: Path, packed: Path, tmp_path: Path, number: int) -> None:
    base = train(packed, 10**6, "--checkpoint", tmp_path / "run", "--checkpoint-every", 1000)
    with subprocess.Popen([str(program), *base], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        while '"step"' not in process.stdout.readline():
            pass
        process.send_signal(number)
        out, stderr = process.communicate(timeout=60)
    saved = of([json.loads(line) for line in out.splitlines()], "checkpoint")
    assert process.returncode == 130 and len(saved) == 1
    assert f"after step {saved[0]['step']} of 1000000, checkpoint saved" in stderr and "--resume" in stderr


def test_numbers_that_are_not_finite_leave_the_checkpoint(program: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    x = draw.standard_normal((COUNT, 2, 4, 5), dtype=np.float32)
    x[17] = np.inf
    save_file({"x": x, "y": np.zeros(COUNT, np.int32)}, tmp_path / "data")
    folder = tmp_path / "run"
    base = ("train", "--samples", tmp_path / "data", "--batch-size", 3, "--epochs", 1, "--checkpoint", folder)
    base += ("--checkpoint-every", "1steps")
    refuse(15, f"step 6: sample 17 of {tmp_path}/data has Inf at value 0", program, *base, "--lr", 0.01)
    saved = {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}
    assert sorted(int(b'"step":"5"' in raw[:1000]) for raw in saved.values()) == [0, 1]
    refuse(15, "step 6: sample 17", program, *base, "--lr", 0.01, "--resume")
    assert saved == {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}
    # A rate that makes weights infinite in the very step that a checkpoint follows: not saved.
    x[17] = 0
    save_file({"x": 1e3 * x, "y": np.zeros(COUNT, np.int32)}, tmp_path / "data")
    code, events, _ = run(program, *base[:-4], "--checkpoint", tmp_path / "hot", *base[-2:], "--lr", 3e38)
    assert code == 15 and of(events, "checkpoint") == [] and not list((tmp_path / "hot").glob("*.safetensors"))


def poisoned(kind: str, draw: random.Random, folder: Path, good: dict[str, Any]) -> tuple[list[object], int, str]:
    """Flags of a run that meets something that is not finite, the step at which it must stop, and what it must name."""
    x = np.random.default_rng(5).standard_normal((COUNT, 2, 4, 5), dtype=np.float32)
    weights = {name: values.copy() for name, values in good.items()}
    bad, rate, step, named = draw.choice([np.nan, np.inf, -np.inf]), "0.01", 1, ""
    row = draw.randrange(COUNT)
    if kind == "input":
        x[row].flat[draw.randrange(40)] = bad
        step, named = row // 3 + 1, f"sample {row} of"
    elif kind == "weight":
        name = draw.choice(sorted(weights))
        weights[name].flat[draw.randrange(weights[name].size)] = bad
    elif kind == "gradient":  # a finite loss, and a slope of 1e4 times inputs of 1e38
        weights["hidden.weight"][:] = 0
        weights["hidden.bias"][:] = 1
        weights["head.weight"] *= 1e4
        x[row] *= 1e38
        rate, step, named = "0", row // 3 + 1, "the gradient of 'hidden.weight'"
    else:
        rate, step = f"{draw.uniform(1, 3)}e{draw.choice([30, 37])}", 2
    save_file({"x": x, "y": np.zeros(COUNT, np.int32)}, folder / "data")
    save_file(weights, folder / "weights")
    flags: list[object] = ["train", "--samples", folder / "data", "--weights", folder / "weights", "--batch-size", 3]
    return [*flags, "--epochs", 1, "--lr", rate], step, named


def stopped_in_time(program: Path, good: dict[str, Any], tmp_path: Path, cases: int) -> list[str]:
    """What went wrong: a run that did not stop with 15 at the step itself, or that touched its last good checkpoint."""
    draw, wrong = random.Random(3), []
    for case in range(cases):
        folder = tmp_path / f"case{case}"
        folder.mkdir(parents=True)
        kind = ("input", "weight", "gradient", "rate")[case % 4]
        flags, step, named = poisoned(kind, draw, folder, good)
        code, events, stderr = run(program, *flags, "--checkpoint", folder / "run", "--checkpoint-every", "1steps")
        saved = sorted((folder / "run").glob("*.safetensors"))
        finite = all(np.isfinite(values).all() for path in saved for values in load_file(path).values())
        # A rate so large spoils the weights in step 1 or the loss in step 2.
        steps = [step] if kind != "rate" else [1, 2]
        right = any(stderr.startswith(f"error: step {s}: ") for s in steps) and named in stderr
        committed = [e["step"] for e in of(events, "checkpoint")]
        if code != 15 or not right or not finite or any(s >= step for s in committed) or stderr.count("\n") != 1:
            wrong.append(f"{case} {kind}: {code} {committed} {stderr}")
    return wrong


@pytest.mark.faults
def test_what_is_not_finite_stops_the_step_it_comes_in(build: Build, program: Path, tmp_path: Path) -> None:
    """In a sample, a weight, a gradient, a learning rate; the planted program goes on."""
    good = make_weights(3)
    assert stopped_in_time(program, good, tmp_path / "right", 32) == []
    planted = build(HOST, "taste-train -DTASTE_PLANT_GO_ON")
    wrong = stopped_in_time(planted, good, tmp_path / "planted", 8)
    # A checkpoint looks at its weights by itself: those are seen here too.
    assert {line.split()[1] for line in wrong} == {"input:", "gradient:", "rate:"}


def test_a_checkpoint_is_a_safetensors_file(program: Path, packed: Path, tmp_path: Path) -> None:
    """Anybody's reader takes it; weights and optimizer state are canonical, whatever the vector length."""
    succeed(program, *train(packed, 2, "--checkpoint", tmp_path / "run", "--save", tmp_path / "saved"))
    (path,) = (tmp_path / "run").glob("checkpoint-0*")
    tensors, saved = load_file(path), load_file(tmp_path / "saved")
    assert all(np.array_equal(tensors[name], values) for name, values in saved.items())
    for slot in (0, 1):
        moment = tensors[f"optimizer.{slot}.hidden.weight"]
        assert moment.shape == saved["hidden.weight"].shape and np.abs(moment).max() > 0
    assert "scale.constant" in tensors
