"""benchmarks/compare_peers.py: its arithmetic, its turns, its errors, and that peers do the same work as we."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare_peers
from benchmarks.compare_peers import OURS, compare, main, measure_all
from benchmarks.peers import clean_windows, engines
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


def _result(tmp_path: Path, name: str, rows: list[dict[str, Any]], **facts: Any) -> str:
    result = compare(rows, ("torch", "jax")) | {"model": "mlp", "input_shape": [4], "threads": 2, "lean": False}
    path = tmp_path / name
    path.write_text(json.dumps(result | {"rounds": 1, "missing": {"jax": "no package"}} | facts))
    return str(path)


def _row(engine: str, size: int, speed: float | None, tainted: bool = False) -> dict[str, Any]:
    row = {"engine": engine, "batch_size": size, "samples_per_s": speed, "tainted": tainted}
    return row | {"peak_rss_bytes": 1, "rounds": [speed], "error": "refused"}


def test_results_are_merged_by_batch_size_and_drawn(tmp_path: Path, capsys: Any) -> None:
    first = _result(tmp_path, "1.json", [_row(OURS, 1, 10.0), _row("torch", 1, 5.0), _row("torch", 8, None)])
    second = _result(tmp_path, "2.json", [_row(OURS, 1, 12.0), _row(OURS, 8, 60.0), _row("torch", 8, 20.0)])
    third = _result(tmp_path, "3.json", [_row(OURS, 1, 99.0, tainted=True), _row("torch", 1, 7.0)])
    figure = tmp_path / "figure.png"
    assert main(["--merge", first, second, third, "--figure", str(figure), "--json"]) == 22, "jax was measured in none"
    result = json.loads(capsys.readouterr().out)
    assert result["ratio_by_batch_size"]["torch"] == {"1": pytest.approx(11 / 6), "8": pytest.approx(3.0)}
    assert result["ratio_best_vs_best"] == {"torch": pytest.approx(3.0), "jax": None}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_results_of_other_work_are_not_merged(tmp_path: Path, capsys: Any) -> None:
    first = _result(tmp_path, "1.json", [_row(OURS, 1, 10.0)])
    assert main(["--merge", first, _result(tmp_path, "2.json", [_row(OURS, 1, 10.0)], threads=1)]) == 2
    (tmp_path / "3.json").write_text("[]")
    assert main(["--merge", first, str(tmp_path / "3.json")]) == 14
    assert main(["--merge", str(tmp_path / "4.json")]) == 12
    assert capsys.readouterr().err.count("error: ") == 3


def test_peers_that_cannot_run_are_said_and_the_others_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(compare_peers, "missing", {"jax": "no package jax. Run `make peers`.", "torch": None}.get)
    assert main(["--peers", "jax"]) == 22
    out, err = capsys.readouterr()
    assert out == "" and err == "error: peer jax cannot be measured here: no package jax. Run `make peers`.\n"
    monkeypatch.setattr(compare_peers, "our_engine", lambda *_: (_engine({4: [20.0]}, [], "ours"), 7))
    monkeypatch.setattr(compare_peers, "peer_engine", lambda *_: _engine({4: [10.0]}, [], "torch"))
    assert main(["--peers", "torch,jax", "--batch-sizes", "4", "--rounds", "1", "--json"]) == 22
    out, err = capsys.readouterr()
    assert json.loads(out)["ratio_best_vs_best"] == {"torch": 2.0, "jax": None}
    assert err.startswith("error: peer jax")


def test_unknown_peers(capsys: Any) -> None:
    assert main(["--peers", "tensorflow"]) == 2
    assert "unknown peer 'tensorflow'" in capsys.readouterr().err


def test_a_peer_with_another_model_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"samples_per_s": 1.0, "parameters": 6}
    monkeypatch.setattr(engines, "_run", lambda *_: dict(row))
    work = engines.Work("mlp", (4,), 10, 1, 1.0)
    assert "has 6 parameters, ours 7" in engines.peer_engine("torch", work, 7)(1)["error"]
    assert engines.peer_engine("torch", work, 6)(1)["samples_per_s"] == 1.0


def test_our_windows_are_judged_by_the_same_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four windows of ten steps; in the third, twice as long, the threads waited."""
    lines, elapsed = [], 0.0
    for window_s in (1.0, 1.0, 2.0, 1.0):
        elapsed += window_s
        lines.append(json.dumps({"event": "counters", "steps": 10, "elapsed_s": elapsed}))
    lines.append(json.dumps({"event": "result", "batch_size": 8, "peak_rss_bytes": 5}))
    program = tmp_path / "program.py"
    program.write_text(f"print({chr(10).join(lines)!r})")
    waits = iter((0, 0, 10**9, 10**9))
    monkeypatch.setattr(engines, "run_queue_delay_ns", lambda pid: next(waits))
    row = engines.bench_row([sys.executable, str(program)], threads=2)
    assert (row["samples_per_s"], row["clean_windows"], row["tainted"]) == (pytest.approx(80.0), 3, False)
    program.write_text("import sys; sys.exit('error: batch size 9 needs more.')")
    assert engines.bench_row([sys.executable, str(program)], 2) == {"error": "batch size 9 needs more."}


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise ValueError('too small')")
    assert engines._run([sys.executable, str(worker)], {}) == {"error": "ValueError: too small"}


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
