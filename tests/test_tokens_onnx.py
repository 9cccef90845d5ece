"""Import of what transformers are exported as: GELU and layer norm in every spelling, masks, heads, tables of tokens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from cross.errors import UnsupportedModelError
from cross.graph import TensorType
from cross.load_model import load_model
from tests.numpy_forward import numpy_forward
from tests.onnx_graphs import Array, Sketch, assert_same_function, operators_of

ROOT, SLOPE = math.sqrt(2.0), math.sqrt(2.0 / math.pi)


def number(s: Sketch, value: float) -> str:
    return s.stored(np.float32(value))


def erf_last_half(s: Sketch, x: str) -> str:
    """As PyTorch writes it below opset 20."""
    share = s.node("Add", s.node("Erf", s.node("Div", x, number(s, ROOT))), number(s, 1))
    return s.node("Mul", s.node("Mul", x, share), number(s, 0.5))


def erf_first_half(s: Sketch, x: str) -> str:
    """As TensorFlow writes it: x / 2 on one side, a product in place of the quotient."""
    share = s.node("Add", number(s, 1), s.node("Erf", s.node("Mul", x, number(s, 1 / ROOT))))
    return s.node("Mul", s.node("Mul", number(s, 0.5), x), share)


def erf_inner_half(s: Sketch, x: str) -> str:
    share = s.node("Add", s.node("Erf", s.node("Div", x, number(s, ROOT))), number(s, 1))
    return s.node("Mul", x, s.node("Div", share, number(s, 2)))


def tanh_of_power(s: Sketch, x: str) -> str:
    """GPT-2's."""
    cubed = s.node("Mul", s.node("Pow", x, number(s, 3)), number(s, 0.044715))
    share = s.node("Tanh", s.node("Mul", s.node("Add", x, cubed), number(s, SLOPE)))
    return s.node("Mul", s.node("Mul", x, number(s, 0.5)), s.node("Add", share, number(s, 1)))


def tanh_factored(s: Sketch, x: str) -> str:
    inner = s.node("Add", s.node("Mul", s.node("Mul", x, x), number(s, SLOPE * 0.044715)), number(s, SLOPE))
    share = s.node("Add", s.node("Tanh", s.node("Mul", x, inner)), number(s, 1))
    return s.node("Mul", s.node("Mul", x, share), number(s, 0.5))


def one_node(s: Sketch, x: str) -> str:
    return s.node("Gelu", x, approximate="tanh")


@pytest.mark.parametrize(
    ("draw", "opset"),
    [(erf_last_half, 17), (erf_first_half, 13), (erf_inner_half, 17), (tanh_of_power, 17), (tanh_factored, 17),
     (one_node, 20)],
)  # fmt: skip
def test_gelu_is_recognised_in_every_spelling(draw: Callable[[Sketch, str], str], opset: int, tmp_path: Path) -> None:
    s = Sketch(["n", 5, 6], opset=opset)
    x = s.node("Add", s.node("MatMul", "x", s.weight(6, 8)), s.weight(8))
    path = s.save(tmp_path / "m.onnx", s.node("MatMul", draw(s, x), s.weight(8, 3)))
    model = assert_same_function(path, 2 * Sketch([]).random.standard_normal((3, 5, 6)).astype(np.float32))
    assert operators_of(model) == {"dense": 2, "add": 1, "gelu": 1}
    gelu = next(node for node in model.nodes if node.op == "gelu")
    assert gelu.attrs["approximate"] == ("none" if draw.__name__.startswith("erf") else "tanh")


def test_what_is_nearly_gelu_stays_what_it_is(tmp_path: Path) -> None:
    s = Sketch(["n", 6])
    x = s.node("MatMul", "x", s.weight(6, 8))
    share = s.node("Add", s.node("Erf", s.node("Div", x, number(s, 1.5))), number(s, 1))
    path = s.save(tmp_path / "m.onnx", s.node("Mul", s.node("Mul", x, share), number(s, 0.5)))
    assert "gelu" not in operators_of(assert_same_function(path, np.eye(6, dtype=np.float32)))


@pytest.mark.parametrize("second_difference", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_layer_norm_is_recognised_in_its_steps(second_difference: bool, shifted: bool, tmp_path: Path) -> None:
    s = Sketch(["n", 5, 6], opset=13)
    x = s.node("MatMul", "x", s.weight(6, 8))
    mean = s.node("ReduceMean", x, axes=[-1])
    away = s.node("Sub", x, mean)
    again = s.node("Sub", x, mean) if second_difference else away
    variance = s.node("ReduceMean", s.node("Pow", again, number(s, 2)), axes=[-1])
    y = s.node("Div", away, s.node("Sqrt", s.node("Add", variance, number(s, 1e-5))))
    y = s.node("Mul", y, s.weight(8, name="gamma"))
    y = s.node("Add", y, s.weight(8, name="beta")) if shifted else y
    path = s.save(tmp_path / "m.onnx", s.node("MatMul", y, s.weight(8, 3)))
    model = assert_same_function(path, s.random.standard_normal((3, 5, 6)).astype(np.float32))
    assert operators_of(model) == {"dense": 2, "layer_norm": 1}
    norm = next(node for node in model.nodes if node.op == "layer_norm")
    assert norm.attrs["eps"] == 1e-5 and norm.inputs[1:] == (("gamma", "beta") if shifted else ("gamma",))


def scores(s: Sketch) -> str:
    """[n, 2, 4, 4] of data [n, 2, 4, 3]."""
    key = s.node("Transpose", s.node("MatMul", "x", s.weight(3, 3)), perm=[0, 1, 3, 2])
    return s.node("MatMul", "x", key)


BELOW = np.tri(4, dtype=bool)
MASKS: dict[str, tuple[Callable[[Sketch, str], str], bool]] = {
    "added": (lambda s, x: s.node("Add", x, s.stored(np.where(BELOW, 0, -np.inf).astype(np.float32))), True),
    "added first": (lambda s, x: s.node("Add", s.stored(np.where(BELOW, 0, -3e38).astype("f")[None, None]), x), True),
    "chosen": (lambda s, x: s.node("Where", s.stored(BELOW[None, None]), x, s.stored(np.float32([-np.inf]))), True),
    "filled": (lambda s, x: s.node("Where", s.stored(~BELOW), s.stored(np.float32(-1e9)), x), True),
    "to the right": (lambda s, x: s.node("Where", s.stored(BELOW.T), x, s.stored(np.float32(-1e9))), False),
    "padding": (lambda s, x: s.node("Add", x, s.stored(np.float32([0, 0, 0, -1e9]))), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_no_parameters(name: str, tmp_path: Path) -> None:
    draw, causal = MASKS[name]
    s = Sketch(["n", 2, 4, 3])
    y = s.node("MatMul", s.node("Softmax", draw(s, scores(s)), axis=-1), "x")
    path = s.save(tmp_path / "m.onnx", s.node("MatMul", y, s.weight(3, 5)))
    model = assert_same_function(path, s.random.standard_normal((3, 2, 4, 3)).astype(np.float32))
    assert len(model.parameters) == 2 and ("causal_mask" in operators_of(model)) == causal


def test_expand_repeats_what_has_one_row(tmp_path: Path) -> None:
    s = Sketch(["n", 1, 6])
    wide = s.node("Expand", s.node("MatMul", "x", s.weight(6, 4)), s.stored(np.array([1, 3, 4])))
    path = s.save(tmp_path / "m.onnx", s.node("MatMul", wide, s.weight(4, 2)))
    assert_same_function(path, s.random.standard_normal((2, 1, 6)).astype(np.float32))


def tokens(length: int) -> Sketch:
    s = Sketch([])
    s.inputs = [helper.make_tensor_value_info("x", TensorProto.INT64, ["n", length])]
    return s


def test_table_of_tokens_its_positions_and_a_tied_classifier(tmp_path: Path) -> None:
    """The classifier is the table, which exporters store once more, transposed."""
    s = tokens(5)
    table = s.random.standard_normal((7, 4)).astype(np.float32)
    positions = s.node("Gather", s.weight(5, 4, name="pos"), s.stored(np.arange(5)[None]))
    x = s.node("Gather", s.stored(table, "tok"), s.node("Cast", "x", to=TensorProto.INT32))
    x = s.node("MatMul", s.node("Relu", s.node("Add", x, positions)), s.stored(np.ascontiguousarray(table.T)))
    path = s.save(tmp_path / "m.onnx", s.node("Softmax", x, axis=-1))
    model = load_model(path)
    assert set(model.parameters) == {"tok", "pos"} and model.metadata["softmax"] == "softmax"
    assert model.tensors["x"] == TensorType((-1, 5), "int32") and model.input_values == 7
    ids = s.random.integers(0, 7, (3, 5))
    found = numpy_forward(model, ids)[model.output]
    np.testing.assert_allclose(found, np.maximum(table[ids] + model.parameters["pos"], 0) @ table.T, atol=1e-5)


def test_tokens_are_looked_up_and_nothing_else(tmp_path: Path) -> None:
    s = tokens(5)
    x = s.node("Gather", s.weight(7, 4), s.node("Cast", s.node("Neg", "x"), to=TensorProto.INT32))
    with pytest.raises(UnsupportedModelError, match="not the model's input"):
        load_model(s.save(tmp_path / "m.onnx", s.node("MatMul", x, s.weight(4, 2))))
    s = tokens(5)
    x = s.node("Gather", s.weight(7, 2, 2), "x")
    with pytest.raises(UnsupportedModelError, match="3 dimensions are chosen by data"):
        load_model(s.save(tmp_path / "m.onnx", s.node("MatMul", x, s.weight(2, 2))))


@pytest.mark.needs("torch", "onnxscript")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_export_of_a_transformer_equals_pytorch(dynamo: bool, tmp_path: Path) -> None:
    """With PyTorch's own scaled_dot_product_attention, which its exporters spell very differently."""
    import torch

    from tests.torch_zoo import CharTransformer

    torch.manual_seed(0)
    module = CharTransformer((8,), 30, 2, 16, 4).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            # Exporters store equal tensors once, whatever they are: fresh layer norms must not look alike.
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids: Array = np.random.default_rng(0).integers(0, 30, (2, 8))
    path = tmp_path / "m.onnx"
    options: dict[str, Any] = {"dynamo": False, "dynamic_axes": {"x": {0: "n"}}}
    if dynamo:
        options = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("n")},), "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.from_numpy(ids),), path, input_names=["x"], **options)
    model = load_model(path)
    counts = operators_of(model)
    assert (counts["layer_norm"], counts["gelu"], counts["causal_mask"], counts["embedding"]) == (5, 2, 2, 1)
    assert len(model.parameters) == len(module.state_dict()) and counts["transpose"] == counts["reshape"] == 2 * 4
    with torch.no_grad():
        wanted = module(torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(numpy_forward(model, ids)[model.output], wanted, atol=1e-5)
