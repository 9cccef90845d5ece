"""ONNX files as people have them: the imported graph computes what the file computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from cross.graph import BATCH
from cross.load_model import load_model
from tests.numpy_forward import numpy_forward
from tests.onnx_graphs import (
    Sketch,
    assert_same_function,
    imported,
    keras_style,
    operators_of,
    run_onnxruntime,
)

Array = np.ndarray[Any, np.dtype[Any]]
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def images(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Draw = Callable[[Sketch, str], str]

OPERATORS: dict[str, tuple[int, Draw]] = {
    "clip attributes": (9, lambda s, x: s.node("Clip", x, min=-0.5, max=0.5)),
    "clip inputs": (13, lambda s, x: s.node("Clip", x, "", s.stored(np.float32(0.25)))),
    "clip to relu": (13, lambda s, x: s.node("Clip", x, s.stored(np.float32(0)))),
    "leaky relu": (16, lambda s, x: s.node("LeakyRelu", x, alpha=0.2)),
    "hard swish": (14, lambda s, x: s.node("HardSwish", x)),
    "hard sigmoid": (9, lambda s, x: s.node("HardSigmoid", x, alpha=0.3)),
    "silu": (13, lambda s, x: s.node("Mul", x, s.node("Sigmoid", x))),
    "swish": (24, lambda s, x: s.node("Swish", x)),
    "prelu": (16, lambda s, x: s.node("PRelu", x, s.weight(6, 1, 1))),
    "arithmetic": (13, lambda s, x: s.node("Div", s.node("Sub", x, s.node("Tanh", x)), s.stored(np.float32(3)))),
    "reverse operand": (13, lambda s, x: s.node("Sub", s.stored(np.float32([[[[1.5]]]])), x)),
    "sum of three": (8, lambda s, x: s.node("Sum", x, s.node("Exp", x), s.node("Neg", x))),
    "square and root": (13, lambda s, x: s.node("Sqrt", s.node("Pow", x, s.stored(np.float32(2))))),
    "max with a number": (13, lambda s, x: s.node("Max", s.stored(np.float32(0.1)), x)),
    "dropout attribute": (10, lambda s, x: s.node("Dropout", x, ratio=0.3)),
    "dropout input": (13, lambda s, x: s.node("Dropout", x, s.stored(np.float32(0.3)))),
    "identity and cast": (13, lambda s, x: s.node("Cast", s.node("Identity", x), to=1)),
    "max pool": (12, lambda s, x: s.node("MaxPool", x, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])),
    "max pool ceil": (12, lambda s, x: s.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)),
    "max pool same": (
        12,
        lambda s, x: s.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER"),
    ),
    "average pool": (11, lambda s, x: s.node("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)),
    "average pool padded": (
        11,
        lambda s, x: s.node("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, count_include_pad=1),
    ),
    "average pool ceil": (19, lambda s, x: s.node("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)),
    "global max pool": (13, lambda s, x: s.node("GlobalMaxPool", x)),
    "global average pool": (13, lambda s, x: s.node("GlobalAveragePool", x)),
    "mean axes attribute": (13, lambda s, x: s.node("ReduceMean", x, axes=[-1, -2], keepdims=0)),
    "mean axes input": (18, lambda s, x: s.node("ReduceMean", x, s.stored(np.array([1])), keepdims=1)),
    "sum axes input": (13, lambda s, x: s.node("ReduceSum", x, s.stored(np.array([2, 3])), keepdims=0)),
    "lrn": (13, lambda s, x: s.node("LRN", x, size=5, alpha=0.3, beta=0.7, bias=1.5)),
    "softmax of old": (11, lambda s, x: s.node("Relu", s.node("Softmax", x, axis=1))),
    "softmax of new": (13, lambda s, x: s.node("Neg", s.node("LogSoftmax", x, axis=1))),
    "pad attributes": (10, lambda s, x: s.node("Pad", x, pads=[0, 0, 1, 2, 0, 0, 3, 0], value=0.5)),
    "pad inputs": (13, lambda s, x: s.node("Pad", x, s.stored(np.array([0, 1, 0, 0, 0, 0, 0, 2])))),
    "pad axes": (18, lambda s, x: s.node("Pad", x, s.stored(np.array([1, 2])), "", s.stored(np.array([-1])))),
    "slice attributes": (9, lambda s, x: s.node("Slice", x, starts=[1, -3], ends=[2**31 - 1, -1], axes=[1, 3])),
    "slice steps": (
        13,
        lambda s, x: s.node("Slice", x, *(s.stored(np.array([v])) for v in (1, 2**63 - 1, 2, 2))),
    ),
    "split attribute": (
        11,
        lambda s, x: s.node("Concat", s.node("Split", x, name="p", outputs=2, axis=1), "p.1", axis=2),
    ),
    "split input": (
        13,
        lambda s, x: s.node(
            "Add",
            s.node("Split", x, s.stored(np.array([2, 4])), name="p", outputs=2, axis=1),
            s.node("Slice", "p.1", *(s.stored(np.array([v])) for v in (0, 2, 1))),
        ),
    ),
    "gather one": (13, lambda s, x: s.node("Gather", x, s.stored(np.array(-2)), axis=2)),
    "squeeze": (13, lambda s, x: s.node("Squeeze", s.node("GlobalAveragePool", x), s.stored(np.array([3])))),
    "squeeze attribute": (11, lambda s, x: s.node("Squeeze", s.node("GlobalAveragePool", x), axes=[-1])),
    "squeeze all": (13, lambda s, x: s.node("Squeeze", s.node("GlobalAveragePool", x))),
    "unsqueeze": (13, lambda s, x: s.node("Unsqueeze", x, s.stored(np.array([1])))),
    "transpose": (13, lambda s, x: s.node("Relu", s.node("Transpose", x, perm=[0, 2, 1, 3]))),
    "depth to space": (
        13,
        lambda s, x: s.node("DepthToSpace", s.node("Concat", x, x, axis=1), blocksize=2, mode="CRD"),
    ),
    "space to depth": (
        13,
        lambda s, x: s.node("SpaceToDepth", s.node("Pad", x, s.stored(np.array([0] * 7 + [1]))), blocksize=2),
    ),
    "matmul of data": (13, lambda s, x: s.node("MatMul", x, s.node("Transpose", x, perm=[0, 1, 3, 2]))),
    "dense on rows": (13, lambda s, x: s.node("MatMul", x, s.weight(7, 4))),
    "gemm scaled": (
        13,
        lambda s, x: s.node("Gemm", s.node("Flatten", x), s.weight(3, 336), s.weight(3), transB=1, alpha=0.5, beta=2.0),
    ),
    "convolution dilated": (13, lambda s, x: s.node("Conv", x, s.weight(4, 6, 3, 3), s.weight(4), dilations=[2, 1])),
    "convolution grouped": (13, lambda s, x: s.node("Conv", x, s.weight(9, 2, 2, 3), group=3, pads=[1, 0, 0, 2])),
    "convolution same lower": (13, lambda s, x: s.node("Conv", x, s.weight(4, 6, 3, 2), auto_pad="SAME_LOWER")),
    "convolution of rows": (
        13,
        lambda s, x: s.node(
            "Conv", s.node("Reshape", x, s.stored(np.array([0, 6, -1]))), s.weight(4, 6, 3), s.weight(4)
        ),
    ),
    "batch norm": (9, lambda s, x: s.batch_norm(x, 6)),
    "batch norm of rows": (15, lambda s, x: s.batch_norm(s.node("Flatten", x), 336)),
    "scale and shift": (
        13,
        lambda s, x: s.node("Add", s.node("Mul", x, s.weight(6, 1, 1)), s.weight(1, 6, 1, 1)),
    ),
}


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("constant_nodes", [False, True], ids=["initializers", "constant nodes"])
@pytest.mark.parametrize("case", sorted(OPERATORS))
def test_operator_keeps_its_function(case: str, constant_nodes: bool, tmp_path: Path) -> None:
    opset, draw = OPERATORS[case]
    s = Sketch(["n", 3, 8, 7], opset=opset, constant_nodes=constant_nodes)
    path = s.save(tmp_path / "m.onnx", draw(s, s.node("Conv", "x", s.weight(6, 3, 3, 3), pads=[1, 1, 1, 1])))
    assert_same_function(path, images(3, 3, 8, 7), run=run_onnxruntime)


def shape_arithmetic(s: Sketch, x: str) -> str:
    """[N, C, H, W] -> [N, C * H * W] as old exporters of `x.view(x.size(0), -1)` write it."""
    size = s.node("Gather", s.node("Shape", x), s.stored(np.array(0)), axis=0)
    target = s.node("Concat", s.node("Unsqueeze", size, axes=[0]), s.stored(np.array([-1])), axis=0)
    return s.node("Reshape", x, target)


def shuffle(s: Sketch, x: str) -> str:
    """ShuffleNet's channel shuffle with every size computed."""
    shape = s.node("Cast", s.node("Shape", x), to=7)
    n, height, width = (s.node("Slice", shape, s.stored(np.array([i])), s.stored(np.array([i + 1]))) for i in (0, 2, 3))
    two = s.stored(np.array([2]))
    half = s.node("Div", s.node("Slice", shape, s.stored(np.array([1])), s.stored(np.array([2]))), two)
    split = s.node("Reshape", x, s.node("Concat", n, two, half, height, width, axis=0))
    moved = s.node("Transpose", split, perm=[0, 2, 1, 3, 4])
    return s.node("Reshape", moved, s.node("Concat", n, s.stored(np.array([-1])), height, width, axis=0))


@pytest.mark.parametrize("batch", ["n", 1, 3], ids=["dynamic", "fixed to 1", "fixed to 3"])
@pytest.mark.parametrize("draw", [shape_arithmetic, shuffle])
def test_shape_arithmetic_is_folded(draw: Draw, batch: str | int, tmp_path: Path) -> None:
    s = Sketch([batch, 3, 6, 6], opset=11)
    path = s.save(tmp_path / "m.onnx", draw(s, s.node("Conv", "x", s.weight(4, 3, 3, 3))))
    model = assert_same_function(path, images(3, 3, 6, 6), one_by_one=batch == 1)
    assert model.tensors[model.output].shape[0] == BATCH and "reshape" in operators_of(model)


@pytest.mark.parametrize("target", [[1, 64], [1, -1], [-1, 64], [0, -1]])
def test_fixed_batch_baked_into_a_reshape_becomes_symbolic(target: list[int], tmp_path: Path) -> None:
    s = Sketch([1, 3, 6, 6])
    x = s.node("Reshape", s.node("Conv", "x", s.weight(4, 3, 3, 3)), s.stored(np.array(target)))
    path = s.save(tmp_path / "m.onnx", s.node("Gemm", x, s.weight(64, 5), s.weight(1, 5)))
    model = assert_same_function(path, images(4, 3, 6, 6), one_by_one=True)
    assert model.tensors[model.output].shape == (BATCH, 5)


def test_weights_that_are_reshaped_or_transposed_keep_their_names(tmp_path: Path) -> None:
    s = Sketch(["n", 8])
    x = s.node("MatMul", "x", s.node("Transpose", s.weight(6, 8, name="first.weight"), perm=[1, 0]))
    x = s.node("Add", x, s.node("Squeeze", s.weight(1, 6, name="first.bias"), s.stored(np.array([0]))))
    model = assert_same_function(s.save(tmp_path / "m.onnx", x), images(2, 8))
    assert set(model.parameters) == {"first.weight", "first.bias"}
    assert model.metadata["weight_layout"]["first.weight"] == "kn"


def test_one_weight_used_twice_stays_one_weight_but_batch_norms_never_share(tmp_path: Path) -> None:
    s = Sketch(["n", 4, 5, 5])
    weight = s.weight(4, 4, 1, 1, name="shared")
    ones, zeros = s.stored(np.ones(4, np.float32), "ones"), s.stored(np.zeros(4, np.float32), "zeros")
    x = "x"
    for _ in range(2):
        x = s.node("BatchNormalization", s.node("Conv", x, weight), ones, zeros, zeros, ones)
    model = assert_same_function(s.save(tmp_path / "m.onnx", x), images(2, 4, 5, 5))
    assert sum(array.ndim == 4 for array in model.parameters.values()) == 1
    assert len(model.parameters) == 1 + 4 and len(model.states) == 4


def test_half_precision_weights_are_trained_in_single_precision(tmp_path: Path) -> None:
    s = Sketch(["n", 4])
    s.inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, ["n", 4])]
    path = s.save(tmp_path / "m.onnx", s.node("MatMul", "x", s.stored(np.eye(4, 3, dtype=np.float16) / 3)))
    model, result = imported(path, images(2, 4))
    assert {a.dtype for a in model.parameters.values()} == {np.dtype(np.float32)} and result.shape == (2, 3)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_keras_graph_runs_channels_first(softmax: bool, flatten: bool, tmp_path: Path) -> None:
    path = keras_style(tmp_path / "k.onnx", softmax=softmax, flatten=flatten)
    model = assert_same_function(path, images(3, 12, 10, 3))
    assert model.input_shape == (3, 12, 10) and model.metadata["input_layout"] == "nhwc"
    assert operators_of(model).get("transpose", 0) == (1 if flatten else 0)
    assert "pad" not in operators_of(model)
    assert model.metadata["softmax_removed"] == softmax


def test_keras_rescaling_is_not_trained_and_follows_the_layout(tmp_path: Path) -> None:
    s = Sketch(["n", "h", "w", 3])
    x = s.node("Mul", "x", s.stored(np.float32(1 / 127.5)))
    x = s.node("Transpose", s.node("Sub", x, s.stored(np.float32([0.1, 0.2, 0.3]))), perm=[0, 3, 1, 2])
    x = s.node("GlobalAveragePool", s.node("Conv", x, s.weight(4, 3, 3, 3, name="kernel")))
    path = s.save(tmp_path / "m.onnx", x)
    model = assert_same_function(path, images(2, 9, 8, 3), input_shape=(3, 9, 8))
    assert set(model.parameters) == {"kernel"} and model.input_shape == (3, 9, 8)
    assert sorted(array.shape for array in model.constants.values()) == [(1,), (3, 1, 1)]
    assert "transpose" not in operators_of(model)


def test_attention_is_imported(tmp_path: Path) -> None:
    """Batched products, transposes that stay, softmax in the middle."""
    s = Sketch(["n", 6, 8])

    def heads(name: str) -> str:
        x = s.node("Add", s.node("MatMul", "x", s.weight(8, 8)), s.weight(8))
        return s.node("Transpose", s.node("Reshape", x, s.stored(np.array([0, 6, 2, 4]))), perm=[0, 2, 1, 3], name=name)

    scores = s.node("MatMul", heads("q"), s.node("Transpose", heads("k"), perm=[0, 1, 3, 2]))
    scores = s.node("Softmax", s.node("Mul", scores, s.stored(np.float32(0.5))), axis=-1)
    x = s.node("Transpose", s.node("MatMul", scores, heads("v")), perm=[0, 2, 1, 3])
    x = s.node("MatMul", s.node("Reshape", x, s.stored(np.array([0, 6, 8]))), s.weight(8, 5))
    model = assert_same_function(s.save(tmp_path / "m.onnx", x), images(3, 6, 8))
    assert operators_of(model)["matmul"] == 2 and not model.metadata["softmax_removed"]


def test_a_function_of_the_file_is_inlined(tmp_path: Path) -> None:
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("local", 1)]
    body = [onnx.helper.make_node("Relu", ["a"], ["b"]), onnx.helper.make_node("Neg", ["b"], ["c"])]
    function = onnx.helper.make_function("local", "NegRelu", ["a"], ["c"], body, opsets[:1])
    s = Sketch(["n", 4])
    proto = s.model(s.node("NegRelu", s.node("MatMul", "x", s.weight(4, 3)), domain="local"))
    proto.functions.append(function)
    proto.opset_import.append(opsets[1])
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    assert operators_of(assert_same_function(path, images(2, 4))) == {"dense": 1, "relu": 1, "neg": 1}


def randomised(source: Path, path: Path) -> Path:
    """A `light` file with weights instead of its constants, so that outputs tell the paths through it apart."""
    model, random = onnx.load(source), np.random.default_rng(0)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    variances = {n.input[4] for n in model.graph.node if n.op_type == "BatchNormalization"}

    def values(name: str, shape: tuple[int, ...]) -> Array:
        spread = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.2
        array = random.uniform(0.5, 1.5, shape) if name in variances else random.standard_normal(shape) * spread
        return np.asarray(array + (1.0 if len(shape) == 1 and "scale" in name else 0.0), np.float32)

    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(d) for d in shapes[node.input[0]])
        model.graph.initializer.append(numpy_helper.from_array(values(node.output[0], shape), node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, path)
    return path


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("name", ["densenet121", "inception_v1", "inception_v2", "shufflenet", "squeezenet"])
def test_model_of_the_onnx_package_equals_onnxruntime(name: str, tmp_path: Path) -> None:
    path = randomised(LIGHT / f"light_{name}.onnx", tmp_path / "m.onnx")
    assert_same_function(path, images(1, 3, 224, 224), run=run_onnxruntime)


@pytest.mark.parametrize("name", ["resnet50", "vgg19"])
def test_large_model_of_the_onnx_package_is_imported(name: str) -> None:
    model = load_model(LIGHT / f"light_{name}.onnx")
    assert model.classes == 1000 and model.metadata["softmax_removed"]
    assert model.metadata["folded_batch_norm"] == (name == "vgg19")


def test_model_with_constant_weights_is_seeded() -> None:
    model = load_model(LIGHT / "light_bvlc_alexnet.onnx", init="seeded")
    assert all(np.ptp(a) > 0 for a in model.parameters.values())
    values = numpy_forward(model, images(1, 3, 224, 224, seed=1))
    spreads = [float(values[n.outputs[0]].std()) for n in model.nodes if n.op in ("conv2d", "dense")]
    wanted = [1.0] * 5 + [0.5] * 2 + [0.05]
    assert all(0.5 * w < spread < 2 * w for w, spread in zip(wanted, spreads, strict=True)), spreads


@pytest.mark.needs("torch", "onnxscript")
@pytest.mark.parametrize(
    "exporter", ["dynamo, external data", "dynamo, fixed batch", "torchscript", "opset 9, fixed batch"]
)
def test_inference_export_of_resnet_equals_pytorch(exporter: str, tmp_path: Path) -> None:
    path = tmp_path / "resnet.onnx"
    name = "resnet8" if "fixed" in exporter else "resnet18"
    module, x = _pretrained(name), images(3, 3, 16, 16)
    _export(module.eval(), path, exporter)
    model, result = imported(path, x)
    import torch

    with torch.no_grad():
        wanted = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))
    assert model.metadata["folded_batch_norm"] and len(model.blocks) == (5 if name == "resnet8" else 10)


@pytest.mark.needs("torch", "onnxscript")
def test_training_export_keeps_batch_norms_and_names(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "resnet.onnx"
    module, x = _pretrained("resnet8"), images(4, 3, 16, 16)
    options: dict[str, Any] = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.train(), (torch.from_numpy(x),), path, dynamo=False, **options)
    model = load_model(path)
    wanted = {k for k in module.state_dict() if not k.endswith("num_batches_tracked")}
    assert {*model.parameters, *model.states} == wanted and not model.metadata["folded_batch_norm"]
    # Exporting in training mode runs the module once and moves its statistics; those of the batch do not depend on it.
    with torch.no_grad():
        wanted_output = module(torch.from_numpy(x)).numpy()
    values = numpy_forward(model, x, training=True)[model.output]
    np.testing.assert_allclose(values, wanted_output, rtol=0, atol=1e-4 * float(np.abs(wanted_output).max()))


@pytest.mark.needs("onnxruntime", "rapidocr")
def test_text_direction_model_of_rapidocr_equals_onnxruntime() -> None:
    files = metadata.files("rapidocr") or []
    path = next(Path(str(f.locate())) for f in files if f.name == "ch_ppocr_mobile_v2.0_cls_mobile.onnx")
    assert_same_function(path, images(2, 3, 48, 192), run=run_onnxruntime, input_shape=(3, 48, 192))


def _pretrained(name: str) -> Any:
    """A zoo module with running statistics that are not the initial ones."""
    import torch

    from tests.torch_zoo import build_torch

    torch.manual_seed(0)
    module = build_torch(name)
    with torch.no_grad():
        module(torch.randn(16, 3, 16, 16))
    return module


def _export(module: Any, path: Path, exporter: str) -> None:
    import torch

    x = torch.zeros(1 if "fixed" in exporter else 2, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter.startswith("dynamo"):
            free = None if "fixed" in exporter else {"x": {0: torch.export.Dim("n")}}
            torch.onnx.export(
                module, (x,), path, dynamo=True, dynamic_shapes=free, verbose=False, external_data=free is not None
            )
        elif "fixed" in exporter:
            torch.onnx.export(module, (x,), path, dynamo=False, opset_version=9)
        else:
            names: dict[str, Any] = {"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
            torch.onnx.export(module, (x,), path, dynamo=False, **names)
