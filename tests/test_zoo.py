"""The zoo: shapes, names, blocks, initial values; and the same numbers as PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cross.errors import UsageError
from cross.graph import BATCH, Model, TensorType
from cross.initialise import fnv1a64, initial_values, splitmix64, uniform
from cross.load_model import load_model
from cross.zoo import ZOO
from tests.numpy_forward import numpy_forward

PARAMETERS = {
    "mlp": 820874,
    "resnet8": 77946,
    "resnet18": 11173962,
    "resnet20": 269722,
    "mobilenetv2": 2237770,
    "vgg16": 14724042,
    "vgg19": 20035018,
    "alexnet": 2472266,
    "squeezenet": 727626,
    "efficientvit-m1": 2798826,
}
RESNET18_BLOCKS = ["conv1", *(f"layer{s}.{i}" for s in (1, 2, 3, 4) for i in (0, 1)), "fc"]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_zoo_model_has_the_published_size(name: str) -> None:
    model = load_model(name)
    assert sum(array.size for array in model.parameters.values()) == PARAMETERS[name]
    assert model.input_shape == (3, 32, 32) and model.classes == 10
    assert model.tensors[model.input].shape == (BATCH, 3, 32, 32)


def test_chartransformer_takes_windows_of_characters() -> None:
    model = zoo("chartransformer")
    assert sum(array.size for array in model.parameters.values()) == 4804704
    assert model.tensors[model.input] == TensorType((BATCH, 64), "int32") and model.input_values == 96
    assert model.tensors[model.output].shape == (BATCH, 64, 96)
    names = [block.name for block in model.blocks]
    assert names == ["tok", *(f"layers.{i}/{part}" for i in range(6) for part in ("attn", "mlp")), "head"]
    with pytest.raises(UsageError, match="like 64"):
        load_model("chartransformer", input_shape=(3, 32, 32))
    with pytest.raises(UsageError, match="like 3,32,32"):
        load_model("resnet20", input_shape=(64,))


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (1, 28, 28)), ("resnet8", (1, 28, 20)), ("mobilenetv2", (2, 17, 16))]
)
def test_zoo_model_is_built_for_the_data(name: str, shape: tuple[int, ...]) -> None:
    model = load_model(name, input_shape=shape, classes=7)
    assert model.input_shape == shape and model.classes == 7
    values = numpy_forward(model, np.zeros((2, *shape), np.float32))
    assert {n: v.shape for n, v in values.items()} == {n: t.numpy_shape(2) for n, t in model.tensors.items()}


@cache
def zoo(name: str) -> Model:
    """The model of default shape and seed, made once."""
    return load_model(name)


def test_resnet18_blocks_are_stem_residual_blocks_and_head() -> None:
    assert [block.name for block in zoo("resnet18").blocks] == RESNET18_BLOCKS
    assert [block.name for block in zoo("resnet18-imagenet").blocks] == RESNET18_BLOCKS


def test_mobilenetv2_blocks_are_its_inverted_residuals() -> None:
    names = [block.name for block in zoo("mobilenetv2").blocks]
    assert names == ["conv1", *(f"layers.{i}" for i in range(17)), "conv2", "linear"]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_edge_skips_a_block(name: str) -> None:
    model = zoo(name)
    stored = {*model.parameters, *model.states, *model.constants}
    previous = model.input
    for index, block in enumerate(model.blocks):
        nodes = model.nodes[block.first_node : block.end_node]
        made = {o for node in nodes for o in node.outputs}
        assert {node.block for node in nodes} == {index} and block.input == previous and block.output in made
        assert {i for node in nodes for i in node.inputs} - made - stored <= {block.input}
        previous = block.output
    assert model.blocks[0].first_node == 0 and model.blocks[-1].end_node == len(model.nodes)
    assert previous == model.output


@pytest.mark.parametrize(("name", "shape"), [("vgg16", (3, 16, 16)), ("squeezenet", (3, 2, 2))])
def test_samples_too_small_for_the_pools_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        UsageError, match=f"{name} cannot take samples of {shape[0]},{shape[1]},{shape[2]}: .* does not fit"
    ):
        load_model(name, input_shape=shape)


def test_unknown_name_lists_the_zoo() -> None:
    with pytest.raises(UsageError, match="resnet8"):
        load_model("resnet19")


@pytest.mark.parametrize("shape", [(3, 0, 32), (), (3, -1, 2), (3, 32)])
def test_input_shape_must_be_one(shape: tuple[int, ...]) -> None:
    if shape == (3, 32):
        assert load_model("mlp", input_shape=shape).input_shape == shape
        return
    with pytest.raises(UsageError, match="C,H,W"):
        load_model("mlp", input_shape=shape)


def test_generator_gives_the_reference_numbers() -> None:
    """Published test vectors; the first output of splitmix64 for seed 1234567 and 0, FNV-1a of 'a' and 'foobar'."""
    assert splitmix64(1234567) == 6457827717110365317
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert fnv1a64("a") == 0xAF63DC4C8601EC8C
    assert fnv1a64("foobar") == 0x85944171F73967E8


def test_generator_in_arrays_equals_generator_in_numbers() -> None:
    key = splitmix64(5 ^ fnv1a64("fc.weight"))
    wanted = [
        np.float32(2 * ((splitmix64((key + i) % 2**64) >> 40) * 2.0**-24) - 1) * np.float32(0.25) for i in range(12)
    ]
    assert uniform("fc.weight", (3, 4), 0.25, 5).ravel().tolist() == [float(w) for w in wanted]


def test_values_depend_on_name_and_seed_and_are_spread_evenly() -> None:
    a, b = uniform("a", (100, 100), 1.0, 0), uniform("b", (100, 100), 1.0, 0)
    assert np.abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05
    assert not np.array_equal(a, uniform("a", (100, 100), 1.0, 1))
    assert abs(a.mean()) < 0.02 and abs(a.var() - 1 / 3) < 0.02 and a.min() >= -1 and a.max() < 1


def test_parameters_are_what_the_board_would_make() -> None:
    model = load_model("resnet8", seed=3)
    made = initial_values(model, 3)
    assert made.keys() == {*model.parameters, *model.states}
    assert all(np.array_equal(made[name], array) for name, array in {**model.parameters, **model.states}.items())
    weight = model.parameters["stacks.1.conv1.weight"]
    assert np.abs(weight).max() <= 1 / np.sqrt(16 * 9) < 1.01 * np.abs(weight).max()


SMALLEST = {
    "resnet18-imagenet": (3, 48, 48),
    "chartransformer": (9,),
    **dict.fromkeys(("vgg16", "vgg19", "alexnet", "efficientvit-m1"), (3, 32, 32)),
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in sorted(ZOO)), ("resnet8", False)])
def test_forward_equals_pytorch(name: str, training: bool) -> None:
    import torch

    from tests.torch_zoo import torch_like

    shape = SMALLEST.get(name, (3, 16, 16))
    model = load_model(name, input_shape=shape, seed=1)
    module = torch_like(model, name, torch.float64).train(training)
    random = np.random.default_rng(0)
    x = random.integers(0, 96, (2, *shape)) if model.input_values else random.standard_normal((2, *shape))
    with torch.no_grad():
        wanted = module(torch.from_numpy(x)).numpy()
    values = numpy_forward(model, x, training=training, dtype=np.float64)
    np.testing.assert_allclose(values[model.output], wanted, atol=1e-8)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", sorted(ZOO))
def test_bounds_are_those_of_pytorch(name: str) -> None:
    """Every tensor that PyTorch draws lies in our bound and nearly reaches it; batch norms start alike."""
    import torch

    from tests.torch_zoo import build_torch

    torch.manual_seed(0)
    model = zoo(name)
    for key, value in build_torch(name, model.input_shape).state_dict().items():
        if key.endswith("num_batches_tracked"):
            continue
        init, largest = model.inits[key], float(value.abs().max())
        if init.kind == "constant":
            assert bool((value == init.scale).all())
        elif key == "tok.weight":
            # PyTorch draws tables from a normal distribution; ours has its mean and variance.
            assert abs(float(value.std()) - init.scale / np.sqrt(3)) < 0.05
        else:
            assert 0.5 * init.scale < largest <= init.scale


@pytest.mark.needs("torch", "data")
def test_trained_weights_of_resnet20_fit_by_name(data: Path) -> None:
    """The usual implementation's file: every name after `module.`, and most of 100 test images classified right."""
    import torch

    stored = torch.load(data / "resnet_cifar10" / "resnet20-12fca82f.th", weights_only=True, map_location="cpu")
    trained = {
        name.removeprefix("module."): value.numpy()
        for name, value in stored["state_dict"].items()
        if not name.endswith("num_batches_tracked")
    }
    model = load_model("resnet20")
    assert trained.keys() == {*model.parameters, *model.states}
    fitted = replace(
        model,
        parameters={n: trained[n].reshape(a.shape) for n, a in model.parameters.items()},
        states={n: trained[n] for n in model.states},
    )
    rows = np.fromfile(data / "cifar-10-batches-bin" / "test_batch.bin", np.uint8, 100 * 3073).reshape(100, 3073)
    images = rows[:, 1:].reshape(100, 3, 32, 32) / np.float32(255)
    mean, std = (np.float32(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    logits = numpy_forward(fitted, (images - mean) / std)[model.output]
    assert (logits.argmax(1) == rows[:, 0]).mean() >= 0.85
