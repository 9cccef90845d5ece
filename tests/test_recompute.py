"""Recomputation: the same bits from less memory, and nothing kept longer for it."""

from __future__ import annotations

import numpy as np
import pytest

from cross.assign_storage import assign_storage
from cross.graph import BATCH, Block, Model, Node, TensorType
from cross.load_model import load_model
from cross.lower import Kernels, lower
from cross.plan import plan_memory
from cross.program_graph import ProgramGraph
from cross.recompute import LEVELS
from cross.tables import has_joined_backward
from cross.target import find_target
from cross.training_graph import build_training_graph
from tests.run_program import HOST, run_program

CHANNELS, SIZE, BATCH_SIZE = 8, 4, 3
CONVOLUTION = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1), "groups": 1}


def _block_model() -> Model:
    """conv -> batch norm -> relu -> conv: what a residual block is made of."""
    rng = np.random.default_rng(3)
    image = TensorType((BATCH, CHANNELS, SIZE, SIZE))
    parameters = {name: rng.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype("float32") for name in ("w1", "w2")}
    parameters |= {name: rng.uniform(0.5, 1.5, CHANNELS).astype("float32") for name in ("gamma", "beta")}
    states = {"mean": np.zeros(CHANNELS, "float32"), "var": np.ones(CHANNELS, "float32")}
    tensors = dict.fromkeys(("input", "a", "b", "c", "y"), image)
    tensors |= {n: TensorType(array.shape) for n, array in {**parameters, **states}.items()}
    nodes = (
        Node("conv2d", ("input", "w1"), ("a",), CONVOLUTION),
        Node("batch_norm", ("a", "gamma", "beta", "mean", "var"), ("b",), {"eps": 1e-5, "momentum": 0.1}),
        Node("relu", ("b",), ("c",)),
        Node("conv2d", ("c", "w2"), ("y",), CONVOLUTION),
    )
    block = Block("all", 0, len(nodes), "input", "y")
    return Model("block", nodes, tensors, "input", "y", parameters, states, {}, {}, (block,))


def _lowered(model: Model, loss: str, recomputation: str) -> Kernels:
    target = find_target(HOST)
    training = build_training_graph(model, loss, recomputation=recomputation)
    return lower(assign_storage(training, target), target)


def test_bits_stay_and_the_result_is_made_again() -> None:
    model, rng = _block_model(), np.random.default_rng(4)
    values = {**model.parameters, **model.states, "loss_scale": np.float32([1 / BATCH_SIZE])}
    for name in ("input", "target"):
        values[name] = rng.standard_normal((BATCH_SIZE, CHANNELS, SIZE, SIZE)).astype("float32")
    kept, _ = run_program(_lowered(model, "mse", "none"), "train", values, BATCH_SIZE)
    again, program = run_program(_lowered(model, "mse", "cheap"), "train", values, BATCH_SIZE)
    assert "c:again" in program.stored.graph.tensors
    assert np.array_equal(again["c:again"], kept["c"])
    for name, array in kept.items():
        if name in again:
            np.testing.assert_array_equal(again[name], array, err_msg=name)


def _spans(program: ProgramGraph) -> dict[str, tuple[str, str]]:
    """First and last node that touch a tensor, named by what they make."""
    found: dict[str, tuple[str, str]] = {}
    for node in program.nodes:
        for name in (*node.inputs, *node.outputs):
            found[name] = (found.get(name, (node.outputs[0], ""))[0], node.outputs[0])
    return found


@pytest.mark.parametrize(("name", "most"), [("resnet18", 0.8), ("mobilenetv2", 0.55)])
def test_memory_falls_and_nothing_else_is_kept_longer(name: str, most: float) -> None:
    model = load_model(name)
    before, after = _lowered(model, "cross_entropy", "none"), _lowered(model, "cross_entropy", "cheap")
    sizes = [plan_memory(kernels).programs[0].batched.size_bytes for kernels in (before, after)]
    assert sizes[1] <= most * sizes[0]
    graphs = [kernels.programs[0].stored.graph for kernels in (before, after)]
    old, new = (_spans(graph) for graph in graphs)
    made_again = {tensor.removesuffix(":again") for tensor in new if tensor.endswith(":again")}
    assert made_again
    types = graphs[1].tensors
    for tensor in set(old) & set(new) - made_again:
        if types[tensor].batched:
            assert new[tensor][1].removesuffix(":again") == old[tensor][1], tensor


def _residual_model() -> Model:
    """A stem and two residual blocks: conv -> batch norm -> add -> relu."""
    rng = np.random.default_rng(5)
    image = TensorType((BATCH, CHANNELS, SIZE, SIZE))
    parameters: dict[str, np.ndarray] = {}
    states: dict[str, np.ndarray] = {}
    nodes: list[Node] = []
    blocks, before = [], "input"
    for i in range(3):
        first = len(nodes)
        parameters[f"w{i}"] = rng.standard_normal((CHANNELS, CHANNELS, 3, 3)).astype("float32") / 8
        parameters |= {f"{name}{i}": rng.uniform(0.5, 1.5, CHANNELS).astype("float32") for name in ("gamma", "beta")}
        states |= {f"mean{i}": np.zeros(CHANNELS, "float32"), f"var{i}": np.ones(CHANNELS, "float32")}
        norm = tuple(f"{name}{i}" for name in ("gamma", "beta", "mean", "var"))
        nodes.append(Node("conv2d", (before, f"w{i}"), (f"a{i}",), CONVOLUTION, block=i))
        nodes.append(Node("batch_norm", (f"a{i}", *norm), (f"b{i}",), {"eps": 1e-5, "momentum": 0.1}, block=i))
        total = f"b{i}"
        if i:
            total = f"s{i}"
            nodes.append(Node("add", (f"b{i}", before), (total,), block=i))
        nodes.append(Node("relu", (total,), (f"y{i}",), block=i))
        blocks.append(Block(f"block{i}", first, len(nodes), before, f"y{i}"))
        before = f"y{i}"
    tensors = dict.fromkeys(("input", *(name for node in nodes for name in node.outputs)), image)
    tensors |= {n: TensorType(array.shape) for n, array in {**parameters, **states}.items()}
    return Model("residual", tuple(nodes), tensors, "input", before, parameters, states, {}, {}, tuple(blocks))


def test_outputs_of_blocks_are_made_again_with_the_same_bits() -> None:
    model, rng = _residual_model(), np.random.default_rng(6)
    values = {**model.parameters, **model.states, "loss_scale": np.float32([1 / BATCH_SIZE])}
    for name in ("input", "target"):
        values[name] = rng.standard_normal((BATCH_SIZE, CHANNELS, SIZE, SIZE)).astype("float32")
    lowered = {level: _lowered(model, "mse", level) for level in LEVELS}
    results = {level: run_program(kernels, "train", values, BATCH_SIZE)[0] for level, kernels in lowered.items()}
    assert {"y0:again", "y1:again"} <= set(results["blocks"])
    for name, array in results["none"].items():
        if name in results["blocks"]:
            np.testing.assert_array_equal(results["blocks"][name], array, err_msg=name)
    for level, kernels in lowered.items():
        assert has_joined_backward(kernels.programs[0], model) == (level == "blocks")
    sizes = [plan_memory(kernels).programs[0].batched.size_bytes for kernels in lowered.values()]
    assert sizes[2] < sizes[1] <= sizes[0]


def test_the_curve_of_a_residual_network() -> None:
    """What docs/design.md states: bytes a sample of ResNet-18 at each level."""
    model = load_model("resnet18")
    sizes = [plan_memory(_lowered(model, "cross_entropy", lv)).programs[0].batched.size_bytes for lv in LEVELS]
    assert [round(size / 1e6, 1) for size in sizes] == [5.3, 4.1, 2.7]
