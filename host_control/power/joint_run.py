"""`tune --joint`, and `tune` with another objective than throughput: from flags to a choice and a Pareto front."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cross.errors import UsageError
from host_control.board import OperatingPoint
from host_control.boards.deployed import DeployedBoard
from host_control.console import Console, rate
from host_control.power.joint import JointSpace, JointStudy, Outcome, Setting, best, front
from host_control.power.measuring import Measuring, board_offset, read_policies, settable_frequencies
from host_control.power.relation import read_relation
from host_control.power.sources import BOARD, Meter, Source, open_source
from host_control.power.table import PowerTable, megahertz
from host_control.preparation import Built, built_for, deployed, opened_board, send, session_memory
from host_control.run_folder import RunFolder, default_folder, write_whole
from host_control.search.space import make_space, memory_budget


def run(args: argparse.Namespace, console: Console) -> int:
    """Build, send, search; interrupted, the same command with --out goes on."""
    if args.objective == "time-to-accuracy" and not args.relation:
        raise UsageError(
            "--objective time-to-accuracy needs to know what batch sizes need. Give --relation (`power proxy`)."
        )
    if args.inference or args.resume:
        flag = "--inference" if args.inference else "--resume"
        raise UsageError(f"{flag} is not for a joint search, which trains and goes on with --out DIR. Leave it out.")
    relation = read_relation(args.relation[0]) if args.relation else None
    out: Path = args.out or default_folder(f"{args.model or 'build'}-joint", args.board)
    with RunFolder(out) as folder, opened_board(args) as opened:
        board = deployed(opened)
        built = built_for(args, board, out / "build", console)
        send(board, built, console)
        info = board.info()
        source = _source(args, info, board)
        try:
            fields = _search(args, console, folder, board, built, info, source, relation)
        finally:
            if source is not None:
                source.close()
    console.result("tune", fields | {"out": str(out)})
    return 0


def _source(args: argparse.Namespace, info: Any, board: DeployedBoard) -> Source | None:
    """None where the board has no sensor and the objective needs none."""
    kind = info.get("power_source")
    if args.power_source == BOARD and kind is None and args.objective != "energy":
        return None
    return open_source(args.power_source, kind, board.name, args.meter_offset or 0.0)


def joint_space(args: argparse.Namespace, info: Any, sizes: Sequence[int], cores: int) -> JointSpace:
    """What may be set on this board; what a flag fixes is not searched."""
    policies = read_policies(info)
    groups: list[tuple[int, ...] | None] = [args.cores]
    if args.joint and args.cores is None and len(policies) > 1:
        groups += [tuple(int(c) for c in p["cores"].split()) for p in info["policies"] if p.get("cores")]
    most = [len(group) if group else cores for group in groups]
    counts = [(args.threads,) if args.threads else tuple(range(1, m + 1)) if args.joint else (m,) for m in most]
    fitting = [
        (group, some)
        for group, some in zip(groups, counts, strict=True)
        if max(some) <= (len(group) if group else cores)
    ]
    if not fitting:
        raise UsageError(f"--threads {args.threads} is more than the cores there are. Lower it.")
    frequencies = settable_frequencies(policies) if args.joint else ()
    return JointSpace(tuple(sizes), tuple(fitting), tuple(frequencies) or (0,))


def _sizes(
    args: argparse.Namespace, board: DeployedBoard, built: Built, info: Any, relation: Mapping[int, float] | None
) -> list[int]:
    memory = session_memory(info, "train", fused=True)
    budget = memory_budget(board.facts().memory_available_bytes, args.memory)
    sizes = list(make_space(memory, budget, args.max_batch_size, built.minimum_batch).sizes)
    if relation is not None:
        sizes = [b for b in sorted(relation) if sizes[0] <= b <= sizes[-1]]
    if not sizes:
        raise UsageError(
            "no batch size of the relation fits. Raise --max-batch-size, or run `power proxy` with smaller ones."
        )
    return sizes


def _search(
    args: argparse.Namespace, console: Console, folder: RunFolder, board: DeployedBoard, built: Built, info: Any,
    source: Source | None, relation: Mapping[int, float] | None,
) -> dict[str, Any]:  # fmt: skip
    sizes = _sizes(args, board, built, info, relation)
    space = joint_space(args, info, sizes, board.facts().cores)
    emulated = bool(info.get("emulated")) or board.facts().emulated
    measuring = _measuring(args, board, built, source, folder.path, space, emulated) if source is not None else None
    key = {
        "build": built.manifest.get("build_id"),
        "board": board.name,
        "objective": args.objective,
        "joint": args.joint,
    }
    key |= {"source": source.name if source else None, "relation": [str(p) for p in args.relation]}
    key |= {name: getattr(args, name) for name in ("max_batch_size", "threads", "cores", "seconds")}
    until = time.monotonic() + args.time_budget
    labels = measuring.table.labels if measuring is not None else (" (emulated)" if emulated else "")
    study = JointStudy(folder.path, space, key, args.budget, args.seed)
    console.line(
        f"searching {len(space)} settings ({len(space.batch_sizes)} batch sizes, "
        f"{sum(len(c) for _, c in space.core_sets)} of threads and cores, {len(space.frequencies_khz)} frequencies); at most "
        f"{study.budget} are measured"
    )

    def measure(setting: Setting) -> Outcome:
        outcome = _measure(board, measuring, setting)
        console.event("trial", **_record(outcome))
        console.line(describe(outcome, labels))
        return outcome

    try:
        study.run(measure, relation, lambda: time.monotonic() > until)
    except KeyboardInterrupt:
        kept = len(study.outcomes)
        raise KeyboardInterrupt(
            f"interrupted with {kept} settings kept in {folder.path}. Go on with the same command and --out {folder.path}."
        ) from None
    found, complete = study.outcomes, len(study.known) >= study.budget
    if not found:
        raise UsageError("nothing could be measured within the time. Raise --time-budget.")
    choice, pareto = best(found, args.objective, relation), front(found, relation)
    fields = {
        "objective": args.objective,
        "choice": _record(choice),
        "pareto": [_record(o) for o in pareto],
        "measured": [_record(o) for o in found],
        "budget": study.budget,
        "space_size": len(space),
        "complete": complete,
        "board": board.name,
        "emulated": emulated,
        "source": source.name if source else None,
        "estimated": source.estimated if source else False,
        "seed": args.seed,
    }
    folder.write_json("result.json", {"verb": "tune", **fields})
    write_whole(folder.path / "pareto.csv", _csv(pareto, labels).encode())
    _say(console, choice, pareto, labels, args.objective)
    console.line(f"{folder.path}: result.json, pareto.csv, joint.json")
    return fields


def _measuring(
    args: argparse.Namespace, board: DeployedBoard, built: Built, source: Source, folder: Path, space: JointSpace, emulated: bool
) -> Measuring:  # fmt: skip
    table = PowerTable(
        str(built.manifest.get("model")), str(built.manifest.get("build_id")), board.name, emulated, source.name,
        source.estimated, space.batch_sizes, space.frequencies_khz, None, args.seconds,
    )  # fmt: skip
    measuring = Measuring(board, source, folder, table, lambda point: None)
    if isinstance(source, Meter):
        measuring.offset_s = board_offset(board)
    return measuring


def _measure(board: DeployedBoard, measuring: Measuring | None, setting: Setting) -> Outcome:
    """With power where there is a source of it."""
    wanted = OperatingPoint(setting.batch_size, "train", setting.threads, setting.cores, setting.frequency_khz or None)
    if measuring is None:
        counters = board.measure(wanted)
        return Outcome(setting, counters.samples_per_s, counters.spread, None, None)
    point = measuring.measure(wanted)
    return Outcome(setting, point.samples_per_s, point.spread, point.watts, point.joules_per_sample)


def _record(outcome: Outcome) -> dict[str, Any]:
    own = {k: v for k, v in asdict(outcome).items() if k != "setting"}
    return asdict(outcome.setting) | own


def describe(outcome: Outcome, labels: str) -> str:
    """One line of a setting and what it gave."""
    s = outcome.setting
    cores = "all cores" if s.cores is None else f"cores {','.join(map(str, s.cores))}"
    energy = f", {outcome.joules_per_sample * 1e3:.3g} mJ a sample" if outcome.joules_per_sample is not None else ""
    return (
        f"batch size {s.batch_size}, {s.threads} thread{'s' if s.threads > 1 else ''} on {cores}, {megahertz(s.frequency_khz)}: "
        f"{rate(outcome.samples_per_s)} samples/s{energy}{labels}"
    )


def _say(console: Console, choice: Outcome, pareto: Sequence[Outcome], labels: str, objective: str) -> None:
    if len(pareto) > 1:
        console.line(f"nothing beats these in rate and energy{labels}:")
        for outcome in pareto:
            console.line("  " + describe(outcome, labels))
    console.line(f"best for {objective}: {describe(choice, labels)}")


def _csv(outcomes: Sequence[Outcome], labels: str) -> str:
    lines = ["batch_size,threads,cores,frequency_khz,samples_per_s,watts,joules_per_sample,labels"]
    for o in outcomes:
        s = o.setting
        cores = "" if s.cores is None else " ".join(map(str, s.cores))
        numbers = ["" if v is None else f"{v:.9g}" for v in (o.samples_per_s, o.watts, o.joules_per_sample)]
        lines.append(
            ",".join([str(s.batch_size), str(s.threads), cores, str(s.frequency_khz), *numbers, labels.strip(" ()")])
        )
    return "\n".join(lines) + "\n"
