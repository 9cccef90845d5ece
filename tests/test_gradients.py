"""Every operator's forward value and gradients against PyTorch in float64, at two batch sizes, fused and not.

A case is one operator between x * scale + shift (so that a gradient flows through the operator's input) and a mean squared
error. The relative L2 error of every parameter's gradient is at most 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cross.graph import BATCH, Block, Model, Node, TensorType
from cross.rules.context import gradient_name
from tests.run_program import Array, lower_model, run_program

torch = pytest.importorskip("torch")
functional = torch.nn.functional

pytestmark = pytest.mark.needs("torch")


@dataclass(frozen=True)
class Case:
    name: str
    op: str
    shape: tuple[int, ...]
    output: tuple[int, ...]
    oracle: Callable[..., Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    twice: bool = False
    """The operator also reads the unscaled input as its second argument."""


def conv(**changes: Any) -> dict[str, Any]:
    return {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "groups": 1, **changes}


def pool(kernel: int, stride: int, pads: tuple[int, int, int, int] = (0, 0, 0, 0), **more: Any) -> dict[str, Any]:
    return {"kernel": (kernel, kernel), "strides": (stride, stride), "pads": pads, "ceil_mode": False, **more}


def unary(name: str, oracle: Callable[[Any], Any], **attrs: Any) -> Case:
    return Case(f"{name} {attrs}" if attrs else name, name, (10, 5, 6), (10, 5, 6), oracle, attrs)


IMAGE = (10, 5, 6)
BRIEF = ("clip", "exp", "erf", "gelu", "neg", "tanh", "leak", "hard", "sub", "sqrt")
"""Element-wise cases that would repeat `relu` and `silu` on blocks of channels."""

CASES = [
    unary("relu", torch.relu),
    unary("clip", lambda x: x.clamp(0, 0.5), min=0.0, max=0.5),
    unary("clip", lambda x: x.clamp(min=-0.2), min=-0.2, max=math.inf),
    unary("leaky_relu", lambda x: functional.leaky_relu(x, 0.1), alpha=0.1),
    unary("sigmoid", torch.sigmoid),
    unary("tanh", torch.tanh),
    unary("exp", torch.exp),
    unary("neg", torch.neg),
    unary("silu", functional.silu),
    unary("hard_swish", functional.hardswish),
    unary("erf", torch.erf),
    unary("gelu", functional.gelu, approximate="none"),
    unary("gelu", lambda x: functional.gelu(x, approximate="tanh"), approximate="tanh"),
    unary("hard_sigmoid", lambda x: (x * 0.2 + 0.5).clamp(0, 1), alpha=0.2, beta=0.5),
    Case("sqrt of a square", "mul", IMAGE, IMAGE, lambda x, y: x * y, twice=True),
    Case("add", "add", IMAGE, IMAGE, lambda x, y: x + y, twice=True),
    Case("sub", "sub", IMAGE, IMAGE, lambda x, y: x - y, twice=True),
    Case("div by a parameter", "div", IMAGE, IMAGE, lambda x, w: x / w, parameters={"w": (10, 1, 1)}),
    Case("mul by a channel", "mul", IMAGE, IMAGE, lambda x, w: x * w, parameters={"w": (10, 1, 1)}),
    Case("add a row", "add", (7,), (7,), lambda x, w: x + w, parameters={"w": (7,)}),
    Case("add an image", "add", IMAGE, IMAGE, lambda x, w: x + w, parameters={"w": IMAGE}),
    Case("dense", "dense", (13,), (5,), lambda x, w: x @ w.T, parameters={"w": (5, 13)}),
    Case("dense on tokens", "dense", (3, 16), (3, 9), lambda x, w: x @ w.T, parameters={"w": (9, 16)}),
    Case("dense on many tokens", "dense", (20, 16), (20, 9), lambda x, w: x @ w.T, parameters={"w": (9, 16)}),
    Case("conv 3x3", "conv2d", IMAGE, (12, 5, 6), lambda x, w: functional.conv2d(x, w, padding=1),
         conv(pads=(1, 1, 1, 1)), {"w": (12, 10, 3, 3)}),
    Case("conv stride 2, one-sided pads", "conv2d", (8, 7, 7), (16, 4, 4),
         lambda x, w: functional.conv2d(functional.pad(x, (0, 1, 0, 1)), w, stride=2),
         conv(strides=(2, 2), pads=(0, 0, 1, 1)), {"w": (16, 8, 2, 2)}),
    Case("conv dilated", "conv2d", (8, 7, 7), (8, 7, 7), lambda x, w: functional.conv2d(x, w, padding=2, dilation=2),
         conv(pads=(2, 2, 2, 2), dilations=(2, 2)), {"w": (8, 8, 3, 3)}),
    Case("conv depthwise", "conv2d", IMAGE, IMAGE, lambda x, w: functional.conv2d(x, w, padding=1, groups=10),
         conv(pads=(1, 1, 1, 1), groups=10), {"w": (10, 1, 3, 3)}),
    Case("conv in groups", "conv2d", (6, 5, 5), (9, 5, 5), lambda x, w: functional.conv2d(x, w, padding=1, groups=3),
         conv(pads=(1, 1, 1, 1), groups=3), {"w": (9, 2, 3, 3)}),
    Case("max pool", "max_pool2d", IMAGE, (10, 2, 3), lambda x: functional.max_pool2d(x, 2, 2), pool(2, 2)),
    Case("max pool overlapping", "max_pool2d", (10, 7, 7), (10, 4, 4), lambda x: functional.max_pool2d(x, 3, 2, 1),
         pool(3, 2, (1, 1, 1, 1))),
    Case("avg pool", "avg_pool2d", IMAGE, (10, 2, 3), lambda x: functional.avg_pool2d(x, 2, 2),
         pool(2, 2, count_include_pad=False)),
    Case("avg pool, pads not counted", "avg_pool2d", IMAGE, (10, 5, 6),
         lambda x: functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
         pool(3, 1, (1, 1, 1, 1), count_include_pad=False)),
    Case("avg pool, pads counted", "avg_pool2d", IMAGE, (10, 5, 6), lambda x: functional.avg_pool2d(x, 3, 1, 1),
         pool(3, 1, (1, 1, 1, 1), count_include_pad=True)),
    Case("global mean", "reduce_mean", IMAGE, (10, 1, 1), lambda x: x.mean((2, 3), keepdim=True),
         {"axes": (2, 3), "keepdims": True}),
    Case("mean without dimensions", "reduce_mean", IMAGE, (10,), lambda x: x.mean((2, 3)),
         {"axes": (2, 3), "keepdims": False}),
    Case("sum over channels", "reduce_sum", IMAGE, (1, 5, 6), lambda x: x.sum(1, keepdim=True),
         {"axes": (1,), "keepdims": True}),
    Case("softmax", "softmax", (3, 7), (3, 7), lambda x: x.softmax(-1), {"axis": 2}),
    Case("softmax over channels", "softmax", IMAGE, IMAGE, lambda x: x.softmax(1), {"axis": 1}),
    Case("log softmax", "log_softmax", (9,), (9,), lambda x: x.log_softmax(-1), {"axis": 1}),
    Case("layer norm", "layer_norm", (5, 24), (5, 24), lambda x, g, b: functional.layer_norm(x, (24,), g, b, 1e-5),
         {"eps": 1e-5}, {"g": (24,), "b": (24,)}),
    Case("layer norm, ragged, no shift", "layer_norm", (3, 13), (3, 13),
         lambda x, g: functional.layer_norm(x, (13,), g, None, 1e-3), {"eps": 1e-3}, {"g": (13,)}),
    Case("layer norm of rows", "layer_norm", (40,), (40,), lambda x, g, b: functional.layer_norm(x, (40,), g, b, 1e-5),
         {"eps": 1e-5}, {"g": (40,), "b": (40,)}),
    Case("bias of tokens", "add", (6, 16), (6, 16), lambda x, w: x + w, parameters={"w": (16,)}),
    Case("lrn", "lrn", IMAGE, IMAGE, lambda x: functional.local_response_norm(x, 5, 0.5, 0.75, 1.0),
         {"size": 5, "alpha": 0.5, "beta": 0.75, "bias": 1.0}),
    Case("pad", "pad", IMAGE, (10, 8, 7), lambda x: functional.pad(x, (0, 1, 2, 1), value=0.5),
         {"pads": ((0, 0), (0, 0), (2, 1), (0, 1)), "value": 0.5}),
    Case("reshape", "reshape", IMAGE, (300,), lambda x: x.flatten(1), {"shape": (BATCH, 300)}),
    Case("transpose", "transpose", IMAGE, (5, 6, 10), lambda x: x.permute(0, 2, 3, 1), {"perm": (0, 2, 3, 1)}),
    Case("concat channels", "concat", IMAGE, (20, 5, 6), lambda x, y: torch.cat([x, y], 1), {"axis": 1}, twice=True),
    Case("slice", "slice", IMAGE, (4, 5, 3), lambda x: x[:, 3:7, :, ::2],
         {"starts": (0, 3, 0, 0), "ends": (2**31, 7, 5, 6), "steps": (1, 1, 1, 2)}),
    Case("matmul with itself", "matmul", (4, 6, 6), (4, 6, 6), lambda x, y: x @ y, twice=True),
]  # fmt: skip


def blocked_model_of(case: Case, rng: np.random.Generator) -> Model:
    """input -> x = 1x1 convolution -> operator -> output: images are then stored in blocks of channels, the last one ragged."""
    plain = model_of(case, rng)
    channels = case.shape[0]
    weight = (rng.standard_normal((channels, channels, 1, 1)) / np.sqrt(channels)).astype("float32")
    nodes = (Node("conv2d", ("input", "mix"), ("x",), conv()), plain.nodes[-1])
    parameters = {n: plain.parameters[n] for n in case.parameters} | {"mix": weight}
    tensors = {**plain.tensors, "mix": TensorType(weight.shape)}
    block = Block("all", 0, 2, "input", "y")
    return replace(plain, nodes=nodes, parameters=parameters, tensors=tensors, blocks=(block,))


def model_of(case: Case, rng: np.random.Generator) -> Model:
    """input -> x = input * scale + shift -> operator -> output."""
    batched = TensorType((BATCH, *case.shape))
    shapes = {"scale": case.shape, "shift": case.shape, **case.parameters}
    parameters = {n: (rng.standard_normal(s) * 0.7 + 0.1).astype("float32") for n, s in shapes.items()}
    if case.op == "div":
        parameters["w"] = np.abs(parameters["w"]) + np.float32(0.5)
    tensors = {"input": batched, "scaled": batched, "x": batched, "y": TensorType((BATCH, *case.output))}
    tensors |= {n: TensorType(s) for n, s in shapes.items()}
    inputs = ("x", "input") if case.twice else ("x", *case.parameters)
    nodes = (
        Node("mul", ("input", "scale"), ("scaled",)),
        Node("add", ("scaled", "shift"), ("x",)),
        Node(case.op, inputs, ("y",), case.attrs, case.name),
    )
    block = Block("all", 0, 3, "input", "y")
    return Model("case", nodes, tensors, "input", "y", parameters, {}, {}, {}, (block,))


def relative(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_operator_matches_pytorch(case: Case) -> None:
    rng = np.random.default_rng(len(case.name))
    check_against_pytorch(case, model_of(case, rng), rng, ((3, True), (2, False)))


BLOCKED = [
    c for c in CASES if c.op not in ("conv2d", "dense", "matmul") and len(c.shape) == 3 and c.name[:4] not in BRIEF
]


@pytest.mark.parametrize("case", BLOCKED, ids=lambda c: c.name)
def test_operator_on_blocks_of_channels_matches_pytorch(case: Case) -> None:
    rng = np.random.default_rng(len(case.name))
    check_against_pytorch(case, blocked_model_of(case, rng), rng, ((3, True),))


def check_against_pytorch(
    case: Case, model: Model, rng: np.random.Generator, runs: tuple[tuple[int, bool], ...]
) -> None:
    """Output, loss rows and every gradient; `runs` are (batch, fused)."""
    for batch, fusion in runs:
        x = rng.standard_normal((batch, *case.shape)).astype("float32")
        target = rng.standard_normal((batch, *case.output)).astype("float32")
        leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in model.parameters.items()}
        source = torch.tensor(x, dtype=torch.float64)
        if "mix" in leaves:
            inner = functional.conv2d(source, leaves["mix"])
        else:
            inner = source * leaves["scale"] + leaves["shift"]
        others = [source] if case.twice else [leaves[n] for n in case.parameters]
        y = case.oracle(inner, *others)
        rows = (y - torch.tensor(target, dtype=torch.float64)).square().flatten(1).mean(1)
        rows.mean().backward()
        kernels = lower_model(model, "mse", fusion=fusion)
        values = {**model.parameters, "input": x, "target": target, "loss_scale": np.float32([1 / batch])}
        found, _ = run_program(kernels, "train", values, batch)
        assert relative(found["y"], y.detach().numpy()) < 1e-5
        assert relative(found["loss"], rows.detach().numpy()) < 1e-5
        for name, leaf in leaves.items():
            assert relative(found[gradient_name(name)], leaf.grad.numpy()) < 1e-5, name


def batch_norm_model(shape: tuple[int, ...], rng: np.random.Generator) -> Model:
    """input -> batch norm -> relu; the input gradient is seen through a scale before it."""
    channels = shape[0]
    batched = TensorType((BATCH, *shape))
    parameters = {
        "scale": (rng.standard_normal(shape) + 1).astype("float32"),
        "gamma": (rng.standard_normal(channels) + 1).astype("float32"),
        "beta": rng.standard_normal(channels).astype("float32"),
    }
    states = {"mean": np.zeros(channels, "float32"), "var": np.ones(channels, "float32")}
    tensors = {name: batched for name in ("input", "x", "z", "y")}
    tensors |= {n: TensorType(a.shape) for n, a in {**parameters, **states}.items()}
    nodes = (
        Node("mul", ("input", "scale"), ("x",)),
        Node("batch_norm", ("x", "gamma", "beta", "mean", "var"), ("z",), {"eps": 1e-5, "momentum": 0.1}),
        Node("relu", ("z",), ("y",)),
    )
    block = Block("all", 0, 3, "input", "y")
    return Model("bn", nodes, tensors, "input", "y", parameters, states, {}, {}, (block,))


@pytest.mark.parametrize("shape", [(10, 6, 5), (16, 1, 1), (12,)], ids=str)
def test_batch_norm_matches_pytorch(shape: tuple[int, ...]) -> None:
    """Values, gradients and running statistics, with a mean far from zero (which E[x^2] - mean^2 would not survive)."""
    rng, batch = np.random.default_rng(5), 5
    model = batch_norm_model(shape, rng)
    mean = 30 if shape[1:] > (1, 1) else 2
    x = (rng.standard_normal((batch, *shape)) + mean).astype("float32")
    target = rng.standard_normal((batch, *shape)).astype("float32")
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in model.parameters.items()}
    running = {n: torch.tensor(a, dtype=torch.float64) for n, a in model.states.items()}
    inner = torch.tensor(x, dtype=torch.float64) * leaves["scale"]
    normal = functional.batch_norm(inner, running["mean"], running["var"], leaves["gamma"], leaves["beta"], True, 0.1)
    y = normal.relu()
    (y - torch.tensor(target, dtype=torch.float64)).square().flatten(1).mean(1).mean().backward()
    values = {**model.parameters, **model.states, "input": x, "target": target, "loss_scale": np.float32([1 / batch])}
    found, _ = run_program(lower_model(model, "mse"), "train", values, batch)
    assert relative(found["y"], y.detach().numpy()) < 1e-5
    for name in running:
        assert relative(found[name], running[name].numpy()) < 1e-5
    # eval with statistics that are not the initial ones
    moved = {
        "mean": rng.standard_normal(shape[0]).astype("float32"),
        "var": rng.random(shape[0]).astype("float32") + 0.5,
    }
    with torch.no_grad():
        statistics = [torch.tensor(moved[n], dtype=torch.float64) for n in ("mean", "var")]
        wanted = functional.batch_norm(inner, *statistics, leaves["gamma"], leaves["beta"], False).relu().numpy()
    seen, _ = run_program(lower_model(model, "mse"), "eval", {**model.parameters, **moved, "input": x}, batch)
    assert relative(seen["y"], wanted) < 1e-5
    # Without pixels the output hardly depends on `scale` (batch norm undoes it): that gradient is compared to gamma's size.
    size = np.linalg.norm(leaves["gamma"].grad.numpy())
    for name, leaf in leaves.items():
        wanted = leaf.grad.numpy()
        error = np.linalg.norm(found[gradient_name(name)] - wanted)
        assert error <= 3e-5 * max(np.linalg.norm(wanted), size), name


def test_dropout_keeps_its_share_and_masks_the_gradient_alike() -> None:
    shape, batch, ratio = (64, 5, 5), 8, 0.3
    batched = TensorType((BATCH, *shape))
    nodes = (
        Node("mul", ("input", "scale"), ("x",)),
        Node("dropout", ("x",), ("y",), {"ratio": ratio}),
    )
    tensors = {"input": batched, "x": batched, "y": batched, "scale": TensorType(shape)}
    model = Model("drop", nodes, tensors, "input", "y", {"scale": np.ones(shape, "float32")}, {}, {}, {},
                  (Block("all", 0, 2, "input", "y"),))  # fmt: skip
    x = np.ones((batch, *shape), "float32")
    values = {"scale": model.parameters["scale"], "input": x, "target": np.zeros_like(x),
              "loss_scale": np.float32([1.0]), "dropout_counter": np.uint32([7, 0, 0, 0])}  # fmt: skip
    kernels = lower_model(model, "mse")
    found, _ = run_program(kernels, "train", values, batch)
    mask = found["y"] != 0
    assert abs(mask.mean() - (1 - ratio)) < 0.02
    np.testing.assert_allclose(found["y"][mask], 1 / (1 - ratio), rtol=1e-6)
    slope = 2 / x[0].size * found["y"] / (1 - ratio) * mask
    np.testing.assert_allclose(found[gradient_name("scale")], slope.sum(0), rtol=1e-4)
    values["dropout_counter"] = np.uint32([7, 1, 0, 0])
    other, _ = run_program(kernels, "train", values, batch)
    assert 0.3 < (mask == (other["y"] != 0)).mean() < 0.7
    np.testing.assert_array_equal(run_program(kernels, "eval", values, batch)[0]["y"], x)


def test_pooling_between_plain_and_blocked_neighbours_matches_pytorch() -> None:
    """A grouped convolution leaves its output plain; what follows the pooling wants blocks: a copy goes in between."""
    rng, batch = np.random.default_rng(8), 2
    shapes = {"x": (6, 8, 8), "g": (6, 8, 8), "p": (6, 4, 4), "y": (10, 4, 4)}
    weights = {"wg": (6, 2, 3, 3), "wy": (10, 6, 1, 1)}
    parameters = {n: (rng.standard_normal(s) * 0.4).astype("float32") for n, s in weights.items()}
    tensors = {n: TensorType((BATCH, *s)) for n, s in shapes.items()} | {n: TensorType(s) for n, s in weights.items()}
    nodes = (
        Node("conv2d", ("x", "wg"), ("g",), conv(pads=(1, 1, 1, 1), groups=3)),
        Node("max_pool2d", ("g",), ("p",), pool(2, 2)),
        Node("conv2d", ("p", "wy"), ("y",), conv()),
    )
    model = Model("pool", nodes, tensors, "x", "y", parameters, {}, {}, {}, (Block("all", 0, 3, "x", "y"),))
    x = rng.standard_normal((batch, 6, 8, 8)).astype("float32")
    target = rng.standard_normal((batch, 10, 4, 4)).astype("float32")
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in parameters.items()}
    inner = functional.conv2d(torch.tensor(x, dtype=torch.float64), leaves["wg"], padding=1, groups=3)
    y = functional.conv2d(functional.max_pool2d(inner, 2, 2), leaves["wy"])
    (y - torch.tensor(target, dtype=torch.float64)).square().flatten(1).mean(1).mean().backward()
    values = {**parameters, "x": x, "target": target, "loss_scale": np.float32([1 / batch])}
    found, _ = run_program(lower_model(model, "mse"), "train", values, batch)
    assert relative(found["y"], y.detach().numpy()) < 1e-5
    for name, leaf in leaves.items():
        assert relative(found[gradient_name(name)], leaf.grad.numpy()) < 1e-5, name
