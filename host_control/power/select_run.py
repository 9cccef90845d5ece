"""`power select`: the choice under a limit, the baselines, and what each costs in time and energy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host_control.console import Console, rate
from host_control.power.plot import write_pareto
from host_control.power.relation import read_relation
from host_control.power.selection import Choice, Selection, pareto, select, sensitivity
from host_control.power.table import PowerTable, megahertz, read_table
from host_control.run_folder import RunFolder, default_folder

_NAMES = {
    "choice": "choice",
    "baseline1": "baseline 1: the largest batch size",
    "baseline2": "baseline 2: the fewest examples",
    "exhaustive": "best of all points",
}


def run(args: argparse.Namespace, console: Console) -> int:
    """Choose, compare, and leave the Pareto file and figure."""
    table = read_table(args.table)
    relations = {str(path): read_relation(path) for path in args.relation}
    relation = next(iter(relations.values()), None)
    found = select(table, args.limit_watts, relation, args.safe_frequency)
    _say(console, table, found, args.limit_watts, relation)
    rows = sensitivity(table, args.limit_watts, relations) if len(relations) > 1 else []
    _say_sensitivity(console, rows)
    out: Path = args.out or default_folder(f"{table.model}-select", table.board)
    with RunFolder(out) as folder:
        write_pareto(out, table, found, args.limit_watts)
        fields = _fields(table, found, rows) | {"limit_watts": args.limit_watts, "out": str(out)}
        folder.write_json("result.json", {"verb": "power", "action": "select", **fields})
    console.line(f"{out}: result.json, pareto.csv, pareto.png")
    console.result("power", {"action": "select", **fields})
    return 0


def describe(choice: Choice | None, against: Choice) -> dict[str, Any] | None:
    """A point for scripts; time and energy to the accuracy are relative to the choice's."""
    if choice is None:
        return None
    p = choice.point
    return {
        "batch_size": p.batch_size,
        "frequency_khz": p.frequency_khz,
        "watts": p.watts,
        "samples_per_s": p.samples_per_s,
        "joules_per_sample": p.joules_per_sample,
        "relation": choice.relation,
        "relative_time": choice.time / against.time,
        "relative_energy": choice.energy / against.energy if against.energy else None,
    }


def _fields(table: PowerTable, found: Selection, rows: list[tuple[str, str, Choice, float]]) -> dict[str, Any]:
    named = {name: describe(getattr(found, name), found.choice) for name in _NAMES}
    front = [
        {n: getattr(p, n) for n in "batch_size frequency_khz samples_per_s joules_per_sample watts".split()}
        for p in pareto(table.points)
    ]
    spread = [
        {"proxy": proxy, "target": target, "batch_size": c.point.batch_size, "extra_time": extra}
        for proxy, target, c, extra in rows
    ]
    own = {name: getattr(table, name) for name in ("model", "board", "emulated", "source", "estimated")}
    return own | named | {"pareto": front, "sensitivity": spread, "safe_khz": found.safe_khz}


def _say(
    console: Console, table: PowerTable, found: Selection, limit: float, relation: Mapping[int, float] | None
) -> None:
    if relation is None:
        console.line("no --relation: every batch size is taken to need as many examples (see `power proxy`)")
    if table.limit_watts is not None and limit > table.limit_watts:
        console.line(
            f"warning: the table was pruned for {table.limit_watts:g} W: what lies between that and {limit:g} W was not measured"
        )
    rows = []
    for name, title in _NAMES.items():
        choice = getattr(found, name)
        if choice is None:
            rows.append([title, "not measured", "", "", "", "", "", ""])
            continue
        p, cost = choice.point, describe(choice, found.choice) or {}
        energy = cost["relative_energy"]
        rows.append(
            [
                title,
                str(p.batch_size),
                megahertz(p.frequency_khz),
                f"{p.watts:.2f}",
                rate(p.samples_per_s),
                f"{choice.relation:.2f}",
                f"{cost['relative_time']:.2f}",
                "-" if energy is None else f"{energy:.2f}",
            ]
        )
    columns = [("", "left")] + [
        (name, "right") for name in ("batch size", "frequency", "watts", "samples/s", "r", "time", "energy")
    ]
    console.table(columns, rows, title=f"{table.model} on {table.board} below {limit:g} W{table.labels}")
    if table.limit_watts is not None and None in (found.baseline1, found.baseline2):
        console.line(
            "a pruned table may lack a baseline's point: measure without --limit-watts for the whole comparison"
        )


def _say_sensitivity(console: Console, rows: list[tuple[str, str, Choice, float]]) -> None:
    if rows:
        console.table(
            [("proxy", "left"), ("if the truth is", "left"), ("batch size", "right"), ("extra time", "right")],
            [[proxy, target, str(c.point.batch_size), f"{extra:.1%}"] for proxy, target, c, extra in rows],
            title="what another proxy would cost",
        )
