"""--trainable: which parameters it names, what is left of backward, what that saves, and steps that leave the rest alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cross.build import build
from cross.errors import UsageError
from cross.graph import BATCH, Block, Model, Node, TensorType
from cross.load_model import load_model
from cross.plan import plan_memory
from cross.rules.context import gradient_name
from cross.tables import minimum_batch
from cross.target import find_target
from cross.trainable import choose_trainable, frozen_norms
from cross.training_cost import TrainingCost, training_cost
from device_runtime import Trainer, load_library
from tests.host import host_target
from tests.run_program import lower_model

HEAD = {"fc.weight", "fc.bias"}
CHOICES: Mapping[str, set[str]] = {
    "head": HEAD,
    "last:1": HEAD,
    r"^conv1\.": {"conv1.weight"},
    r"stacks\.1\.bn\d\.weight": {"stacks.1.bn1.weight", "stacks.1.bn2.weight"},
}


@pytest.mark.parametrize("trainable", CHOICES)
def test_a_word_or_a_pattern_names_parameters(trainable: str) -> None:
    assert choose_trainable(load_model("resnet8"), trainable) == CHOICES[trainable]


def test_norms_and_last_blocks_follow_the_graph() -> None:
    model = load_model("resnet8")
    norms = {f"{p}.{leaf}" for p in ("bn1", *(f"stacks.{i}.bn{k}" for i in range(3) for k in (1, 2)))
             for leaf in ("weight", "bias")}  # fmt: skip
    assert choose_trainable(model, "norms") == norms
    last = {n for n in model.parameters if n.startswith(("stacks.2.", "fc."))}
    assert choose_trainable(model, "last:2") == last
    assert (
        choose_trainable(model, f"last:{len(model.blocks)}") == choose_trainable(model, "all") == set(model.parameters)
    )
    assert frozen_norms(model, frozenset({"stacks.2.conv1.weight"})) == {
        node.outputs[0] for node in model.nodes if node.op == "batch_norm" and "stacks.2" not in node.source
    }


def test_the_head_may_be_a_1x1_convolution_or_else_the_last_block() -> None:
    parameters = {"w": np.ones((6, 3, 3, 3), "float32"), "v": np.ones((4, 6, 1, 1), "float32")}
    parameters["b"] = np.ones((4, 1, 1), "float32")
    attrs = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1), "groups": 1}
    nodes = (
        Node("conv2d", ("x", "w"), ("c",), attrs),
        Node("conv2d", ("c", "v"), ("d",), {**attrs, "pads": (0, 0, 0, 0)}, block=1),
        Node("add", ("d", "b"), ("e",), block=1),
        Node("reduce_mean", ("e",), ("y",), {"axes": (2, 3), "keepdims": False}, block=1),
    )
    shapes = {"x": (3, 5, 5), "c": (6, 5, 5), "d": (4, 5, 5), "e": (4, 5, 5), "y": (4,)}
    tensors = {n: TensorType((BATCH, *s)) for n, s in shapes.items()}
    tensors |= {n: TensorType(a.shape) for n, a in parameters.items()}
    blocks = (Block("body", 0, 1, "x", "c"), Block("head", 1, 4, "c", "y"))
    model = Model("conv", nodes, tensors, "x", "y", parameters, {}, {}, {}, blocks)
    assert choose_trainable(model, "head") == {"v", "b"}
    headless = Model("body", nodes[:1], tensors, "x", "c", {"w": parameters["w"]}, {}, {}, {}, blocks[:1])
    assert choose_trainable(headless, "head") == {"w"}


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        ("nothing-like-it", ("resnet8", "'nothing-like-it'", "conv1.weight", "more")),
        ("last:0", ("last:1 to last:5",)),
        ("last:6", ("resnet8 has 5 blocks",)),
        ("last:two", ("last:two",)),
        ("(", ("no regular expression",)),
        ("", ("matches ''",)),
    ],
)
def test_what_names_nothing_is_refused(trainable: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        choose_trainable(load_model("resnet8"), trainable)
    assert all(word in str(caught.value) for word in words)


def test_norms_of_a_model_without_any_are_refused() -> None:
    with pytest.raises(UsageError, match="batch or layer norm"):
        choose_trainable(load_model("mlp"), "norms")


def cost_of(model: Model, trainable: str) -> TrainingCost:
    kernels = lower_model(model, trainable=trainable)
    return training_cost(kernels, plan_memory(kernels))


def test_the_last_block_of_resnet18_costs_a_fraction() -> None:
    """The promises of the interface: bytes kept for backward at most 0.1x, arena a sample at most 0.4x; and a third of the work."""
    model = load_model("resnet18")
    full, last = cost_of(model, "all"), cost_of(model, "last:1")
    assert full.trained_parameters == 11_173_962 and last.trained_parameters == 5_130
    assert last.saved_bytes <= 0.1 * full.saved_bytes
    assert last.per_sample_bytes <= 0.4 * full.per_sample_bytes
    assert last.flops <= 0.4 * full.flops


@pytest.mark.parametrize("trainable", ["last:1", "last:2", "norms", r"stacks\.1\.conv2"])
def test_backward_ends_where_nothing_below_is_trained(trainable: str) -> None:
    """Gradients of trained parameters only; below the lowest trained block no call and nothing kept."""
    model = load_model("resnet8")
    trained = choose_trainable(model, trainable)
    kernels = lower_model(model, trainable=trainable)
    training, program = kernels.graph.training, kernels.programs[0]
    assert set(training.gradients) == trained
    written = {name for call in program.calls for name in call.arguments}
    assert {n for n in model.parameters if gradient_name(n) in written} == trained
    lowest = min(node.block for node in model.nodes if trained.intersection(node.inputs))
    assert {call.block for call in program.calls if call.phase == "backward"} == set(range(lowest, len(model.blocks)))
    assert gradient_name(model.blocks[lowest].input) not in written
    read = {name for call in program.calls if call.phase == "backward" for name in call.arguments}
    below = {
        name for call in program.calls if call.phase == "forward" and call.block < lowest for name in call.arguments
    }
    edge = {model.blocks[lowest].input}
    assert {n for n in read & below if program.storages[n].batched} <= edge


def test_frozen_batch_norms_neither_count_nor_forbid_a_batch_of_one() -> None:
    """A batch norm without pixels needs two rows to count; frozen it needs none."""
    tensors = {"x": TensorType((BATCH, 6)), "n": TensorType((BATCH, 6)), "y": TensorType((BATCH, 3))}
    vectors = {name: np.ones(6, "float32") for name in ("gamma", "beta", "mean", "var")}
    weight = np.ones((3, 6), "float32")
    tensors |= {name: TensorType((6,)) for name in vectors} | {"w": TensorType((3, 6))}
    nodes = (
        Node("batch_norm", ("x", *vectors), ("n",), {"eps": 1e-5, "momentum": 0.1}),
        Node("dense", ("n", "w"), ("y",), block=1),
    )
    blocks = (Block("norm", 0, 1, "x", "n"), Block("head", 1, 2, "n", "y"))
    parameters = {"gamma": vectors["gamma"], "beta": vectors["beta"], "w": weight}
    states = {"mean": vectors["mean"], "var": vectors["var"]}
    model = Model("flat", nodes, tensors, "x", "y", parameters, states, {}, {}, blocks)
    assert minimum_batch(lower_model(model)) == 2
    assert minimum_batch(lower_model(model, trainable="w")) == 1


@pytest.mark.parametrize("trainable", ["last:1", "norms"])
def test_steps_of_a_build_leave_what_is_frozen_alone(trainable: str, tmp_path: Path) -> None:
    """The manifest says what is trained; after five steps exactly that has other bits, running statistics included."""
    model, name = load_model("resnet8", init="seeded", seed=3), find_target(host_target())
    result = build(model, name, tmp_path / "build", trainable=trainable)
    full = cost_of(model, "all")
    assert result.trainable == trainable and result.trained_parameters < full.trained_parameters
    trained = choose_trainable(model, trainable)
    live = trained if trainable == "last:1" else trained | set(model.states)
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((4, 3, 32, 32)).astype("float32"), rng.integers(0, 10, 4).astype("int32")
    with Trainer(load_library(tmp_path / "build" / "libtaste.so"), 4) as trainer:
        before = trainer.parameters()
        rates = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
        losses = [trainer.step(x, y, **rates).loss for _ in range(5)]
        after = trainer.parameters()
    assert losses[-1] < losses[0]
    assert {n for n in before if not np.array_equal(before[n], after[n])} == live
