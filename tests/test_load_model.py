"""load_model: choices, messages and exit codes, heads, blocks; and whatever a broken or hostile file tries."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cross.errors import (
    CorruptInputError,
    FileError,
    FreeShapeError,
    SecurityError,
    TasteError,
    UnsupportedModelError,
    UsageError,
)
from cross.graph import BATCH
from cross.load_model import load_model
from cross.onnx_import.blocks import compute_blocks
from tests.numpy_forward import OPERATORS as ORACLE
from tests.numpy_forward import numpy_forward
from tests.onnx_graphs import Sketch, assert_same_function, imported, keras_style, run_reference

Array = np.ndarray[Any, np.dtype[Any]]


def images(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def classifier(path: Path, *, softmax: str = "", dims: tuple[int | str, ...] = ("n", 3, 6, 6)) -> Path:
    """conv (bias), ReLU, conv (bias), ReLU, global pool, dense: a file whose batch norms were folded."""
    s = Sketch(dims)
    x = s.node("Relu", s.node("Conv", "x", s.weight(4, 3, 3, 3, name="a.weight"), s.weight(4, name="a.bias"), name="a"))
    x = s.node("Relu", s.node("Conv", x, s.weight(5, 4, 3, 3, name="b.weight"), s.weight(5, name="b.bias"), name="b"))
    x = s.node("Flatten", s.node("GlobalAveragePool", x))
    x = s.node("Gemm", x, s.weight(6, 5, name="c.weight"), s.weight(6, name="c.bias"), name="c", transB=1)
    return s.save(path, s.node(softmax, x) if softmax else x)


def fails(path: Path | str, kind: type[TasteError], *words: str, **options: Any) -> str:
    """Loading ends with this error, in one line that holds the words."""
    with pytest.raises(kind) as caught:
        load_model(path, **options)
    message = str(caught.value)
    assert type(caught.value) is kind and "\n" not in message and message.endswith(".")
    for word in words:
        assert word in message, message
    return message


# What the caller chooses


def test_trailing_softmax_is_taken_off_and_said(tmp_path: Path) -> None:
    for kind, op in (("Softmax", "softmax"), ("LogSoftmax", "log_softmax")):
        model = assert_same_function(classifier(tmp_path / "m.onnx", softmax=kind), images(2, 3, 6, 6))
        assert model.metadata["softmax_removed"] and model.metadata["softmax"] == op
        assert sum("softmax" in note for note in model.metadata["notes"]) == 1
        assert all(node.op != op for node in model.nodes)


def test_softmax_over_pixels_is_flattened_and_taken_off(tmp_path: Path) -> None:
    s = Sketch(["n", 3, 5, 5], opset=13)
    x = s.node("GlobalAveragePool", s.node("Conv", "x", s.weight(4, 3, 1, 1)))
    path = s.save(tmp_path / "m.onnx", s.node("Reshape", s.node("Softmax", x, axis=1), s.stored(np.array([-1, 4]))))
    model = assert_same_function(path, images(2, 3, 5, 5))
    assert model.metadata["softmax_removed"] and model.tensors[model.output].shape == (BATCH, 4)


def test_classes_replaces_the_last_dense_layer_only(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx", softmax="Softmax")
    before, after = load_model(path), load_model(path, classes=9, seed=4)
    assert after.classes == 9 and after.parameters["c.weight"].shape == (9, 5)
    assert after.parameters["c.bias"].shape == (9,)
    for name in ("a.weight", "a.bias", "b.weight", "b.bias"):
        assert np.array_equal(before.parameters[name], after.parameters[name])
    assert np.abs(after.parameters["c.weight"]).max() <= 1 / np.sqrt(5) and np.ptp(after.parameters["c.weight"]) > 0
    assert numpy_forward(after, images(2, 3, 6, 6))[after.output].shape == (2, 9)
    again = load_model(path, classes=9, seed=5)
    assert not np.array_equal(again.parameters["c.weight"], after.parameters["c.weight"])


def test_classes_that_fit_keep_the_files_weights(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx")
    before, after = load_model(path), load_model(path, classes=6)
    assert np.array_equal(before.parameters["c.weight"], after.parameters["c.weight"])


def test_classes_replaces_a_convolution_that_classifies(tmp_path: Path) -> None:
    """As SqueezeNet ends: convolution, ReLU, global pool, reshape."""
    s = Sketch(["n", 3, 5, 5])
    x = s.node("Relu", s.node("Conv", s.node("Conv", "x", s.weight(4, 3, 3, 3)), s.weight(7, 4, 1, 1), s.weight(7)))
    x = s.node("Reshape", s.node("GlobalAveragePool", x), s.stored(np.array([0, 7])))
    model = load_model(s.save(tmp_path / "m.onnx", x), classes=3)
    assert model.classes == 3 and numpy_forward(model, images(2, 3, 5, 5))[model.output].shape == (2, 3)


def test_classes_without_a_classifier_is_refused(tmp_path: Path) -> None:
    s = Sketch(["n", 3, 5, 5])
    path = s.save(tmp_path / "m.onnx", s.node("GlobalAveragePool", s.node("Conv", "x", s.weight(4, 3, 3, 3))))
    fails(path, UnsupportedModelError, "4 outputs", "7 classes", classes=7)


def test_one_of_several_outputs_is_chosen(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    x = s.node("Relu", s.node("MatMul", "x", s.weight(4, 3)), name="features")
    path = s.save(
        tmp_path / "m.onnx", s.node("MatMul", x, s.weight(3, 2), name="left"), s.node("Tanh", x, name="right")
    )
    fails(path, UsageError, "left, right", "--output")
    fails(path, UsageError, "no output 'up'", "left, right", output_name="up")
    assert load_model(path, output_name="right").classes == 3
    assert load_model(path, output_name="features").nodes[-1].op == "relu"


def test_several_inputs_need_a_choice_and_only_one_may_matter(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    s.inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 3]))
    alone = s.node("MatMul", "x", s.weight(4, 3), name="alone")
    path = s.save(tmp_path / "m.onnx", alone, s.node("Mul", alone, "mask", name="both"))
    fails(path, UsageError, "x, mask", "--input", output_name="both")
    fails(path, UnsupportedModelError, "mask", output_name="both", input_name="x")
    fails(path, UsageError, "no input 'y'", output_name="both", input_name="y")
    assert load_model(path, output_name="alone").input == "x"


def test_free_dimensions_need_a_shape_and_fixed_ones_may_change_where_the_graph_allows(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx", dims=("n", 3, "h", "w"))
    fails(path, FreeShapeError, "3,?,?", "--input-shape")
    assert load_model(path, input_shape=(3, 9, 7)).input_shape == (3, 9, 7)
    fails(path, UsageError, "3 dimensions a sample", input_shape=(3, 9))
    assert load_model(classifier(tmp_path / "f.onnx"), input_shape=(3, 8, 8)).input_shape == (3, 8, 8)
    assert load_model(keras_style(tmp_path / "k.onnx"), input_shape=(3, 12, 10)).input_shape == (3, 12, 10)
    s = Sketch(["n", 3, 4, 4])
    flat = s.save(tmp_path / "g.onnx", s.node("Gemm", s.node("Flatten", "x"), s.weight(48, 2), name="head"))
    fails(flat, UsageError, "head", "input shape", input_shape=(3, 5, 5))


def test_seeded_init_makes_every_tensor_anew_and_the_same_again(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx")
    own, a, b = load_model(path), load_model(path, init="seeded", seed=7), load_model(path, init="seeded", seed=7)
    for name in own.parameters:
        assert np.array_equal(a.parameters[name], b.parameters[name])
        assert not np.array_equal(a.parameters[name], own.parameters[name])
    fails(path, UsageError, "random", init="random")


def test_unfolded_batch_norms_leave_the_function_as_it_was(tmp_path: Path) -> None:
    path, samples = classifier(tmp_path / "m.onnx"), images(16, 3, 6, 6, seed=1)
    folded, unfolded = load_model(path), load_model(path, unfold_batch_norm=samples)
    assert [node.op for node in unfolded.nodes].count("batch_norm") == 2
    assert len(unfolded.states) == 4 and unfolded.states.keys() <= unfolded.inits.keys()
    assert not {"a.bias", "b.bias"} & (unfolded.parameters.keys() | unfolded.tensors.keys() | unfolded.inits.keys())
    assert folded.metadata["folded_batch_norm"] and not unfolded.metadata["folded_batch_norm"]
    for training, x in ((False, images(5, 3, 6, 6)), (True, samples)):
        wanted = numpy_forward(folded, x)[folded.output]
        found = numpy_forward(unfolded, x, training=training)[unfolded.output]
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_unfolding_wants_samples_that_fit_and_a_bias_to_replace(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx")
    fails(path, UsageError, "[4, 3, 5, 5]", "[3, 6, 6]", unfold_batch_norm=images(4, 3, 5, 5))
    fails("mlp", UnsupportedModelError, "no convolution has a bias", unfold_batch_norm=images(2, 3, 32, 32))


# Blocks


def test_blocks_end_late_and_hold_a_weight(tmp_path: Path) -> None:
    model = load_model(classifier(tmp_path / "m.onnx"))
    assert [block.name for block in model.blocks] == ["a", "b", "c"]
    assert [model.nodes[block.end_node - 1].op for block in model.blocks] == ["relu", "reshape", "add"]


def test_pre_activation_residuals_are_cut_before_their_norm(tmp_path: Path) -> None:
    s = Sketch(["n", 4, 5, 5])
    x = s.node("Conv", "x", s.weight(4, 4, 1, 1), name="stem/conv")
    for i in range(2):
        y = s.node("Relu", s.batch_norm(x, 4, name=f"unit.{i}/norm"), name=f"unit.{i}/relu")
        y = s.node("Conv", y, s.weight(4, 4, 3, 3), pads=[1] * 4, name=f"unit.{i}/conv1")
        y = s.node("Conv", y, s.weight(4, 4, 3, 3), pads=[1] * 4, name=f"unit.{i}/conv2")
        x = s.node("Add", x, y, name=f"unit.{i}/add")
    model = load_model(s.save(tmp_path / "m.onnx", x))
    assert [block.name for block in model.blocks] == ["stem/conv", "unit.0", "unit.1"]
    assert [model.nodes[block.first_node].op for block in model.blocks[1:]] == ["batch_norm", "batch_norm"]


def test_equal_names_are_made_unique() -> None:
    model = load_model("mlp")
    nodes = [node.__class__(node.op, node.inputs, node.outputs, node.attrs, "same") for node in model.nodes]
    _, blocks = compute_blocks(nodes, model.input, model.output)
    assert [block.name for block in blocks] == ["same", "same#2", "same#3"]


# What cannot be trained


def test_preflight_names_every_operator_and_node_at_once(tmp_path: Path) -> None:
    s = Sketch(["n", 3, 6, 6])
    x = s.node("Conv", "x", s.weight(4, 3, 3, 3))
    x = s.node("Sinh", s.node("Softsign", s.node("Sinh", x, name="one"), name="two"), name="three")
    x = s.node("FusedThing", x, domain="com.example", name="four")
    message = fails(s.save(tmp_path / "m.onnx", x), UnsupportedModelError, "4 nodes", "Softsign (two)")
    assert "Sinh (one, three)" in message and "com.example.FusedThing (four)" in message


def test_shape_arithmetic_on_data_is_named_too(tmp_path: Path) -> None:
    s = Sketch(["n", 6])
    x = s.node("MatMul", "x", s.weight(6, 6))
    path = s.save(tmp_path / "m.onnx", s.node("Abs", x, name="one"), s.node("Floor", x, name="two"))
    fails(path, UnsupportedModelError, "Abs (one)", output_name="one")
    fails(path, UnsupportedModelError, "Floor (two)", output_name="two")


Draw = Callable[[Sketch, str], str]

REFUSED: dict[str, tuple[Draw, str]] = {
    "reflecting pad": (
        lambda s, x: s.node("Pad", x, s.stored(np.array([0, 0, 1, 1, 0, 0, 1, 1])), mode="reflect", name="it"),
        "reflect",
    ),
    "batch moved": (lambda s, x: s.node("Transpose", x, perm=[1, 0, 2, 3], name="it"), "batch"),
    "batch merged": (lambda s, x: s.node("Reshape", x, s.stored(np.array([-1, 9])), name="it"), "mixes the batch"),
    "batch reduced": (lambda s, x: s.node("ReduceMean", x, axes=[0], name="it"), "batch"),
    "batch cut": (
        lambda s, x: s.node("Slice", x, s.stored(np.array([0])), s.stored(np.array([1])), name="it"),
        "batch",
    ),
    "batch squared": (
        lambda s, x: s.node(
            "MatMul",
            s.node("Flatten", x, name="flat"),
            s.node("Transpose", "flat", name="turned", perm=[1, 0]),
            name="it",
        ),
        "batch",
    ),
    "volumes": (
        lambda s, x: s.node(
            "Conv", s.node("Unsqueeze", x, s.stored(np.array([2]))), s.weight(2, 4, 1, 1, 1), name="it"
        ),
        "5 dimensions",
    ),
    "computed weight": (
        lambda s, x: s.node("Conv", x, s.node("Slice", x, *(s.stored(np.array([v])) for v in (0, 9, 1))), name="it"),
        "it",
    ),
    "indices of a pool": (
        lambda s, x: s.node(
            "Add",
            s.node("MaxPool", x, kernel_shape=[2, 2], outputs=2, name="it"),
            s.node("Cast", "it.1", to=1, name="cast"),
        ),
        "second output",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refusal_names_the_node_and_the_reason(case: str, tmp_path: Path) -> None:
    draw, reason = REFUSED[case]
    s = Sketch(["n", 3, 5, 5])
    path = s.save(tmp_path / "m.onnx", draw(s, s.node("Conv", "x", s.weight(4, 3, 3, 3))))
    message = fails(path, UnsupportedModelError, reason)
    assert re.search(r"'(it|turned)'", message), message


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    s = Sketch(["n", 3, 5, 5])
    x = s.node("Conv", "x", s.weight(4, 3, 3, 3))
    for name in ("one", "two"):
        x = s.node("Pad", x, s.stored(np.array([0, 0, 1, 1, 0, 0, 1, 1])), mode="edge", name=name)
    fails(s.save(tmp_path / "m.onnx", x), UnsupportedModelError, "'one'", "'two'")


def test_integer_inputs_old_opsets_and_models_without_weights_are_refused(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    s.inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 4])]
    path = s.save(tmp_path / "m.onnx", s.node("MatMul", s.node("Cast", "ids", to=1), s.weight(4, 3)))
    fails(path, UnsupportedModelError, "ids", "integers")
    s = Sketch(["n", 4], opset=6)
    fails(s.save(tmp_path / "m.onnx", s.node("Relu", "x")), UnsupportedModelError, "opset 6")
    s = Sketch(["n", 4])
    fails(s.save(tmp_path / "m.onnx", s.node("Relu", "x")), UnsupportedModelError, "no weights")
    s = Sketch([4])
    fails(s.save(tmp_path / "m.onnx", s.node("Relu", "x")), UnsupportedModelError, "1 dimensions")


# Broken and hostile files


def test_folder_empty_file_other_formats_and_text_are_refused(tmp_path: Path) -> None:
    fails(tmp_path, CorruptInputError, "folder")
    for name, data in (("empty.onnx", b""), ("text.onnx", b"# a model\n" * 9), ("zip.onnx", b"PK\x03\x04" + bytes(99))):
        (tmp_path / name).write_bytes(data)
        fails(tmp_path / name, CorruptInputError, name, "not a valid ONNX model")
    for name, words in (("a.pth", "torch.onnx.export"), ("a.h5", "tf2onnx"), ("a.safetensors", "--weights")):
        (tmp_path / name).write_bytes(b"x")
        fails(tmp_path / name, CorruptInputError, words)
    fails(tmp_path / "absent.onnx", UsageError, "no such file")


def test_unreadable_file_is_an_io_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    path = classifier(tmp_path / "m.onnx")
    monkeypatch.setattr(Path, "read_bytes", broken)
    fails(path, FileError, "Input/output error")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_truncated_file_is_corrupt(share: float, tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    fails(path, CorruptInputError)


def external(folder: Path, **entries: str) -> Path:
    """A dense model whose weight, 4x3 floats, lies in a file of its own."""
    s = Sketch(["n", 4])
    model = s.model(s.node("MatMul", "x", s.weight(4, 3, name="w")))
    (tensor,) = model.graph.initializer
    (folder / "weights.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "weights.bin"} | entries).items():
        tensor.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_is_read(tmp_path: Path) -> None:
    assert_same_function(external(tmp_path), images(2, 4))


@pytest.mark.parametrize(
    "location", ["../secret", "a/../../secret", "/etc/hostname", "..\\secret", "link", "linked/secret"]
)
def test_external_data_outside_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(48))
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    fails(external(folder, location=location), SecurityError, "outside the model's folder")


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "absent.bin"},
        {"location": ""},
        {"offset": "-8"},
        {"offset": "4"},
        {"length": "99999999999999999999"},
        {"length": "8"},
        {"offset": "much"},
    ],
    ids=str,
)
def test_broken_external_data_is_corrupt(entries: dict[str, str], tmp_path: Path) -> None:
    fails(external(tmp_path, **entries), CorruptInputError, "m.onnx")


def test_external_data_that_is_a_hard_link_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path)
    (tmp_path / "other").hardlink_to(tmp_path / "weights.bin")
    fails(path, SecurityError, "external data refused")


def test_names_in_a_file_never_reach_the_terminal_raw(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    path = s.save(tmp_path / "m.onnx", s.node("Evil", "x", name="a\x1b[2J\nb"))
    message = fails(path, UnsupportedModelError, "a?[2J?b")
    assert message.isprintable()


def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    huge = s.node("ConstantOfShape", s.stored(np.array([10**6, 10**6])), name="zeros")
    huge = s.node("Expand", s.node("Neg", huge, name="neg"), s.stored(np.array([10**6, 10**6])))
    fails(s.save(tmp_path / "m.onnx", s.node("MatMul", "x", huge)), CorruptInputError, "GiB")
    s = Sketch(["n", 4])
    counted = s.node("Range", *(s.stored(np.array(v)) for v in (0, 10**12, 1)), name="range")
    fails(s.save(tmp_path / "m.onnx", s.node("Gather", "x", counted)), CorruptInputError, "range", "GiB")
    s = Sketch(["n", 4])
    weight = s.node("ConstantOfShape", s.stored(np.array([4, 10**12])), name="weight")
    fails(s.save(tmp_path / "m.onnx", s.node("MatMul", "x", weight)), CorruptInputError, "weight", "GiB")


def test_graph_with_a_cycle_or_an_unmade_tensor_is_corrupt(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    fails(s.save(tmp_path / "m.onnx", s.node("Add", "x", "nowhere")), CorruptInputError, "nowhere")
    s = Sketch(["n", 4])
    s.node("Add", "x", "b", name="a")
    fails(s.save(tmp_path / "m.onnx", s.node("Relu", "a", name="b")), CorruptInputError, "cycle")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_random_bytes_never_get_past_the_errors(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(TasteError) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_either_load_or_fail_in_one_line(changes: list[tuple[float, int]], tmp_path: Path) -> None:
    data = bytearray(_seed_file())
    for place, value in changes:
        data[int(place * len(data))] = value
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    try:
        load_model(path)
    except TasteError as error:
        assert type(error) is not TasteError and "\n" not in str(error)


def _seed_file() -> bytes:
    """A file of a few hundred bytes in which most bytes matter."""
    s = Sketch(["n", 2, 4, 4])
    x = s.node("Relu", s.node("Conv", "x", s.weight(2, 2, 1, 1), pads=[1, 1, 1, 1]))
    x = s.node("Reshape", s.node("MaxPool", x, kernel_shape=[2, 2]), s.stored(np.array([0, -1])))
    return s.model(s.node("Softmax", x)).SerializeToString()


def test_oracle_covers_every_operator_of_the_contract() -> None:
    """The operators that cross/graph.py lists are the ones the importer can emit and the oracle can run."""
    import cross.graph
    from cross.onnx_import.evaluate import FORWARD
    from cross.onnx_import.infer import RULES

    listed = set(re.findall(r"[a-z_0-9]+", (cross.graph.__doc__ or "").split("decomposed into these):")[1]))
    assert set(ORACLE) == set(RULES) == set(FORWARD) and set(ORACLE) <= listed


def test_oracle_agrees_with_the_reference_on_a_whole_model(tmp_path: Path) -> None:
    path, x = keras_style(tmp_path / "k.onnx", softmax=False), images(2, 12, 10, 3)
    _, result = imported(path, x)
    np.testing.assert_allclose(result, run_reference(path, x), atol=1e-5)
    assert onnx.load(path).graph.node
