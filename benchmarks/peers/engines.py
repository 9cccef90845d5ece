"""How each engine measures a point: ours, and the peers in the Python environments that hold them."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.peers.clean_windows import run_queue_delay_ns, summary
from cross.errors import TasteError

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "benchmarks" / "peers"
FOLDER = ROOT / "build" / "benchmarks"
OURS = "taste-edge"
PACKAGES = {"torch": "torch", "torch-tuned": "torch", "ort": "onnxruntime.training", "jax": "jax"}
"""Every peer, and the Python package that it is."""

WORKER_LIMIT_S = 900.0
ALLOCATORS = ("tcmalloc_minimal", "tcmalloc", "jemalloc")
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35)}
"""glibc's malloc gives large blocks back after every step and takes page faults for them in the next one."""

Row = dict[str, Any]
Engine = Callable[[int], Row]
"""Measures one batch size once: a row with `samples_per_s`, or with `error`."""


@dataclass(frozen=True)
class Work:
    """What every engine does. `lean`: ours as `build --lean` makes it."""

    model: str
    shape: tuple[int, ...]
    classes: int
    threads: int
    seconds: float
    lean: bool = False

    @property
    def name(self) -> str:
        return f"{Path(self.model).stem}-{'x'.join(map(str, self.shape))}-{self.classes}"


@cache
def missing(peer: str) -> str | None:
    """Why a peer cannot be measured here, with what to do about it; None where it can."""
    package = PACKAGES[peer]
    if not _has(_python(peer), package):
        remedy = "make bench" if package == "torch" else "make peers"
        return f"it needs the Python package {package}. Run `{remedy}`, or leave it out of --peers."
    return None


def _python(peer: str) -> str:
    """The interpreter of a peer: an environment of its own where `make peers` made one, else this one."""
    own = ROOT / "build" / "peers" / peer / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def _has(python: str, package: str) -> bool:
    """Whether an environment holds a package; packages are not imported but the parents of dotted names."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", code, package], capture_output=True, check=False).returncode == 0


def our_engine(work: Work) -> tuple[Engine, int]:
    """This project's own program on this machine, built for its CPU; and how many parameters it trains."""
    from cross.build import build
    from cross.load_model import load_model
    from host_control.boards import DeployedBoard, open_board
    from host_control.preparation import choose_target

    with open_board("local") as board:
        assert isinstance(board, DeployedBoard), "local is a machine"
        target = choose_target(None, "local", board.facts())
    folder = FOLDER / f"{work.name}-{target.name}{'-lean' if work.lean else ''}"
    print(f"building {work.model} for {target.name}", file=sys.stderr, flush=True)
    model = load_model(work.model, input_shape=work.shape, classes=work.classes)
    build(model, target, folder, lean=work.lean)
    command = [str(folder / "taste-train"), "bench", "--threads", str(work.threads), "--seconds", str(work.seconds)]

    def measure(batch_size: int) -> Row:
        return bench_row([*command, "--batch-size", str(batch_size)], work.threads)

    return measure, sum(prod(parameter.shape) for parameter in model.parameters.values())


def bench_row(command: Sequence[str], threads: int) -> Row:
    """The row of one `taste-train bench` here, its windows judged as those of the peers are: by how long its threads waited
    for a core, which is read as each window is reported."""
    windows: list[tuple[float, float]] = []
    row: Row = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        waited, elapsed_s = 0, 0.0
        for line in run.stdout:
            event = json.loads(line)
            if event["event"] == "counters":
                # The first window's share counts the warm-up's waiting too, and is the worse for it.
                before, waited = waited, run_queue_delay_ns(run.pid)
                window_s, elapsed_s = event["elapsed_s"] - elapsed_s, event["elapsed_s"]
                windows.append((window_s / event["steps"], (waited - before) * 1e-9 / window_s / threads))
            elif event["event"] == "result":
                row = event
        said = run.stderr.read().strip().splitlines()
    if run.returncode != 0 or not row:
        return {"error": said[-1].removeprefix("error: ") if said else f"exit code {run.returncode}"}
    timing = summary(windows)
    return {
        "samples_per_s": row["batch_size"] / timing.step_s,
        "spread": timing.spread,
        "windows": timing.windows,
        "clean_windows": timing.clean,
        "tainted": timing.tainted,
        "peak_rss_bytes": row["peak_rss_bytes"],
    }


def peer_engine(peer: str, work: Work, parameters: int) -> Engine:
    """A peer; a row of another number of parameters than ours is an error, not a rate."""
    script, extra = f"{PACKAGES[peer].partition('.')[0]}_worker.py", list[str]()
    if peer == "torch-tuned":
        extra = ["--tuned"]
    if peer == "ort":
        script, extra = "ort_worker.py", ["--folder", str(_ort_artifacts(work))]
    command = [_python(peer), str(WORKERS / script), *_flags(work), *extra]
    environment, allocator = tuned_allocator() if peer == "torch-tuned" else ({}, "glibc")

    def measure(batch_size: int) -> Row:
        row = _run([*command, "--batch-size", str(batch_size)], environment)
        if "error" not in row and row["parameters"] != parameters:
            return {"error": f"its {work.model} has {row['parameters']} parameters, ours {parameters}"}
        return row | {"allocator": allocator}

    return measure


def _flags(work: Work) -> list[str]:
    flags = ["--model", work.model, "--input-shape", ",".join(map(str, work.shape)), "--classes", str(work.classes)]
    return [*flags, "--threads", str(work.threads), "--seconds", str(work.seconds)]


def tuned_allocator() -> tuple[dict[str, str], str]:
    """What a process is started with so that its pages stay its own, and its name: TCMalloc or jemalloc where one is
    installed, else glibc's own settings."""
    for name in ALLOCATORS:
        if library := ctypes.util.find_library(name):
            return {"LD_PRELOAD": library}, name
    return KEEP_PAGES, "glibc, keeping its pages"


def _run(command: Sequence[str], environment: dict[str, str]) -> Row:
    """The row that a worker prints last; what it says on stderr where it fails."""
    try:
        run = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=WORKER_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {WORKER_LIMIT_S:.0f} s"}
    if run.returncode != 0:
        said = run.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"exit code {run.returncode}"}
    row: Row = json.loads(run.stdout.splitlines()[-1])
    return row


def _ort_artifacts(work: Work) -> Path:
    """ONNX Runtime's training artifacts, made once: PyTorch exports the model (ONNX Runtime training needs it beside
    itself anyway), ONNX Runtime adds the backward pass."""
    folder = FOLDER / f"{work.name}-ort"
    if (folder / "optimizer_model.onnx").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.onnx"
    print(f"exporting {work.model} for ONNX Runtime", file=sys.stderr, flush=True)
    exported = _run([_python("ort"), str(WORKERS / "torch_worker.py"), *_flags(work), "--export", str(model)], {})
    if "error" not in exported:
        model.with_suffix(".json").write_text(json.dumps(exported), encoding="utf-8")
        prepare = ["--folder", str(folder), "--prepare", str(model)]
        exported = _run([_python("ort"), str(WORKERS / "ort_worker.py"), *_flags(work), *prepare], {})
    if "error" in exported:
        raise TasteError(
            f"ONNX Runtime's training model cannot be made: {exported['error']}. Leave ort out of --peers."
        )
    return folder
