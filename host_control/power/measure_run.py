"""`power measure`: from flags to the table, the Pareto files and what people read."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cross.errors import CompatibilityError, NoOperatingPointError, UsageError
from host_control.boards.deployed import DeployedBoard
from host_control.console import Console, duration, rate
from host_control.power.energy import find_offset
from host_control.power.measuring import (
    Measuring,
    board_offset,
    check_same,
    read_policies,
    settable_frequencies,
)
from host_control.power.plot import write_pareto
from host_control.power.profiling import profile_all, profile_pruned
from host_control.power.selection import frontier, no_point
from host_control.power.sources import MODEL, Meter, Source, open_source
from host_control.power.table import TABLE, Point, PowerTable, megahertz, read_table
from host_control.preparation import Built, built_for, deployed, opened_board, send, session_memory
from host_control.run_folder import RunFolder, default_folder

DEFAULT_BATCHES = (4, 8, 16, 32, 64, 128)
IDLE_S = 5.0
_LOAD_S, _PAUSE_S = 3.0, 2.0


def run(args: argparse.Namespace, console: Console) -> int:
    """Build and send where needed, then every point; interrupted, the same command with --out goes on."""
    out: Path = args.out or default_folder(f"{args.model or 'build'}-power", args.board)
    with RunFolder(out) as folder, opened_board(args) as opened:
        board = deployed(opened)
        built = built_for(args, board, out / "build", console)
        send(board, built, console)
        info = board.info()
        source = open_source(args.power_source, info.get("power_source"), board.name, args.meter_offset or 0.0)
        try:
            table = _Run(args, console, folder.path, board, built, source, info).measure()
        finally:
            source.close()
        fields = result_fields(table) | {"out": str(out)}
        folder.write_json("result.json", {"verb": "power", "action": "measure", **fields})
    console.result("power", {"action": "measure", **fields})
    return 0


def result_fields(table: PowerTable) -> dict[str, Any]:
    """What the result line has of a table."""
    names = "batch_size frequency_khz samples_per_s spread watts mean_watts joules_per_sample temperature_c throttle_bits tainted"
    points = [{n: getattr(p, n) for n in names.split()} for p in sorted(table.points, key=lambda p: p.key)]
    own = "model board emulated source estimated batch_sizes frequencies_khz limit_watts idle_watts visits"
    return {n: getattr(table, n) for n in own.split()} | {"points": points}


@dataclass(frozen=True)
class _Run:
    args: argparse.Namespace
    console: Console
    folder: Path
    board: DeployedBoard
    built: Built
    source: Source
    info: Any

    def measure(self) -> PowerTable:
        args, console = self.args, self.console
        wanted = self._empty_table()
        table = self._stored(wanted)
        measuring = Measuring(
            self.board, self.source, self.folder, table, self._say, threads=args.threads, cores=args.cores
        )
        if isinstance(self.source, Meter):
            measuring.offset_s = board_offset(self.board)
            if args.meter_offset is None:
                self._find_meter_offset(measuring, min(table.batch_sizes))
        if args.subtract_idle and table.idle_watts is None:
            idle = measuring.idle(IDLE_S)
            measuring.table = replace(table, idle_watts=idle)
            console.line(f"idle: {idle:.2f} W{table.labels}, subtracted from every reading")
        self._announce(measuring.table)
        try:
            if args.limit_watts is None:
                profile_all(table.batch_sizes, table.frequencies_khz, measuring.watts)
            else:
                profile_pruned(table.batch_sizes, table.frequencies_khz, args.limit_watts, measuring.watts)
        except KeyboardInterrupt:
            kept = len(measuring.table.points)
            raise KeyboardInterrupt(
                f"interrupted with {kept} points kept in {self.folder}. Go on with the same command and --out {self.folder}."
            ) from None
        write_pareto(self.folder, measuring.table)
        found = measuring.table.points
        if args.limit_watts is not None and not frontier(found, args.limit_watts):
            raise NoOperatingPointError(no_point(found, args.limit_watts, table.labels))
        console.line(f"{self.folder}: power.json, power.csv, pareto.csv, pareto.png, result.json")
        return measuring.table

    def _empty_table(self) -> PowerTable:
        args = self.args
        steps = self._frequencies() or (0,)
        if steps == (0,):
            self.console.line(
                f"{self.board.name} has no cpufreq: its frequency stays as it is, batch sizes alone are measured"
            )
        return PowerTable(
            model=str(self.built.manifest.get("model")),
            build=str(self.built.manifest.get("build_id")),
            board=self.board.name,
            emulated=bool(self.info.get("emulated")) or self.board.facts().emulated,
            source=self.source.name,
            estimated=self.source.estimated,
            batch_sizes=tuple(sorted(set(args.batch_sizes or self._fitting()))),
            frequencies_khz=tuple(steps),
            limit_watts=args.limit_watts,
            seconds=args.seconds,
        )

    def _frequencies(self) -> tuple[int, ...]:
        """--frequencies, which are some of the board's, or all of them; none where it has no cpufreq."""
        known = settable_frequencies(read_policies(self.info))
        wanted: tuple[int, ...] = self.args.frequencies or known
        unknown = [khz for khz in wanted if khz not in known]
        if unknown:
            has = ", ".join(f"{khz / 1000:g}" for khz in known) + " MHz" if known else "no cpufreq to set one with"
            raise CompatibilityError(
                f"--frequencies {', '.join(f'{khz / 1000:g}' for khz in unknown)}: {self.board.name} has {has}. "
                f"{'Choose of these' if known else 'Leave --frequencies out'}."
            )
        return wanted

    def _fitting(self) -> tuple[int, ...]:
        memory = session_memory(self.info, "train", fused=True)
        free = self.board.facts().memory_available_bytes
        limit = min(free, self.args.memory or free)
        fitting = tuple(
            b
            for b in DEFAULT_BATCHES
            if b >= self.built.minimum_batch and memory.fixed_bytes + b * memory.per_sample_bytes <= limit
        )
        if not fitting:
            raise UsageError(
                f"none of the batch sizes {', '.join(map(str, DEFAULT_BATCHES))} fits on {self.board.name}. Give --batch-sizes."
            )
        return fitting

    def _stored(self, wanted: PowerTable) -> PowerTable:
        """What the folder holds of the same measurement already."""
        if not (self.folder / TABLE).exists():
            return wanted
        stored = read_table(self.folder)
        check_same(stored, wanted, self.folder)
        self.console.line(f"going on with {len(stored.points)} points of {self.folder}")
        return stored

    def _find_meter_offset(self, measuring: Measuring, batch_size: int) -> None:
        """Idle, load, idle: the meter's clock is where its steps fit."""
        assert isinstance(self.source, Meter)
        from host_control.board import OperatingPoint

        time.sleep(_PAUSE_S)
        began = time.monotonic()
        until = began + _LOAD_S
        while time.monotonic() < until:
            self.board.bench(OperatingPoint(batch_size, threads=self.args.threads, cores=self.args.cores))
        ended = time.monotonic()
        time.sleep(_PAUSE_S)
        offset = find_offset(self.source.samples(), [(began, ended)])
        if offset is None:
            raise UsageError(
                f"{self.source.name} shows no step where a load of {ended - began:.0f} s began and ended: is it this board's meter? "
                "Otherwise give --meter-offset in seconds."
            )
        self.source.offset_s = offset
        self.console.line(
            f"the meter's clock shows {self.source.offset_s:+.2f} s: found by a load of {ended - began:.0f} s"
        )

    def _announce(self, table: PowerTable) -> None:
        count = len(table.batch_sizes) * len(table.frequencies_khz)
        if table.limit_watts is not None:
            count = min(count, 2 * len(table.batch_sizes) + len(table.frequencies_khz))
        left = max(count - len(table.points), 0)
        what = f"at most {count} points" if table.limit_watts is not None else f"{count} points"
        self.console.line(
            f"measuring {what} ({len(table.batch_sizes)} batch sizes x {len(table.frequencies_khz)} frequencies), power from "
            f"{table.source}{table.labels}: about {duration(left * (table.seconds + 1.5))}"
        )
        if self.source.name == MODEL:
            self.console.line("warning: the power model is an estimate from cores and frequency, not a measurement")

    def _say(self, point: Point) -> None:
        labels = " (estimated)" if self.source.estimated else ""
        emulated = " emulated" if self.board.facts().emulated else ""
        self.console.event("point", **{k: v for k, v in vars(point).items() if k != "samples"})
        self.console.line(
            f"batch size {point.batch_size}, {megahertz(point.frequency_khz)}: {rate(point.samples_per_s)}{emulated} samples/s, "
            f"peak {point.watts:.2f} W{labels}, {point.joules_per_sample * 1e3:.3g} mJ a sample"
            + (f"; disturbed: {point.taint}" if point.tainted else "")
        )
