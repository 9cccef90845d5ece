"""The same model, weights and batch on every instruction set: same first loss, same bits for any thread count, nothing foreign
in the objects. Emulated where this machine is of another kind, on the board's own CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cross.compile_kernels import compile_kernels
from cross.load_model import load_model
from cross.target import find_target
from tests.host import host_target
from tests.run_program import lower_model
from tests.small_models import SMALL_TRANSFORMER, source_of

QEMU = pytest.mark.needs("qemu")
TARGETS = [
    pytest.param("x86-64-avx2", marks=pytest.mark.needs("avx2")),
    pytest.param("x86-64-avx512", marks=pytest.mark.needs("avx512")),
    pytest.param("rpi4", marks=QEMU),
    pytest.param("visionfive2", marks=QEMU),
    pytest.param("generic-riscv64-v", marks=QEMU),
    pytest.param("bpi-f3", marks=QEMU),
]
STEPS, BATCH = 2, 4


def command_of(folder: Path, target: str) -> list[str]:
    program = str(folder / "taste-train")
    foreign = find_target(target).arch != find_target(host_target()).arch
    return find_target(target).emulator(program) if foreign else [program]


def train(folder: Path, target: str, samples: Path, threads: int, save: Path) -> list[float]:
    """Losses of a few steps."""
    arguments = ["train", "--weights", str(folder / "weights.safetensors"), "--samples", str(samples)]
    arguments += ["--batch-size", str(BATCH), "--steps", str(STEPS), "--lr", "0.05", "--momentum", "0.9"]
    arguments += ["--threads", str(threads), "--save", str(save)]
    command = [*command_of(folder, target), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def oracle(name: str, samples: dict[str, np.ndarray[Any, Any]]) -> float:
    """First loss in float64."""
    torch = pytest.importorskip("torch")
    from tests.torch_zoo import torch_like

    module = torch_like(load_model(source_of(name), init="seeded"), name, torch.float64).train()
    logits = module(torch.tensor(samples["x"], dtype=torch.float64)).flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(samples["y"], dtype=torch.int64).flatten())
    return float(loss.detach())


def samples_of(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Images with labels, or windows of tokens with the next ones."""
    rng = np.random.default_rng(11)
    if name == SMALL_TRANSFORMER:
        return {n: rng.integers(0, 96, (BATCH, 24)).astype("int32") for n in ("x", "y")}
    x = rng.standard_normal((BATCH, 3, 32, 32)).astype("float32")
    return {"x": x, "y": rng.integers(0, 10, BATCH).astype("int32")}


RUNS = [
    *(pytest.param("resnet8", *t.values, marks=t.marks) for t in TARGETS),
    *(pytest.param(SMALL_TRANSFORMER, t, marks=QEMU) for t in ("rpi4", "visionfive2")),
    *(pytest.param("resnet18", *t.values, marks=(*t.marks, pytest.mark.acceptance)) for t in TARGETS),
]


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "target"), RUNS)
def test_first_loss_is_the_same_everywhere(name: str, target: str, built: Callable[..., Path], tmp_path: Path) -> None:
    """To 1e-5 of float64; later losses stay close; one and two threads give the same weights bit for bit."""
    samples = samples_of(name)
    file = tmp_path / "samples.safetensors"
    save_file(samples, file)
    folder = built(source_of(name), target, input_shape=None, init="seeded")
    one = train(folder, target, file, 1, tmp_path / "one.safetensors")
    two = train(folder, target, file, 2, tmp_path / "two.safetensors")
    wanted = oracle(name, samples)
    assert abs(one[0] - wanted) <= 1e-5 * wanted
    assert one == two
    first, second = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert all(np.array_equal(first[n], second[n]) for n in first)


def undefined_symbols(path: Path) -> set[str]:
    lines = subprocess.run(["nm", "-u", str(path)], capture_output=True, text=True, check=True).stdout.split()
    return set(lines) - {"U", "w"}


@pytest.mark.parametrize("target", ["x86-64-avx2", "rpi4", "visionfive2", "bpi-f3"])
def test_kernel_objects_need_nothing_but_the_runtime(target: str, tmp_path: Path) -> None:
    """No libm, no libc, no compiler helper: exp, tanh and erf are our own, and so is the floor inside them."""
    from tests.test_gradients import CASES, model_of

    allowed = {"TVMFFIErrorSetRaisedFromCStrParts", "__TVMBackendParallelLaunch", "memset", "memcpy"}
    wanted = {"silu", "tanh", "log softmax", "hard_swish", "gelu {'approximate': 'none'}", "layer norm"}
    cases = [c for c in CASES if c.name in wanted]
    assert len(cases) == len(wanted)
    for case in cases:
        kernels = lower_model(model_of(case, np.random.default_rng(0)), "mse", target)
        for path in compile_kernels(kernels, tmp_path).values():
            assert undefined_symbols(path) <= allowed, (case.name, path.name)


@pytest.mark.parametrize("target", [pytest.param(t, marks=QEMU) for t in ("rpi4", "visionfive2", "bpi-f3")])
def test_binary_is_static_and_small(target: str, built: Callable[..., Path]) -> None:
    program = built("resnet8", target, input_shape=None) / "taste-train"
    assert program.stat().st_size <= 3 * 2**20
    headers = subprocess.run(["readelf", "-l", str(program)], capture_output=True, text=True, check=True).stdout
    assert "INTERP" not in headers


@pytest.mark.needs("qemu")
@pytest.mark.parametrize(
    ("model", "target", "emulator", "reason"),
    [
        ("resnet8", "bpi-f3", ["qemu-riscv64", "-cpu", "rv64,v=true,vlen=128,vext_spec=v1.0"], "256"),
        ("resnet8", "generic-riscv64-v", ["qemu-riscv64", "-cpu", "rv64,v=true,vlen=256,vext_spec=v1.0"], "128"),
        ("resnet8", "bpi-f3", ["qemu-riscv64", "-cpu", "rv64"], "lacks 'v'"),
        ("mlp", "jetson-xavier", ["qemu-aarch64", "-cpu", "cortex-a72"], "lacks 'fp16'"),
    ],
    ids=["256 on 128", "128 on 256", "no vectors", "ARMv8.2 on 8.0"],
)
def test_what_the_cpu_lacks_is_refused_at_the_start(
    model: str, target: str, emulator: list[str], reason: str, built: Callable[..., Path]
) -> None:
    """Code for another vector length would run to the end and give wrong numbers; other code dies with SIGILL."""
    program = built(model, target, input_shape=None) / "taste-train"
    command = [*emulator, str(program), "bench", "--batch-size", "2", "--seconds", "0.1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 13
    assert reason in result.stderr and len(result.stderr.splitlines()) == 1
