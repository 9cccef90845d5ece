"""What models of tokens need beside their operators: tables, attention under a mask, a loss a position, label smoothing.

Against PyTorch in float64; kernels run through TVM's JIT.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.graph import BATCH, Block, Model, Node, TensorType
from cross.kernels.embedding import EmbeddingSpec, embedding, embedding_gradient
from cross.load_model import load_model
from cross.rules.context import gradient_name
from cross.target import find_target
from device_runtime import DeviceError, Trainer, load_library
from tests.host import host_target
from tests.kernel_tensors import HOST, compile_kernel
from tests.run_program import Array, lower_model, run_program
from tests.small_models import SMALL_TRANSFORMER, source_of

torch = pytest.importorskip("torch")
functional = torch.nn.functional

pytestmark = pytest.mark.needs("torch")


def relative(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


def leaves_of(model: Model) -> dict[str, Any]:
    return {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in model.parameters.items()}


def check(model: Model, x: Array, target: Array, smoothing: float, wanted: Any, leaves: dict[str, Any]) -> Array:
    """Runs a step; compares loss rows and gradients of the mean with `wanted` (a loss a sample). Returns the logits."""
    batch = len(x)
    wanted.mean().backward()
    values = {**model.parameters, **model.constants, model.input: x, "target": target}
    values |= {"loss_scale": np.float32([1 / batch]), "label_smoothing": np.float32([smoothing])}
    found, _ = run_program(lower_model(model), "train", values, batch)
    assert found["loss"].shape == (batch,)
    assert relative(found["loss"], wanted.detach().numpy()) < 1e-6
    for name, leaf in leaves.items():
        assert relative(found[gradient_name(name)], leaf.grad.numpy()) < 1e-5, name
    return found[model.output]


def table_model(rng: np.random.Generator, tokens: int, width: int, vocabulary: int) -> Model:
    """Each position: its row of a table, one dense layer."""
    parameters = {
        "w": rng.standard_normal((vocabulary, width)).astype("float32"),
        "head": (rng.standard_normal((vocabulary, width)) / 4).astype("float32"),
    }
    tensors = {"x": TensorType((BATCH, tokens), "int32"), "rows": TensorType((BATCH, tokens, width))}
    tensors |= {"y": TensorType((BATCH, tokens, vocabulary)), **{n: TensorType(a.shape) for n, a in parameters.items()}}
    nodes = (Node("embedding", ("x", "w"), ("rows",)), Node("dense", ("rows", "head"), ("y",)))
    return Model("table", nodes, tensors, "x", "y", parameters, {}, {}, {}, (Block("all", 0, 2, "x", "y"),))


@pytest.mark.parametrize(("batch", "width"), [(3, 13), (2, 70)])
def test_table_of_tokens_and_a_loss_for_each_position(batch: int, width: int) -> None:
    """Few tokens of many positions, so that a row's gradient is a sum of several; a row that nothing chose gets zeros."""
    rng = np.random.default_rng(width)
    model = table_model(rng, 11, width, 7)
    x = rng.integers(0, 6, (batch, 11)).astype("int32")
    target = rng.integers(0, 7, (batch, 11)).astype("int32")
    leaves = leaves_of(model)
    logits = functional.embedding(torch.tensor(x, dtype=torch.int64), leaves["w"]) @ leaves["head"].T
    wanted = functional.cross_entropy(logits.transpose(1, 2), torch.tensor(target, dtype=torch.int64), reduction="none")
    found = check(model, x, target, 0.0, wanted.mean(1), leaves)
    assert relative(found, logits.detach().numpy()) < 1e-6
    assert not leaves["w"].grad[6].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [0, 5])
def test_label_smoothing_is_pytorchs(smoothing: float, tokens: int) -> None:
    """Of a classifier (tokens 0) and of positions."""
    rng, batch, classes, width = np.random.default_rng(3), 3, 10, 12
    middle = (tokens,) if tokens else ()
    parameters = {"w": rng.standard_normal((classes, width)).astype("float32")}
    tensors = {"x": TensorType((BATCH, *middle, width)), "y": TensorType((BATCH, *middle, classes))}
    nodes = (Node("dense", ("x", "w"), ("y",)),)
    model = Model("smooth", nodes, {**tensors, "w": TensorType((classes, width))}, "x", "y", parameters, {}, {}, {},
                  (Block("all", 0, 1, "x", "y"),))  # fmt: skip
    x = rng.standard_normal((batch, *middle, width)).astype("float32")
    target = rng.integers(0, classes, (batch, *middle)).astype("int32")
    leaves = leaves_of(model)
    logits = torch.tensor(x, dtype=torch.float64) @ leaves["w"].T
    labels = torch.tensor(target, dtype=torch.int64).flatten()
    rows = functional.cross_entropy(logits.flatten(0, -2), labels, reduction="none", label_smoothing=smoothing)
    check(model, x, target, smoothing, rows.reshape(batch, -1).mean(1), leaves)


def attention_model(rng: np.random.Generator, tokens: int, heads: int, size: int) -> Model:
    """softmax of masked q k / sqrt(size), times v, of three scaled copies of the input, then a dense layer over each row."""
    kind = TensorType((BATCH, heads, tokens, size))
    parameters = {n: (rng.standard_normal((heads, tokens, size)) + 0.5).astype("float32") for n in ("sq", "sk", "sv")}
    parameters["w"] = rng.standard_normal((5, size)).astype("float32")
    constants = {"scale": np.float32([size**-0.5])}
    scores = TensorType((BATCH, heads, tokens, tokens))
    tensors = {n: kind for n in ("x", "q", "k", "v", "mixed")} | {n: scores for n in ("s", "t", "u", "p")}
    tensors |= {n: TensorType(a.shape) for n, a in {**parameters, **constants}.items()}
    tensors |= {"kt": TensorType((BATCH, heads, size, tokens)), "y": TensorType((BATCH, heads, tokens, 5))}
    nodes = (
        Node("mul", ("x", "sq"), ("q",)),
        Node("mul", ("x", "sk"), ("k",)),
        Node("mul", ("x", "sv"), ("v",)),
        Node("transpose", ("k",), ("kt",), {"perm": (0, 1, 3, 2)}),
        Node("matmul", ("q", "kt"), ("s",)),
        Node("mul", ("s", "scale"), ("t",)),
        Node("causal_mask", ("t",), ("u",)),
        Node("softmax", ("u",), ("p",), {"axis": 3}),
        Node("matmul", ("p", "v"), ("mixed",)),
        Node("dense", ("mixed", "w"), ("y",)),
    )
    return Model("attention", nodes, tensors, "x", "y", parameters, {}, constants, {}, (Block("all", 0, 10, "x", "y"),))


@pytest.mark.parametrize(("batch", "tokens", "size"), [(3, 7, 5), (2, 16, 8)])
def test_causal_attention_matches_pytorch(batch: int, tokens: int, size: int) -> None:
    rng, heads = np.random.default_rng(tokens), 2
    model = attention_model(rng, tokens, heads, size)
    x = rng.standard_normal((batch, heads, tokens, size)).astype("float32")
    target = rng.integers(0, 5, (batch, heads, tokens)).astype("int32")
    leaves = leaves_of(model)
    q, k, v = (torch.tensor(x, dtype=torch.float64) * leaves[n] for n in ("sq", "sk", "sv"))
    logits = functional.scaled_dot_product_attention(q, k, v, is_causal=True) @ leaves["w"].T
    labels = torch.tensor(target, dtype=torch.int64).flatten()
    rows = functional.cross_entropy(logits.flatten(0, 2), labels, reduction="none").reshape(batch, -1).mean(1)
    found = check(model, x, target, 0.0, rows, leaves)
    assert relative(found, logits.detach().numpy()) < 1e-5


@pytest.mark.usefixtures("own_cores")
def test_table_gradient_has_the_same_bits_for_any_number_of_threads() -> None:
    import tvm

    rng, spec = np.random.default_rng(0), EmbeddingSpec(17, 150, (40,))
    tokens = rng.integers(0, 17, (9, 40)).astype("int32")
    dy = rng.standard_normal((9, 40, 150)).astype("float32")
    kernel, results = compile_kernel(embedding_gradient(spec, HOST))["embedding_gradient"], []
    for threads in (1, 2):
        tvm.get_global_func("runtime.config_threadpool")(1, threads)
        out = tvm.runtime.tensor(np.full((17, 150), np.nan, "float32"))
        kernel(tvm.runtime.tensor(tokens), tvm.runtime.tensor(dy), out)
        results.append(out.numpy())
    np.testing.assert_array_equal(*results)
    wanted = np.zeros((17, 150))
    np.add.at(wanted, tokens, dy.astype("float64"))
    assert relative(results[0], wanted) < 1e-6


def test_a_token_out_of_range_reads_inside_the_table() -> None:
    """The runtime refuses such tokens before; a kernel must not leave its memory even so."""
    import tvm

    spec = EmbeddingSpec(4, 6, (3,))
    w = np.arange(24, dtype="float32").reshape(4, 6)
    out = tvm.runtime.tensor(np.zeros((1, 3, 6), "float32"))
    tokens = tvm.runtime.tensor(np.int32([[-5, 2, 99]]))
    compile_kernel(embedding(spec, find_target("x86-64-avx2")))["embedding"](tokens, tvm.runtime.tensor(w), out)
    np.testing.assert_array_equal(out.numpy()[0], w[[0, 2, 3]])


def test_a_token_or_label_out_of_range_is_refused(built: Callable[..., Path]) -> None:
    library = load_library(built(source_of(SMALL_TRANSFORMER), host_target(), input_shape=None) / "libtaste.so")
    windows = np.zeros((2, *library.input_shape), "int32")
    wrong = windows.copy()
    wrong[1, 3] = 96
    with Trainer(library, batch_size=2) as trainer:
        with pytest.raises(DeviceError, match=r"token 27 of the batch is 96: .* knows 0 to 95"):
            trainer.gradients(wrong, windows)
        with pytest.raises(DeviceError, match="has label 96"):
            trainer.gradients(windows, wrong)
        assert np.isfinite(trainer.gradients(windows, windows).loss)


@pytest.mark.needs("data")
@pytest.mark.parametrize("name", [SMALL_TRANSFORMER, pytest.param("chartransformer", marks=pytest.mark.acceptance)])
def test_text_trains_as_in_pytorch(name: str, built: Callable[..., Path], data: Path) -> None:
    """Six steps of AdamW on windows of tinyshakespeare: every loss within 1e-4 of PyTorch's, and falling."""
    from tests.torch_zoo import torch_like

    source, batch, steps = source_of(name), 8, 6
    library = load_library(built(source, host_target(), input_shape=None) / "libtaste.so")
    model = load_model(source, init="seeded", seed=0)
    text = (data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    ids = np.array([codes[c] for c in text], "int32")
    length = model.input_shape[0]
    firsts = np.random.default_rng(0).integers(0, len(ids) - length - 1, (steps, batch))
    windows = ids[firsts[..., None] + np.arange(length + 1)]
    module = torch_like(model, name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    with Trainer(library, batch_size=batch, slots=2) as trainer:
        for tensor, values in model.parameters.items():
            trainer.write_parameter(tensor, values)
        for window in windows:
            x, y = np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])
            step = trainer.step(x, y, learning_rate=1e-3, optimizer="adamw", weight_decay=0.01)
            logits = module(torch.from_numpy(x)).flatten(0, 1)
            loss = functional.cross_entropy(logits, torch.from_numpy(y).long().flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((step.loss, float(loss.detach())))
    assert all(abs(ours - theirs) <= 1e-4 * theirs for ours, theirs in losses)
    assert losses[-1][0] < losses[0][0]


TEXT_STEPS, TEXT_BATCH, TEXT_RATE, TEXT_WARMUP = 700, 16, 1e-3, 70


def torch_text_loss(model: Model, train: dict[str, Array], test: dict[str, Array]) -> float:
    """PyTorch's test loss after the same windows in the same order: AdamW, warm-up and cosine, gradients clipped at 1."""
    from tests.packed_data import keyed_order
    from tests.torch_zoo import torch_like

    def loss_of(held: dict[str, Array], rows: Any) -> Any:
        logits = module(torch.from_numpy(held["x"][rows].astype("int64"))).flatten(0, 1)
        return functional.cross_entropy(logits, torch.from_numpy(held["y"][rows]).long().flatten())

    def rate(step: int) -> float:
        if step < TEXT_WARMUP:
            return (step + 1) / TEXT_WARMUP
        return float(0.5 * (1 + np.cos(np.pi * (step - TEXT_WARMUP) / (TEXT_STEPS - TEXT_WARMUP))))

    module = torch_like(model, "chartransformer")
    optimizer = torch.optim.AdamW(module.parameters(), lr=TEXT_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order = keyed_order(0, 0, len(train["x"]))
    for step in range(TEXT_STEPS):
        loss = loss_of(train, order[step * TEXT_BATCH : (step + 1) * TEXT_BATCH])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        starts = range(0, len(test["x"]), 64)
        sums = [float(loss_of(test, slice(i, i + 64))) * len(test["x"][i : i + 64]) for i in starts]
    return sum(sums) / len(test["x"])


@pytest.mark.acceptance
@pytest.mark.needs("data")
def test_chartransformer_learns_shakespeare(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of docs/train.md: below 2.2 nats on the held-out tenth, within 6 minutes, as far as PyTorch comes."""
    from safetensors.numpy import load_file

    from host_control.cli import main

    monkeypatch.chdir(tmp_path)
    source = data / "tinyshakespeare.txt"
    assert main(["data", "pack", "--data", str(source), "--out", "packed"]) == 0
    flags = f"--batch-size {TEXT_BATCH} --effective-batch {TEXT_BATCH} --steps {TEXT_STEPS} --lr {TEXT_RATE}"
    command = f"train --model chartransformer --data packed {flags} --warmup 0.1 --seed 0 --out run"
    assert main(command.split()) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    seconds = TEXT_STEPS * TEXT_BATCH / result["samples_per_s"]
    model = load_model("chartransformer", classes=65, init="seeded", seed=0)
    held = [load_file(tmp_path / "packed" / f"{split}.safetensors") for split in ("train", "test")]
    theirs = torch_text_loss(model, *held)
    print(f"test loss {result['test_loss']:.4f} after {seconds:.0f} s of steps, PyTorch's {theirs:.4f}")
    assert result["test_loss"] < 2.2 and result["test_loss"] == pytest.approx(theirs, rel=0.02)
    assert seconds <= 360
