"""Moving a run between operating points, on a simulated board: limits that change, boards that drift."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cross.errors import UsageError
from host_control.console import Console
from host_control.power.drift import Visit, order_has_changed, probes, rescaled
from host_control.power.steering import Steering, best_point, candidates_for, read_limit
from host_control.power.table import Point, PowerTable

STEPS = (600_000, 1_000_000, 1_500_000)


def rate_of(batch_size: int, khz: int) -> float:
    return khz / 10_000 * (1 + batch_size / 16)


def watts_of(batch_size: int, khz: int) -> float:
    return 2 + 2 * (khz / 1_000_000) ** 2 + batch_size / 16


def table_of(batches: tuple[int, ...] = (4, 8, 16, 32)) -> PowerTable:
    points = tuple(
        Point(b, f, rate_of(b, f), 0.01, watts_of(b, f), watts_of(b, f), watts_of(b, f) / rate_of(b, f))
        for b in batches
        for f in STEPS
    )
    return PowerTable("m", "b", "pi", False, "board:ina3221", False, batches, STEPS, None, 5.0, None, 12, points)


@dataclass
class SimulatedBoard:
    """Takes the control file at the next step, as the program on the board does; `factor`: its speed now over that of the table."""

    time: float = 0.0
    point: tuple[int, int] = (0, 0)
    files: dict[str, str] = field(default_factory=dict)
    moves: list[tuple[int, int]] = field(default_factory=list)
    factor: Any = staticmethod(lambda b, f: 1.0)
    taken: str = ""

    def put(self, source: Path, path: str, *, offset: int = 0) -> int:
        self.files[path] = source.read_text()
        return len(self.files[path])

    def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    def run(self, steering: Steering, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end:
            self.time += 0.1
            text = self.files.get("/run/operating-point", "")
            if text != self.taken:
                self.taken = text
                values = dict(line.split() for line in text.splitlines())
                self.point = int(values["batch_size"]), int(values["frequency_khz"])
                self.moves.append(self.point)
                steering.on_event({"event": "operating_point", "step": 1})
            speed = rate_of(*self.point) * self.factor(*self.point)
            steering.on_event({"event": "step", "step": 1, "samples_per_s": speed})
            steering.on_event({"event": "power", "watts": watts_of(*self.point)})


def steered(board: SimulatedBoard, limit: float, **more: Any) -> tuple[Steering, io.StringIO]:
    said = io.StringIO()
    steering = Steering(table_of(), limit, board, Console(stream=said), 16, now=lambda: board.time, **more)
    assert steering.arguments("/run")[:2] == ["--batch-size", "16"]
    return steering, said


def test_a_limit_that_changes_moves_the_point_at_once(tmp_path: Path) -> None:
    file = tmp_path / "limit"
    file.write_text("7.6 W\n")
    board = SimulatedBoard()
    steering, said = steered(board, read_limit(file), limit_file=file)
    board.run(steering, 5)
    file.write_text("5\n")
    board.run(steering, 5)
    file.write_text("1\n")
    board.run(steering, 5)
    file.write_text("lots\n")
    board.run(steering, 5)
    file.write_text("7.6\n")
    board.run(steering, 5)
    best = [(16, 1_500_000), (8, 1_000_000), (4, 600_000)]
    assert watts_of(16, 1_500_000) < 7.6 and watts_of(16, 1_000_000) == 5.0, "power equal to the limit is not below it"
    assert board.moves == [*best, (16, 1_500_000)], "a file that can be read again is"
    text = said.getvalue()
    assert (
        "the limit is 5 W now" in text and "no point is below 1 W; training goes on at the one that takes least" in text
    )
    assert text.count("holds 'lots', no number of watts") == 1 and "The limit stays 1 W" in text


def test_a_board_that_is_slower_throughout_is_interpolated() -> None:
    board = SimulatedBoard(factor=lambda b, f: 0.8)
    steering, said = steered(board, 5.5, drift_every_s=20, drift_s=2)
    before = table_of()
    board.run(steering, 19)
    assert board.moves == [(16, 1_000_000)]
    board.run(steering, 12)
    assert set(board.moves) == {p.key for p in probes(before, 5.5, 16)} and len(board.moves) == 4
    assert board.point == (16, 1_000_000) and "the order of the points is as it was" in said.getvalue()
    for point in steering.table.points:
        known = before.at(*point.key)
        assert known is not None and point.samples_per_s == pytest.approx(0.8 * known.samples_per_s)
        assert point.watts == pytest.approx(known.watts)


def test_an_order_that_changes_has_the_table_measured_anew() -> None:
    """A heavy neighbour: the large batch falls behind the small ones."""
    board = SimulatedBoard(factor=lambda b, f: 0.4 if b == 16 else 1.0)
    steering, said = steered(board, 5.5, drift_every_s=20, drift_s=2)
    board.run(steering, 60)
    assert "the order of the points has changed: the table is measured anew" in said.getvalue()
    below = {p.key for p in table_of((4, 8, 16)).points if p.watts < 5.5}
    assert set(board.moves) == below
    assert board.point == (8, 1_000_000)
    assert steering.table.at(16, 1_000_000).samples_per_s == pytest.approx(0.4 * rate_of(16, 1_000_000))  # type: ignore[union-attr]


def test_noise_changes_no_order_and_ratios_lie_between_their_neighbours() -> None:
    table = table_of()
    first, second = table.at(16, 1_000_000), table.at(8, 1_000_000)
    assert first is not None and second is not None
    nearly = [Visit(16, 1_000_000, 99.0, None), Visit(8, 1_000_000, 100.0, None)]
    assert not order_has_changed(table, nearly)
    assert order_has_changed(table, [nearly[0], Visit(8, 1_000_000, 120.0, None)])
    visits = [Visit(4, 600_000, 0.5 * rate_of(4, 600_000), 1.0), Visit(16, 1_500_000, rate_of(16, 1_500_000), None)]
    ratios = {p.key: p.samples_per_s / rate_of(*p.key) for p in rescaled(table, visits).points}
    assert ratios[4, 600_000] == pytest.approx(0.5) and ratios[16, 1_500_000] == pytest.approx(1.0)
    assert all(0.5 <= ratio <= 1.0 + 1e-9 for ratio in ratios.values())
    assert ratios[4, 1_000_000] < ratios[16, 1_000_000]


def test_candidates_are_bounded_by_the_effective_batch(tmp_path: Path) -> None:
    assert {p.batch_size for p in candidates_for(table_of(), 16, 8).points} == {8, 16}
    with pytest.raises(UsageError, match="between 1 and the effective batch 2"):
        candidates_for(table_of(), 2, 1)
    assert best_point(table_of(), 3.0, 16) == (table_of().at(4, 600_000), True)
    for text in ("", "-3", "0", "five", "nan"):
        (tmp_path / "limit").write_text(text)
        with pytest.raises(UsageError, match="limit"):
            read_limit(tmp_path / "limit")
    with pytest.raises(UsageError, match="No such file"):
        read_limit(tmp_path / "none")


def test_with_json_every_move_is_an_event() -> None:
    out = io.StringIO()
    board = SimulatedBoard()
    steering = Steering(table_of(), 5.5, board, Console(True, out), 16, now=lambda: board.time)
    steering.arguments("/run")
    (event,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert event["event"] == "steering" and "batch size 16, 1000 MHz" in event["message"]
