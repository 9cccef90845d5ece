"""Trained weights into the user's own ONNX file: ONNX Runtime computes what our graph does with those weights."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cross.errors import TasteError, UnsupportedModelError, UsageError
from cross.export_model import check_same_function, export_model, with_tensors
from cross.graph import Model
from cross.load_model import load_model
from cross.onnx_import.unfold import unfold_batch_norm
from tests.numpy_forward import numpy_forward
from tests.onnx_graphs import Sketch, keras_style, run_onnxruntime

Array = np.ndarray[Any, np.dtype[Any]]
PROPERTIES = {"classes": ["a", "b"], "mean": [0.5], "std": [0.25], "note": "plain"}


def trained(model: Model, seed: int = 1) -> Model:
    """The model with every parameter and state moved, each element differently, as training would."""
    rng = np.random.default_rng(seed)

    def moved(array: Array, positive: bool) -> Array:
        scale = max(float(np.abs(array).mean()), 0.1)
        change = rng.uniform(0.02, 0.3, array.shape) if positive else rng.standard_normal(array.shape) * 0.3 * scale
        return (array + change).astype(np.float32)

    tensors = {name: moved(array, False) for name, array in model.parameters.items()}
    tensors |= {name: moved(array, True) for name, array in model.states.items()}
    return with_tensors(model, tensors)


def exported_logits(model: Model, source: str | Path, out: Path) -> tuple[Array, Array, onnx.ModelProto]:
    """What our graph computes and what ONNX Runtime computes with the exported file, for a batch of 3; and the file."""
    export_model(model, source, out, PROPERTIES)
    x = np.random.default_rng(5).standard_normal((3, *model.input_shape)).astype(np.float32)
    ours = numpy_forward(model, x)[model.output]
    if model.metadata["softmax"]:
        ours = np.exp(ours - ours.max(-1, keepdims=True))
        ours = ours / ours.sum(-1, keepdims=True)
    fed = np.moveaxis(x, 1, 3) if model.metadata["input_layout"] == "nhwc" else x
    theirs = run_onnxruntime(out, np.ascontiguousarray(fed))
    return ours, theirs, onnx.load(str(out))


def assert_equal_logits(ours: Array, theirs: Array) -> None:
    assert ours.shape == theirs.shape and np.ptp(ours) > 0
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4 * float(np.abs(ours).max()))


def properties_of(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("options", [{}, {"softmax": False}, {"flatten": True}], ids=str)
@pytest.mark.parametrize("classes", [None, 7])
def test_keras_style_files(options: dict[str, bool], classes: int | None, tmp_path: Path) -> None:
    source = keras_style(tmp_path / "keras.onnx", **options)
    model = trained(load_model(source, classes=classes))
    ours, theirs, proto = exported_logits(model, source, tmp_path / "out.onnx")
    assert_equal_logits(ours, theirs)
    before = onnx.load(str(source))
    assert [node.op_type for node in proto.graph.node] == [node.op_type for node in before.graph.node]
    assert [node.name for node in proto.graph.node] == [node.name for node in before.graph.node]
    assert {t.name for t in proto.graph.initializer} == {t.name for t in before.graph.initializer}
    assert properties_of(proto) == {"classes": '["a", "b"]', "mean": "[0.5]", "std": "[0.25]", "note": "plain"}


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("constant_nodes", [False, True])
def test_dense_layers_in_every_orientation(constant_nodes: bool, tmp_path: Path) -> None:
    """Gemm with transB 0 and 1, MatMul, a Transpose of a stored weight, alpha, a scalar and a [1, M] bias."""
    s = Sketch(["n", 6], constant_nodes=constant_nodes)
    x = s.node("Gemm", "x", s.weight(8, 6), s.weight(8), transB=1)
    x = s.node("Gemm", s.node("Relu", x), s.weight(8, 5), s.weight(1, 5), alpha=0.5)
    x = s.node("Add", s.node("MatMul", x, s.weight(5, 7)), s.weight(7))
    x = s.node("MatMul", x, s.node("Transpose", s.weight(4, 7), perm=[1, 0]))
    x = s.node("Gemm", x, s.weight(3, 4), s.weight(1), transB=1)
    source = s.save(tmp_path / "dense.onnx", x)
    model = trained(load_model(source))
    ours, theirs, proto = exported_logits(model, source, tmp_path / "out.onnx")
    assert_equal_logits(ours, theirs)
    assert [node.op_type for node in proto.graph.node] == [node.op_type for node in onnx.load(str(source)).graph.node]


@pytest.mark.needs("onnxruntime")
def test_a_weight_that_something_else_reads_keeps_its_value_there(tmp_path: Path) -> None:
    """One stored tensor read in two orientations, and one that also divides: each reader gets what our graph has."""
    s = Sketch(["n", 6])
    shared, scale = s.weight(6, 6), s.stored(np.linspace(0.5, 1.5, 6, dtype=np.float32), "scale")
    x = s.node("Gemm", s.node("Gemm", s.node("Div", "x", scale), shared, transB=1), shared)
    x = s.node("Mul", s.node("Gemm", x, s.weight(6, 6), transB=1), scale)
    source = s.save(tmp_path / "shared.onnx", x)
    model = trained(load_model(source))
    assert "scale" in model.constants and len(model.parameters) == 4
    ours, theirs, _ = exported_logits(model, source, tmp_path / "out.onnx")
    assert_equal_logits(ours, theirs)


def convolutions(path: Path, *, folded: bool, half: bool = False, biased: bool = True) -> Path:
    s = Sketch(["n", 3, 9, 8])
    x = "x"
    for index, (inside, outside) in enumerate(((3, 8), (8, 8))):
        y = s.node(
            "Conv",
            x,
            s.weight(outside, inside, 3, 3),
            *([s.weight(outside)] if folded and biased else []),
            pads=[1] * 4,
        )
        y = y if folded else s.batch_norm(y, outside, name=f"norm{index}")
        x = s.node("Relu", y)
    x = s.node("Flatten", s.node("GlobalAveragePool", x), axis=1)
    x = s.node("Gemm", x, s.weight(5, 8), s.weight(5), transB=1)
    path = s.save(path, s.node("LogSoftmax" if folded else "Identity", x, name="scores"))
    if half:
        proto = onnx.load(str(path))
        for tensor in proto.graph.initializer:
            cast = f"{tensor.name}.half"
            stored = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), cast)
            proto.graph.node.insert(0, helper.make_node("Cast", [cast], [tensor.name], to=TensorProto.FLOAT))
            tensor.CopyFrom(stored)
        onnx.save(proto, str(path))
    return path


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("biased", [True, False])
def test_batch_norms_put_back_are_folded_again(biased: bool, tmp_path: Path) -> None:
    """Also into convolutions whose bias of zeros the exporter left out."""
    source = convolutions(tmp_path / "folded.onnx", folded=True, biased=biased)
    model = load_model(source, classes=4)
    samples = np.random.default_rng(2).standard_normal((8, *model.input_shape)).astype(np.float32)
    unfolded = unfold_batch_norm(model, samples)
    before, after = (numpy_forward(m, samples)[m.output] for m in (model, unfolded))
    np.testing.assert_allclose(after, before, atol=1e-5 * float(np.abs(before).max()))
    for block in unfolded.blocks:
        assert unfolded.nodes[block.end_node - 1].outputs[0] == block.output
    model = trained(unfolded)
    assert len(model.states) == 4
    _, theirs, proto = exported_logits(replace(model), source, tmp_path / "out.onnx")
    x = np.random.default_rng(5).standard_normal((3, *model.input_shape)).astype(np.float32)
    logits = numpy_forward(model, x)[model.output].astype(np.float64)
    assert_equal_logits(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), theirs)
    assert not [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    assert [d.dim_value for d in proto.graph.output[0].type.tensor_type.shape.dim][1:] in ([], [4])


@pytest.mark.needs("onnxruntime")
def test_half_precision_weights_stay_half(tmp_path: Path) -> None:
    source = convolutions(tmp_path / "half.onnx", folded=False, half=True)
    model = trained(load_model(source))
    ours, theirs, proto = exported_logits(model, source, tmp_path / "out.onnx")
    assert {t.data_type for t in proto.graph.initializer} == {TensorProto.FLOAT16}
    np.testing.assert_allclose(theirs, ours, atol=2e-2 * float(np.abs(ours).max()))


@pytest.mark.needs("onnxruntime")
def test_a_classifier_of_another_size_with_a_reshape_behind_it(tmp_path: Path) -> None:
    """A 1x1 convolution as classifier, a Reshape that names 5 classes, declared shapes."""
    s = Sketch(["n", 3, 6, 6])
    x = s.node("GlobalAveragePool", s.node("Relu", s.node("Conv", "x", s.weight(8, 3, 3, 3), s.weight(8))))
    x = s.node("Conv", x, s.weight(5, 8, 1, 1), s.weight(5))
    x = s.node("Reshape", x, s.stored(np.array([-1, 5])))
    proto = s.model(s.node("Softmax", x))
    proto = onnx.shape_inference.infer_shapes(proto)
    source = tmp_path / "classes.onnx"
    onnx.save(proto, str(source))
    model = trained(load_model(source, classes=3))
    ours, theirs, written = exported_logits(model, source, tmp_path / "out.onnx")
    assert_equal_logits(ours, theirs)
    assert written.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(written, strict_mode=True), full_check=True)


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_a_zoo_model_becomes_a_fresh_file(name: str, tmp_path: Path) -> None:
    model = trained(load_model(name, input_shape=(1, 12, 12), classes=4))
    ours, theirs, proto = exported_logits(model, name, tmp_path / "zoo.onnx")
    assert_equal_logits(ours, theirs)
    operators = {node.op_type for node in proto.graph.node}
    assert "ConstantOfShape" not in operators and ("BatchNormalization" in operators) == (name == "resnet8")
    assert set(model.parameters) <= {tensor.name for tensor in proto.graph.initializer}
    onnx.checker.check_model(proto, full_check=True)


@pytest.mark.needs("torch", "onnxruntime", "onnxscript")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("classes", [None, 6])
def test_both_torch_exporters_in_both_modes(dynamo: bool, training: bool, classes: int | None, tmp_path: Path) -> None:
    import torch

    from tests.torch_zoo import torch_like

    module: Any = torch_like(load_model("resnet8", classes=4), "resnet8", torch.float32)
    module = module.train() if training else module.eval()
    source = tmp_path / "torch.onnx"
    kwargs: dict[str, Any] = {"dynamo": dynamo, "input_names": ["input"]}
    if dynamo:
        kwargs["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
    else:
        mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
        kwargs |= {"dynamic_axes": {"input": {0: "batch"}}, "training": mode, "do_constant_folding": not training}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.zeros(2, 3, 32, 32),), str(source), **kwargs)
    model = trained(load_model(source, classes=classes))
    ours, theirs, proto = exported_logits(model, source, tmp_path / "out.onnx")
    assert_equal_logits(ours, theirs)
    if dynamo or training:
        # Otherwise the exporter merges equal biases behind Identity nodes; trained, they differ and part.
        before = {tensor.name for tensor in onnx.load(str(source)).graph.initializer}
        assert before == {tensor.name for tensor in proto.graph.initializer}


def test_large_external_weights_stay_beside_the_file_and_small_ones_are_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = convolutions(tmp_path / "plain.onnx", folded=False)
    source = tmp_path / "external.onnx"
    onnx.save(onnx.load(str(plain)), str(source), save_as_external_data=True, location="w.bin", size_threshold=0)
    model = trained(load_model(source))
    assert [file.name for file in export_model(model, source, tmp_path / "small.onnx", {}).files] == ["small.onnx"]
    monkeypatch.setattr("cross.export_model.EMBEDDED_BYTES", 1)
    done = export_model(model, source, tmp_path / "sub" / "large.onnx", {})
    assert [file.name for file in done.files] == ["large.onnx", "large.onnx.data"]
    for file in ("small.onnx", "sub/large.onnx"):
        check_same_function(model, tmp_path / file)
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == ["large.onnx", "large.onnx.data"]


def test_the_check_of_a_written_file_can_fail(tmp_path: Path) -> None:
    source = convolutions(tmp_path / "m.onnx", folded=False)
    with pytest.raises(TasteError, match="does not compute what the model does"):
        check_same_function(trained(load_model(source)), source)


def test_the_source_is_not_overwritten_and_a_shared_weight_cannot_be_folded_twice(tmp_path: Path) -> None:
    source = convolutions(tmp_path / "m.onnx", folded=True)
    with pytest.raises(UsageError, match="Choose another name"):
        export_model(load_model(source), source, source, {})
    s = Sketch(["n", 4, 6, 6])
    shared = s.weight(4, 4, 1, 1)
    x = s.node("Conv", s.node("Conv", "x", shared, s.weight(4)), shared, s.weight(4))
    twice = s.save(tmp_path / "twice.onnx", s.node("Flatten", x))
    samples = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    model = unfold_batch_norm(load_model(twice), samples)
    with pytest.raises(UnsupportedModelError, match="shared by several convolutions"):
        export_model(model, twice, tmp_path / "out.onnx", {})
    assert not (tmp_path / "out.onnx").exists()


def test_an_untrained_export_whose_signal_died_out_gets_fresh_batch_norms(tmp_path: Path) -> None:
    s = Sketch(["n", 3, 8, 8])
    x = "x"
    for index in range(8):
        small = s.stored(s.random.standard_normal((6, 3 if index == 0 else 6, 3, 3)).astype(np.float32) * 1e-2)
        x = s.node("Relu", s.node("Conv", x, small, s.stored(np.zeros(6, np.float32)), pads=[1] * 4))
    x = s.node("Gemm", s.node("Flatten", s.node("GlobalAveragePool", x)), s.weight(4, 6), s.weight(4), transB=1)
    model = load_model(s.save(tmp_path / "silent.onnx", x))
    samples = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    assert float(numpy_forward(model, samples)[model.output].std(0).max()) < 1e-3
    woken = unfold_batch_norm(model, samples)
    assert "batch norms start afresh" in woken.metadata["notes"][-1]
    assert woken.metadata["untrained"] and len(woken.states) == 16
    assert all((value == 1).all() for name, value in woken.parameters.items() if name.endswith("batch_norm.weight"))


@pytest.mark.needs("onnxruntime")
def test_a_zoo_transformer_becomes_a_fresh_file(tmp_path: Path) -> None:
    model = trained(load_model("chartransformer", input_shape=(8,), classes=11))
    export_model(model, "chartransformer", tmp_path / "out.onnx", {})
    tokens = np.random.default_rng(3).integers(0, 11, (2, 8))
    proto = onnx.load(str(tmp_path / "out.onnx"))
    kind = helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    theirs = run_onnxruntime(tmp_path / "out.onnx", tokens.astype(kind))
    assert_equal_logits(numpy_forward(model, tokens.astype(np.uint8))[model.output], theirs)


@pytest.mark.needs("onnxruntime")
def test_a_table_of_tokens_that_is_also_the_classifier(tmp_path: Path) -> None:
    """Stored once and turned, stored twice as exporters do, or once for both with a reader that is not ours."""
    table = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    for twice in (False, True):
        s = Sketch(["n", 4])
        s.inputs[0].type.tensor_type.elem_type = TensorProto.INT64
        stored = s.stored(table, "table")
        x = s.node("Gather", stored, "x")
        x = s.node("Add", x, s.node("Relu", s.node("MatMul", x, s.weight(5, 5))))
        head = s.stored(np.ascontiguousarray(table.T), "head") if twice else s.node("Transpose", stored, perm=[1, 0])
        source = s.save(tmp_path / "tied.onnx", s.node("MatMul", x, head))
        model = trained(load_model(source))
        assert len(model.parameters) == 2
        out = tmp_path / f"out{twice}.onnx"
        export_model(model, source, out, {})
        tokens = np.random.default_rng(3).integers(0, 7, (2, 4))
        assert_equal_logits(
            numpy_forward(model, tokens.astype(np.uint8))[model.output], run_onnxruntime(out, tokens.astype(np.int64))
        )
        assert {t.name for t in onnx.load(str(out)).graph.initializer} >= {"table"} | ({"head"} if twice else set())
