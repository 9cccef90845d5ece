"""A published ResNet-20: its accuracy on CIFAR-10, the same predictions on every instruction set, and fine-tuning as PyTorch does
it, over the same samples in the same order."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cross.build import build
from cross.graph import Model
from cross.load_model import load_model
from cross.target import find_target
from cross.weights.load import load_weights
from cross.weights.match import match_weights
from host_control.data import PackedDataSet, PackOptions, pack, read_data_set
from host_control.training.data import normalised
from tests.host import host_target
from tests.packed_data import keyed_order
from tests.test_cross_builds import command_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("data", "torch")

Array = np.ndarray[Any, Any]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH, RATE, MOMENTUM, DECAY, SEED = 32, 0.01, 0.9, 5e-4, 3
TARGETS = (host_target(), "rpi4", "visionfive2")


@pytest.fixture(scope="module")
def model(data: Path) -> Model:
    return match_weights(load_model("resnet20"), load_weights(data / "resnet_cifar10" / "resnet20-12fca82f.th"))


@pytest.fixture(scope="module")
def cifar(data: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedDataSet:
    options = PackOptions(mean=MEAN, std=STD)
    source = read_data_set(data / "cifar-10-batches-bin", options)
    return pack(source, tmp_path_factory.mktemp("cifar") / "packed", options).data


@pytest.fixture(scope="module")
def command(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """`command(target, trainable)`: the program of a build with these weights, and --weights."""
    folder, done = tmp_path_factory.mktemp("builds"), {}

    def built(target: str = host_target(), trainable: str = "all") -> list[str]:
        out = done.setdefault((target, trainable), folder / f"{target}-{trainable}")
        build(model, find_target(target), out, trainable=trainable)
        return [*command_of(out, target), str(out / "weights.safetensors")]

    return built


def run(command: list[str], verb: str, *flags: object) -> list[dict[str, Any]]:
    """Events of the program with the weights of its build."""
    *program, weights = command
    words = [*program, verb, "--weights", weights, "--batch-size", BATCH, *flags]
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def torch_module(model: Model, dtype: Any = None) -> Any:
    from tests.torch_zoo import torch_like

    return torch_like(model, "resnet20", dtype or torch.float32)


def images_of(cifar: PackedDataSet, split: str) -> tuple[Array, Array]:
    held = load_file(cifar.folder / f"{split}.safetensors")
    return normalised(held["x"], list(MEAN), list(STD)), held["y"]


def test_accuracy_is_the_published_one(
    model: Model, cifar: PackedDataSet, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    """91.5 % of test_batch.bin, give or take 0.1, and PyTorch's logits to 1e-4 of the largest."""
    flags = ("--samples", cifar.folder / "test.safetensors", "--logits", tmp_path / "logits")
    result = run(command(), "eval", *flags)[-1]
    assert (result["samples"], result["accuracy"]) == (1000, pytest.approx(0.915, abs=0.001))
    x, _ = images_of(cifar, "test")
    with torch.no_grad():
        wanted = torch_module(model).eval()(torch.from_numpy(x[:200])).numpy()
    logits = load_file(tmp_path / "logits")["logits"]
    np.testing.assert_allclose(logits[:200], wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))


@pytest.mark.acceptance
@pytest.mark.needs("qemu")
def test_predictions_are_the_same_everywhere(
    cifar: PackedDataSet, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    found = {}
    for target in TARGETS:
        flags = ("--samples", cifar.folder / "test.safetensors", "--limit", 50, "--logits", tmp_path / target)
        accuracy = run(command(target), "eval", *flags)[-1]["accuracy"]
        found[target] = load_file(tmp_path / target)["logits"].argmax(1).tolist()
        print(f"{target}: {accuracy:.0%} of 50")
    assert all(len(labels) == 50 and labels == found[host_target()] for labels in found.values())


def torch_epoch(
    model: Model, cifar: PackedDataSet, steps: int, head: bool, dtype: Any = None, channels_last: bool = False
) -> tuple[list[float], Any]:
    """PyTorch over the same batches: the loss of every step, and the module. `head`: the last layer alone, batch norms frozen."""
    module = torch_module(model, dtype)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module.to(memory_format=layout).train(not head)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not head or re.match("linear", name) is not None)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    x, y = images_of(cifar, "train")
    order, losses = keyed_order(SEED, 0, len(x)), []
    for step in range(steps):
        rows = order[step * BATCH : (step + 1) * BATCH]
        logits = module(torch.from_numpy(x[rows]).to(dtype or torch.float32, memory_format=layout))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y[rows]).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module


def fine_tune(command: list[str], cifar: PackedDataSet, steps: int, *flags: object) -> list[float]:
    """Our losses of the same steps."""
    rates = ("--lr", RATE, "--momentum", MOMENTUM, "--weight-decay", DECAY, "--seed", SEED, "--report-rate", 1e9)
    events = run(command, "train", "--samples", cifar.train.path, "--steps", steps, *rates, *flags)
    return [e["loss"] for e in events if e["event"] == "step"]


EPOCH = -(-3000 // BATCH)


@pytest.mark.acceptance
def test_fine_tuning_the_head_follows_pytorch(
    model: Model, cifar: PackedDataSet, command: Callable[..., list[str]]
) -> None:
    """Every loss of an epoch to 1e-3."""
    ours = fine_tune(command(trainable="head"), cifar, EPOCH)
    theirs, _ = torch_epoch(model, cifar, EPOCH, head=True)
    assert len(ours) == EPOCH and ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("steps", [4, pytest.param(EPOCH, marks=pytest.mark.acceptance)])
def test_fine_tuning_all_weights_drifts_no_more_than_pytorch(
    model: Model, cifar: PackedDataSet, command: Callable[..., list[str]], steps: int, tmp_path: Path
) -> None:
    """At most twice as far from float64's weights as PyTorch's float32 is, in the worse of its layouts."""
    fine_tune(command(), cifar, steps, "--save", tmp_path / "saved")
    ours = load_file(tmp_path / "saved")
    exact = dict(torch_epoch(model, cifar, steps, head=False, dtype=torch.float64)[1].named_parameters())
    singles = [torch_epoch(model, cifar, steps, head=False, channels_last=last)[1] for last in (False, True)]

    def distance(found: dict[str, Array]) -> float:
        squares = [np.square(found[n].reshape(p.shape) - p.detach().numpy()).sum() for n, p in exact.items()]
        return float(np.sqrt(sum(squares)))

    mine = distance(ours)
    theirs = max(distance({n: p.detach().numpy() for n, p in m.named_parameters()}) for m in singles)
    print(f"{steps} steps: ours {mine:.3g} from float64, PyTorch's float32 {theirs:.3g}")
    assert mine <= 2 * theirs
