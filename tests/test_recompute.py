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


def _lowered(model: Model, loss: str, recomputation: bool) -> Kernels:
    target = find_target(HOST)
    training = build_training_graph(model, loss, recomputation=recomputation)
    return lower(assign_storage(training, target), target)


def test_bits_stay_and_the_result_is_made_again() -> None:
    model, rng = _block_model(), np.random.default_rng(4)
    values = {**model.parameters, **model.states, "loss_scale": np.float32([1 / BATCH_SIZE])}
    for name in ("input", "target"):
        values[name] = rng.standard_normal((BATCH_SIZE, CHANNELS, SIZE, SIZE)).astype("float32")
    kept, _ = run_program(_lowered(model, "mse", False), "train", values, BATCH_SIZE)
    again, program = run_program(_lowered(model, "mse", True), "train", values, BATCH_SIZE)
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
    before, after = _lowered(model, "cross_entropy", False), _lowered(model, "cross_entropy", True)
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
