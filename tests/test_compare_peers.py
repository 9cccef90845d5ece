"""benchmarks/compare_peers.py: its arithmetic, its turns, its errors, and that peers do the same work as we."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest

from benchmarks.compare_peers import OURS, compare, main, measure_all
from benchmarks.peers import clean_windows
from benchmarks.peers.clean_windows import time_steps


def _engine(rates: dict[int, list[float]], calls: list[str], name: str, tainted: bool = False) -> Any:
    def measure(size: int) -> dict[str, Any]:
        calls.append(name)
        if size not in rates:
            return {"error": "Expected more than 1 value per channel"}
        return {"samples_per_s": rates[size].pop(0), "tainted": tainted, "peak_rss_bytes": 1}

    return measure


def test_engines_take_turns_and_the_median_of_the_rounds_counts() -> None:
    calls: list[str] = []
    engines = {
        OURS: _engine({1: [10.0, 30.0, 20.0], 8: [100.0, 90.0, 110.0]}, calls, "ours"),
        "torch": _engine({8: [50.0, 40.0, 45.0]}, calls, "torch"),
    }
    rows = measure_all(engines, (1, 8), rounds=3)
    assert calls == ["ours", "torch"] * 2 + ["torch", "ours"] * 2 + ["ours", "torch"] * 2
    result = compare(rows, ("torch",))
    assert result["ratio_best_vs_best"] == {"torch": pytest.approx(100 / 45)}
    assert result["ratio_by_batch_size"] == {"torch": {"8": pytest.approx(100 / 45)}}
    refused = [row for row in result["rows"] if row["samples_per_s"] is None]
    assert [(row["engine"], row["batch_size"]) for row in refused] == [("torch", 1)]
    json.dumps(result)


def test_disturbed_rounds_count_only_where_there_is_no_other() -> None:
    speeds = iter(((10.0, True), (20.0, False), (30.0, True)))

    def measure(size: int) -> dict[str, Any]:
        speed, tainted = next(speeds)
        return {"samples_per_s": speed, "tainted": tainted, "peak_rss_bytes": 1}

    (row,) = measure_all({OURS: measure}, (4,), rounds=3)
    assert (row["samples_per_s"], row["tainted"], row["rounds"]) == (20.0, False, [10.0, 20.0, 30.0])


def test_a_peer_without_any_rate_has_no_ratio() -> None:
    rows = measure_all({OURS: _engine({1: [1.0]}, [], "a"), "torch": _engine({}, [], "b")}, (1,), rounds=1)
    assert compare(rows, ("torch",))["ratio_best_vs_best"] == {"torch": None}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    (
        (["--peers", "jax"], 22, "peer jax cannot be measured here"),
        (["--peers", "torch,ort"], 22, "peer ort cannot be measured here"),
        (["--peers", "tensorflow"], 2, "unknown peer 'tensorflow'"),
    ),
)
def test_peers_that_cannot_run(arguments: list[str], code: int, words: str, capsys: Any) -> None:
    if "torch" in arguments[-1]:
        pytest.importorskip("torch")
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_windows_that_waited_for_a_core_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited, steps = 0.0, 0.0, 0

    def step() -> None:
        """Every second step takes twice as long, because it waits for a core half of the time."""
        nonlocal now, waited, steps
        steps += 1
        wait = 0.4 if steps % 2 == 0 else 0.0
        now, waited = now + 0.4 + wait, waited + wait

    monkeypatch.setattr(clean_windows.time, "perf_counter", lambda: now)
    monkeypatch.setattr(clean_windows, "run_queue_delay_ns", lambda: int(waited * 1e9))
    timing = time_steps(step, threads=1, seconds=1.0)
    assert timing.windows > timing.clean >= 3
    assert not timing.tainted
    assert (timing.step_s, timing.spread) == (pytest.approx(0.4), pytest.approx(0.0))


def test_a_machine_without_a_clean_window_is_tainted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 0.5

    monkeypatch.setattr(clean_windows.time, "perf_counter", lambda: now)
    monkeypatch.setattr(clean_windows, "run_queue_delay_ns", lambda: int(now * 0.5e9))
    timing = time_steps(step, threads=1, seconds=1.0)
    assert timing.tainted and timing.clean == 0
    assert now <= 3 * 0.5 + 4.5, "it gives up after four times the wanted seconds"


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ("mlp", "resnet8", "resnet18", "resnet18-imagenet", "mobilenetv2"))
def test_peers_train_models_of_the_same_size(name: str) -> None:
    import torch

    from benchmarks.peers.torch_models import MODELS
    from cross.load_model import load_model

    shape = (3, 64, 64) if name == "resnet18-imagenet" else (3, 32, 32)
    ours = load_model(name, input_shape=shape)
    theirs = MODELS[name](shape, 10)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == sum(
        prod(parameter.shape) for parameter in ours.parameters.values()
    )
    assert theirs(torch.zeros(2, *shape)).shape == (2, 10)
