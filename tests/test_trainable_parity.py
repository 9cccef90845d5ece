"""Gradients of what --trainable leaves to train, against PyTorch with requires_grad=False and frozen batch norms in eval mode.

The oracle and its bounds are those of tests/test_parity.py; programs run without C here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cross.graph import Model
from cross.load_model import load_model
from cross.rules.context import gradient_name
from tests.run_program import lower_model, run_program
from tests.test_parity import batch_of, errors, in_float32, pool, states_of, torch_like

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("torch")

# What is trained, and which batch norms are frozen, as PyTorch's names and modules.
CASES = {
    "all": (r".", r"bn"),  # --bn-policy frozen
    "last:1": (r"^fc\.", r"bn"),
    "norms": (r"bn\d\.(weight|bias)$", r"$^"),
    r"^conv1\.|stacks\.1\.conv2": (r"^conv1\.weight$|^stacks\.1\.conv2\.weight$", r"stacks\.[02]\.bn"),
    r"stacks\.1\.bn1\.bias": (r"^stacks\.1\.bn1\.bias$", r"^bn1|stacks\.[02]\.bn"),
}


def moved(seed: int) -> Model:
    """Gammas, betas and running statistics that are not the initial ones: or frozen and live batch norms would be alike."""
    model, rng = load_model("resnet8", init="seeded", seed=seed), np.random.default_rng(seed)

    def shifted(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array + rng.uniform(-0.3, 0.5, array.shape).astype("float32") if ".bn" in f".{name}" else array

    return replace(
        model,
        parameters={n: shifted(n, a) for n, a in model.parameters.items()},
        states={n: shifted(n, a) for n, a in model.states.items()},
    )


def torch_gradients(
    model: Model, x: Any, y: Any, trained: str, frozen: str, dtype: Any, channels_last: bool = False
) -> tuple[float, Any]:
    """One step of PyTorch with all but `trained` frozen and batch norms of `frozen` in eval mode: loss and module."""
    module = torch_like(model, "resnet8", dtype)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.BatchNorm2d) and re.search(frozen, name):
            child.eval()
    inputs = torch.tensor(x, dtype=dtype)
    if channels_last:
        module, inputs = (
            module.to(memory_format=torch.channels_last),
            inputs.contiguous(memory_format=torch.channels_last),
        )
    loss = torch.nn.functional.cross_entropy(module(inputs), torch.tensor(y, dtype=torch.int64))
    loss.backward()
    return float(loss.detach()), module


def gradients_of(module: Any, model: Model) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: parameter.grad.detach().numpy().reshape(model.parameters[name].shape)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("trainable", CASES)
def test_gradients_of_what_trains_match_pytorch(trainable: str) -> None:
    """Loss to 1e-5, gradients within the measured bound, running statistics to 1e-5 (frozen ones as they were)."""
    trained, frozen = CASES[trainable]
    for seed, batch in ((0, 3), (1, 8)):
        model = moved(seed)
        kernels = lower_model(
            model, trainable=trainable, bn_policy="frozen" if trainable == "all" else "per-micro-batch"
        )
        x, y = batch_of(seed, model.input_shape, batch, model.classes)
        loss, true = torch_gradients(model, x, y, trained, frozen, torch.float64)
        exact = gradients_of(true, model)
        assert set(exact) == set(kernels.graph.training.gradients)
        allowed: dict[str, float] = {}
        least: dict[str, float] = {}
        for nudged, channels_last in in_float32(x):
            _, module = torch_gradients(model, nudged, y, trained, frozen, torch.float32, channels_last)
            pool(max, allowed, errors(gradients_of(module, model), exact))
            if channels_last:
                continue
            values = {
                **model.parameters,
                **model.states,
                model.input: nudged,
                "target": y,
                "loss_scale": np.float32([1 / batch]),
                "label_smoothing": np.float32([0]),
            }
            found, _ = run_program(kernels, "train", values, batch)
            assert abs(found["loss"].mean() - loss) <= 1e-5 * abs(loss)
            pool(min, least, errors({n: found[gradient_name(n)] for n in exact}, exact))
        for name, error in least.items():
            assert error <= max(1e-5, 3 * allowed[name]), f"{name}, seed {seed}, batch {batch}"
        for name, wanted in states_of(true).items():
            have = found[name]
            assert np.linalg.norm(have - wanted) <= 1e-5 * max(np.linalg.norm(wanted), 1e-3), name
