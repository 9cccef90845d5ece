"""A file's tensors find a model's parameters: wrappers, suffixes, other shapes, another number of classes; what is wrong is listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cross.errors import CompatibilityError
from cross.graph import Model
from cross.load_model import load_model
from cross.weights.match import match_weights
from host_control.cli import main

Array = np.ndarray[Any, Any]
RENAMED: Mapping[str, Callable[[str], str]] = {
    "as they are": lambda name: name,
    "data parallel": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled in part": lambda name: name.replace("stacks.0.", "stacks.0._orig_mod."),
    "nested": lambda name: f"state_dict.module._orig_mod.{name}",
    "trainer": lambda name: f"model.{name}",
    "backbone": lambda name: f"encoder.body.{name}",
    "slashes": lambda name: name.replace(".", "/"),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("resnet8")


def other_values(model: Model) -> dict[str, Array]:
    """A file of PyTorch's shapes (a bias is [C]) and types, with its counters."""
    rng = np.random.default_rng(3)
    found = {n: rng.standard_normal(a.shape).astype("float32") for n, a in {**model.parameters, **model.states}.items()}
    found = {n: a.reshape(-1) if a.ndim == 3 else a for n, a in found.items()}
    return found | {"bn1.num_batches_tracked": np.array(7)}


def check(matched: Model, tensors: Mapping[str, Array]) -> None:
    for name, values in {**matched.parameters, **matched.states}.items():
        np.testing.assert_array_equal(values.ravel(), tensors[name].ravel(), err_msg=name)


@pytest.mark.parametrize("how", RENAMED)
def test_names_are_found_behind_wrappers(how: str, model: Model) -> None:
    tensors = other_values(model)
    matched = match_weights(model, {RENAMED[how](name): values for name, values in tensors.items()})
    check(matched, tensors)
    shapes = {name: values.shape for name, values in matched.parameters.items()}
    assert shapes == {name: values.shape for name, values in model.parameters.items()}


def test_a_suffix_matches_where_it_is_the_only_one(model: Model) -> None:
    """`encoder.bn1.weight` could be that of any block: it is listed, not guessed."""
    tensors = other_values(model)
    scoped = {f"encoder/{name}" if name.startswith("fc") else name: values for name, values in tensors.items()}
    check(match_weights(model, scoped), tensors)
    with pytest.raises(CompatibilityError) as caught:
        match_weights(model, {n if n.startswith("fc") else f"encoder.{n}": values for n, values in tensors.items()})
    assert "missing: conv1.weight" in str(caught.value) and "unexpected: encoder." in str(caught.value)


def test_a_model_behind_a_wrapper_takes_bare_names(model: Model) -> None:
    """The exporter kept `model.` before the names, the file has none."""

    def renamed(name: str) -> str:
        return f"model.{name}" if name in model.parameters or name in model.states else name

    wrapped = replace(
        model,
        nodes=tuple(replace(n, inputs=tuple(map(renamed, n.inputs))) for n in model.nodes),
        tensors={renamed(n): t for n, t in model.tensors.items()},
        parameters={renamed(n): a for n, a in model.parameters.items()},
        states={renamed(n): a for n, a in model.states.items()},
        inits={renamed(n): i for n, i in model.inits.items()},
    )
    tensors = other_values(model)
    check(match_weights(wrapped, tensors), {renamed(name): values for name, values in tensors.items()})


def test_all_that_is_wrong_is_listed_by_name(model: Model) -> None:
    tensors = other_values(model)
    del tensors["bn1.running_var"]
    tensors["stacks.0.conv1.weight"] = np.zeros((16, 16, 5, 5), "float32")
    tensors["extra.weight"] = np.zeros(3, "float32")
    with pytest.raises(CompatibilityError) as caught:
        match_weights(model, tensors, source="a.pt")
    assert str(caught.value) == (
        "a.pt does not fit resnet8: missing: bn1.running_var; unexpected: extra.weight; "
        "shapes: stacks.0.conv1.weight has shape [16, 16, 5, 5], not [16, 16, 3, 3]. Give weights of this model."
    )
    assert caught.value.exit_code == 13


def test_a_classifier_of_other_classes_starts_afresh_and_is_named_once(model: Model) -> None:
    tensors = other_values(model)
    tensors |= {"fc.weight": np.ones((1000, 64), "float32"), "fc.bias": np.ones(1000, "float32")}
    matched = match_weights(model, tensors, seed=5)
    fresh = load_model("resnet8", seed=5)
    for name in ("fc.weight", "fc.bias"):
        np.testing.assert_array_equal(matched.parameters[name], fresh.parameters[name])
    np.testing.assert_array_equal(matched.parameters["conv1.weight"], tensors["conv1.weight"])
    notes = [note for note in matched.metadata["notes"] if "afresh" in note]
    assert notes == ["the weights file has another number of classes than 10: fc.weight, fc.bias start afresh"]
    tensors["fc.weight"] = np.ones((1000, 65), "float32")
    tensors["fc.bias"] = np.ones(10, "float32")
    with pytest.raises(CompatibilityError, match=r"fc.weight has shape \[1000, 65\]"):
        match_weights(model, tensors)


def test_the_command_line_takes_them_and_ends_with_13_where_they_do_not_fit(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = other_values(model)
    del tensors["conv1.weight"]
    save_file(tensors, tmp_path / "weights.safetensors")
    arguments = ["build", "--model", "resnet8", "--target", "x86-64-avx2", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--weights", str(tmp_path / "weights.safetensors")]) == 13
    assert "missing: conv1.weight" in capsys.readouterr().err
    (tmp_path / "weights.safetensors").write_bytes(b"not weights")
    assert main([*arguments, "--weights", str(tmp_path / "weights.safetensors")]) == 14
    assert main([*arguments, "--weights", str(tmp_path / "none")]) == 2
    assert main([*arguments, "--trainable", "nothing"]) == 2
    assert "--trainable: no parameter of resnet8 matches 'nothing'" in capsys.readouterr().err
