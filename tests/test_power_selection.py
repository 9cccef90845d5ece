"""Choosing an operating point against brute force; pruned profiling; energy of known signals; r; drift."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.errors import CorruptInputError, FileError, MissingToolError, NoOperatingPointError, UsageError
from host_control.power.energy import find_offset, integrate, within
from host_control.power.measuring import _slowed
from host_control.power.profiling import profile_all, profile_pruned
from host_control.power.relation import ProxyRuns, epochs_to, read_relation, read_runs, scaled_rate, write_relation
from host_control.power.selection import frontier, pareto, select, sensitivity
from host_control.power.sources import CommandMeter, CsvMeter, Load, PowerModel, open_source
from host_control.power.table import Point, PowerTable, read_table, write_table
from host_control.power.trace import Trace, read_trace

BATCHES, STEPS = (4, 8, 16, 32, 64, 128), (153, 307, 460, 614, 768, 921)
TABLES = 5000


def table_of(
    seconds: Any, watts: Any, batches: tuple[int, ...] = BATCHES, steps: tuple[int, ...] = STEPS
) -> PowerTable:
    """LUT_time (of one sample) and LUT_power as rows of batch sizes and columns of frequencies."""
    points = tuple(
        Point(b, f, 1 / seconds[i][j], 0.01, watts[i][j], 0.8 * watts[i][j], 0.8 * watts[i][j] * seconds[i][j])
        for i, b in enumerate(batches)
        for j, f in enumerate(steps)
    )
    return PowerTable("m", "b", "board", False, "test", False, batches, steps, None, 5.0, None, len(points), points)


def random_luts(random: np.random.Generator) -> tuple[Any, Any]:
    """Power grows with batch size and frequency, time falls with frequency."""
    watts = 2 + np.cumsum(np.cumsum(random.exponential(0.15, (6, 6)), axis=0), axis=1)
    seconds = np.flip(np.cumsum(random.exponential(1.0, (6, 6)), axis=1), axis=1) + 0.1
    return seconds, watts


def test_selection_is_brute_force_on_random_monotone_tables() -> None:
    random = np.random.default_rng(7)
    none = 0
    for _ in range(TABLES):
        seconds, watts = random_luts(random)
        r = dict(zip(BATCHES, random.uniform(0.2, 1.0, 6), strict=True))
        limit = random.uniform(1.9, 12)
        feasible = watts < limit
        if not feasible.any():
            none += 1
            with pytest.raises(NoOperatingPointError, match=f"{watts.min():.2f} W at batch size 4, 0.153 MHz"):
                select(table_of(seconds, watts), limit, r)
            continue
        cost = np.where(feasible, seconds * np.array(list(r.values()))[:, None], np.inf)
        found = select(table_of(seconds, watts), limit, r)
        assert found.choice.time == pytest.approx(cost.min(), rel=1e-12)
        assert found.choice.point == found.exhaustive.point
        assert found.choice.point.watts < limit
    assert 0 < none < TABLES / 10


def test_pruned_profiling_finds_the_same_frontier_in_few_visits() -> None:
    random, counts = np.random.default_rng(8), []
    for _ in range(TABLES):
        _, watts = random_luts(random)
        limit = random.uniform(1.9, 12)
        visited: set[tuple[int, int]] = set()

        def measure(b: int, f: int, _attempt: int, watts: Any = watts, visited: Any = visited) -> float:
            visited.add((b, f))
            return float(watts[BATCHES.index(b), STEPS.index(f)])

        found = profile_pruned(BATCHES, STEPS, limit, measure)
        highest = {b: [f for j, f in enumerate(STEPS) if watts[i, j] < limit] for i, b in enumerate(BATCHES)}
        assert found == {b: max(below) for b, below in highest.items() if below}
        assert len(visited) <= 2 * len(BATCHES) + len(STEPS)
        counts.append(len(visited))
    assert np.mean(counts) < 20
    every: list[tuple[int, int]] = []
    profile_all(BATCHES, STEPS, lambda b, f, _: every.append((b, f)) or 0.0)
    assert len(set(every)) == 36


def test_one_disturbed_reading_ends_no_row() -> None:
    seen: dict[tuple[int, int], int] = {}

    def noisy(b: int, f: int, attempt: int) -> float:
        seen[b, f] = seen.get((b, f), 0) + 1
        return 99.0 if (b, f, attempt) == (8, 307, 0) else f / 100 + b / 100

    assert profile_pruned((4, 8), STEPS, 5.0, noisy) == {8: 460, 4: 460}
    assert seen[8, 307] == 2
    # A row that is above the limit where the larger batch was below: not monotone, so it looks further down.
    assert profile_pruned((4, 8), STEPS, 5.0, lambda b, f, _: f / 100 + (2 if b == 4 else 0)) == {8: 460, 4: 153}


def test_power_equal_to_the_limit_is_not_below_it() -> None:
    table = table_of([[2.0, 1.0]], [[3.0, 5.0]], (8,), (307, 614))
    assert select(table, 5.0, None).choice.point.frequency_khz == 307
    assert select(table, 5.001, None).choice.point.frequency_khz == 614


def constructed() -> tuple[PowerTable, dict[int, float]]:
    """CONSTRUCTED numbers, nobody's measurement: chosen so that the ordering of the paper's motivating example follows
    (figure 3: N(8) = 10, N(32) = 15 with s samples each; batch 8 wins at 4.5 and 5 W, batch 32 at 7 W)."""
    steps = (307, 460, 614, 921)
    watts = [[3.2, 3.9, 4.8, 6.2], [3.8, 4.6, 5.6, 6.8]]
    seconds = [[1 / (0.7 * speed) for speed in row] for row in ((307, 520, 640, 680), (307, 460, 614, 1200))]
    return table_of(seconds, watts, (8, 32), steps), {8: 10 / 15, 32: 1.0}


def test_the_ordering_of_the_motivating_example_on_a_constructed_table() -> None:
    table, r = constructed()
    winners = {limit: select(table, limit, r).choice.point.batch_size for limit in (4.5, 5.0, 7.0)}
    assert winners == {4.5: 8, 5.0: 8, 7.0: 32}


def test_baselines_and_what_each_costs() -> None:
    table, r = constructed()
    found = select(table, 5.0, r)
    assert found.safe_khz == 460
    assert found.baseline1 is not None and found.baseline1.point.key == (32, 460)
    assert found.baseline2 is not None and found.baseline2.point.key == (8, 460)
    assert found.choice.point.key == (8, 614) and found.choice.time < min(found.baseline1.time, found.baseline2.time)
    assert found.choice.energy == pytest.approx(0.8 * 4.8 / (0.7 * 640) * 10 / 15)
    assert [c.point.key for c in found.candidates] == [(8, 614), (32, 460)]
    assert select(table, 5.0, r, safe_khz=307).baseline1.point.key == (32, 307)  # type: ignore[union-attr]
    assert select(table, 3.5, r).baseline1 is None, "no frequency is safe for the largest batch size"
    with pytest.raises(UsageError, match="is in the relation"):
        select(table, 5.0, {64: 1.0})


def test_pareto_points_are_those_that_nothing_beats() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        seconds, watts = random_luts(random)
        table = table_of(seconds, watts)
        kept = {p.key for p in pareto(table.points)}
        for p in table.points:
            mine = np.array([-p.samples_per_s, p.joules_per_sample, p.watts])
            others = np.array([[-q.samples_per_s, q.joules_per_sample, q.watts] for q in table.points])
            beaten = ((others <= mine).all(axis=1) & (others < mine).any(axis=1)).any()
            assert (p.key in kept) != beaten


def test_sensitivity_to_the_proxy_is_a_table() -> None:
    table, r = constructed()
    rows = sensitivity(table, 5.0, {"a": r, "b": {8: 1.0, 32: 0.5}})
    assert [(proxy, target) for proxy, target, _, _ in rows] == [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    extra = {(proxy, target): cost for proxy, target, _, cost in rows}
    assert extra["a", "a"] == extra["b", "b"] == 0
    seconds = {8: 1 / (0.7 * 640), 32: 1 / (0.7 * 460)}
    assert extra["a", "b"] == pytest.approx(seconds[8] / (seconds[32] * 0.5) - 1)


# On disk


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    table, _ = constructed()
    write_table(tmp_path, table)
    assert read_table(tmp_path) == table == read_table(tmp_path / "power.json")
    rows = (tmp_path / "power.csv").read_text().splitlines()
    assert len(rows) == 9 and rows[0].startswith("batch_size,frequency_khz,samples_per_s")
    assert [p.key for p in frontier(table.points, 5.0)] == [(8, 614), (32, 460)]
    text = (tmp_path / "power.json").read_text()
    for wrong in (
        text[:-40],
        text.replace("taste-power 1", "other"),
        text.replace('"watts": 3.2', '"watts": NaN'),
        "[]",
    ):
        (tmp_path / "power.json").write_text(wrong)
        with pytest.raises(CorruptInputError, match="is not a power table"):
            read_table(tmp_path)
    with pytest.raises(UsageError, match="no power table"):
        read_table(tmp_path / "nowhere")


def test_relation_is_of_the_means_and_by_the_largest(tmp_path: Path) -> None:
    epochs = {8: (4.0, 5.0, 6.0), 32: (9.0, 10.0, 11.0), 128: (12.0, None, 13.0)}
    runs = ProxyRuns("m", "d", 0.8, "adam", 5e-4, 20.0, epochs)
    write_relation(tmp_path, runs)
    assert read_runs(tmp_path) == runs
    assert read_relation(tmp_path / "relation.json") == {8: 0.5, 32: 1.0}, "128 did not always reach the target"
    assert runs.spread() == pytest.approx({8: 0.1, 32: 0.1})
    (tmp_path / "relation.json").write_text("{}")
    with pytest.raises(CorruptInputError):
        read_relation(tmp_path)


def test_epochs_to_an_accuracy_and_scaled_rates() -> None:
    curve = [(1.0, 0.4), (2.0, 0.6), (3.0, 0.58), (4.0, 0.8)]
    assert epochs_to(curve, 0.5) == pytest.approx(1.5)
    assert epochs_to(curve, 0.7) == pytest.approx(3 + 0.12 / 0.22)
    assert epochs_to(curve, 0.81) is None and epochs_to(curve, 0.2) == pytest.approx(0.5)
    # The constants of section 5 of the paper.
    paper = {4: 8.8e-5, 8: 1.25e-4, 16: 1.77e-4, 32: 2.5e-4, 64: 3.5e-4, 128: 5e-4}
    assert all(scaled_rate(5e-4, b) == pytest.approx(lr, rel=0.015) for b, lr in paper.items())


# Energy


@pytest.mark.parametrize("offset", [0.0, 3.7, -1.2])
@pytest.mark.parametrize("gaps", [False, True])
def test_energy_of_a_known_signal(offset: float, gaps: bool) -> None:
    """4 + sin(2 pi t / 7) + 0.3 t watts, from 3 to 58 s, sampled at 10 Hz with jitter, gaps of half a second, another clock."""
    random = np.random.default_rng(11)
    t = np.sort(np.arange(0, 60, 0.1) + random.uniform(-0.04, 0.04, 600))
    if gaps:
        for start in random.uniform(5, 50, 6):
            t = t[(t < start) | (t > start + 0.5)]
    samples = [(x + offset, 4 + math.sin(2 * math.pi * x / 7) + 0.3 * x) for x in t]
    random.shuffle(samples)

    def exact(x: float) -> float:
        return 4 * x - 7 / (2 * math.pi) * math.cos(2 * math.pi * x / 7) + 0.15 * x * x

    found = integrate(samples, 3.0, 58.0, offset_s=offset)
    assert found.joules == pytest.approx(exact(58.0) - exact(3.0), rel=0.005)
    assert found.mean_watts == pytest.approx(found.joules / 55)
    assert (found.gap_s > 1.5) == gaps
    wrong = integrate(samples, 3.0, 58.0, offset_s=offset + 5)
    assert abs(wrong.joules / found.joules - 1) > 0.005, "a clock that is not corrected shows"


def test_which_samples_belong_to_a_measurement() -> None:
    times = [0.0, 1.0, 2.0, 3.0]
    assert within(times, 0.9, 2.0) == [1, 2]
    assert within(times, 1.2, 1.4) == [1, 2], "between two samples: both"
    assert within(times, 3.2, 3.4) == [3] and within(times, 5.0, 6.0) == within([], 0.0, 1.0) == []


def test_energy_at_the_edges() -> None:
    assert integrate([(0.0, 2.0), (10.0, 4.0)], 2.0, 4.0).joules == pytest.approx(2 * 2.6)
    held = integrate([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], 0.0, 5.0)
    assert held.joules == pytest.approx(10.0) and held.gap_s == pytest.approx(3.0)
    assert math.isnan(integrate([], 0.0, 1.0).joules) and math.isnan(integrate([(0.0, math.nan)], 0.0, 1.0).joules)


@pytest.mark.parametrize("offset", [0.0, 2.31, -6.4])
def test_a_meters_clock_is_found_by_the_steps_it_shows(offset: float) -> None:
    random = np.random.default_rng(12)
    loads = [(10.0, 14.0), (18.0, 21.0)]
    times = np.arange(0, 40, 0.1)
    watts = [4.0 + (3.0 if any(a <= t <= b for a, b in loads) else 0.0) + random.normal(0, 0.1) for t in times]
    assert find_offset([(t, 4.0) for t in times], loads) is None and find_offset([], loads) is None
    assert find_offset([(t + offset, w) for t, w in zip(times, watts, strict=True)], loads) == pytest.approx(
        offset, abs=0.1
    )


# Sources


def trace_between(start: float, end: float) -> Trace:
    return Trace((), start, end, None, None, None, None, ())


def test_a_meters_samples_lie_on_the_boards_clock(tmp_path: Path) -> None:
    import time

    now_wall, now = time.time(), time.monotonic()
    file = tmp_path / "meter.csv"
    rows = [f"{now_wall - 10 + k * 0.5 + 2.0},{3.0 if k < 10 else 7.0}" for k in range(20)]
    file.write_text("\n".join(["time,watts", *rows, "17000"]))
    meter = CsvMeter(file, offset_s=2.0)
    # The board's clock is 100 s ahead of ours; its measurement began 4 s ago and ended 2 s ago.
    readings = meter.readings(trace_between(now + 96, now + 98), Load(1, 1), 100.0)
    assert 4 <= len(readings) <= 5 and {watts for _, watts in readings} == {7.0}
    assert all(now + 96 <= t <= now + 98 for t, _ in readings)
    file.write_text("time,watts\n1,2\nyesterday,3\n2,3\n")
    with pytest.raises(UsageError, match="line 3"):
        CsvMeter(file)
    file.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(UsageError, match="no time and watts"):
        CsvMeter(file)
    with pytest.raises(FileError, match="No such file"):
        CsvMeter(tmp_path / "none")


def test_a_sensor_that_vanished_half_way_is_no_measurement() -> None:
    """An energy counter's first reading is no loss: watts are known from the second on."""
    watts = [None, 5.0, 6.0, None]
    power = [{"event": "power", "t_ns": n * 10**9, "watts": w, "source": "rapl"} for n, w in enumerate(watts)]
    window = {"event": "counters", "t_ns": 3 * 10**9, "elapsed_s": 3.0}
    sensor = open_source("board", "rapl", "pi")
    whole = read_trace([*power[:3], window])
    assert not whole.lost and sensor.readings(whole, Load(1, 1), 0.0) == [(1.0, 5.0), (2.0, 6.0)]
    broken = read_trace([*power, window, {"event": "warning", "message": "power sensor energy_uj cannot be read."}])
    with pytest.raises(FileError, match="energy_uj cannot be read"):
        sensor.readings(broken, Load(1, 1), 0.0)


def test_a_command_is_a_meter() -> None:
    import time

    meter = CommandMeter("sh -c 'while :; do echo 4.25; sleep 0.02; done'")
    try:
        time.sleep(0.1)
        now = time.monotonic()
        found = meter.readings(trace_between(now - 0.05 + 7, now + 0.1 + 7), Load(1, 1), 7.0)
        assert len(found) >= 2 and {watts for _, watts in found} == {4.25}
    finally:
        meter.close()
    for command, words in (("echo volts", "no number of watts"), ("false", "exit code 1")):
        meter = CommandMeter(command)
        time.sleep(0.2)
        with pytest.raises((UsageError, FileError), match=words):
            meter.wait_until(time.monotonic())
        meter.close()
    with pytest.raises(MissingToolError):
        CommandMeter("no-such-meter-tool")


def test_the_model_says_that_it_is_one() -> None:
    model = open_source("model:idle=3,busy=6,exponent=2", None, "pi")
    assert isinstance(model, PowerModel) and model.estimated and model.name == "model"
    assert model.watts(Load(0.5, 0.5)) == pytest.approx(3 + 6 * 0.5 * 0.25)
    assert {w for _, w in model.readings(trace_between(1, 2), Load(1, 1), 0.0)} == {9.0}
    for wrong in ("model:idle", "model:idle=-1", "csv:", "watts"):
        with pytest.raises(UsageError):
            open_source(wrong, None, "pi")
    with pytest.raises(UsageError, match="not available"):
        open_source("board", None, "pi")


def test_a_point_below_its_frequency_is_flagged() -> None:
    assert _slowed(1_500_000, (1_499_000, 1_500_000)) is None and _slowed(0, (600_000, 600_000)) is None
    assert "ran at 1000000 kHz" in str(_slowed(1_500_000, (1_000_000, 1_500_000)))
