"""The whole line on the host: a model to a folder with a binary for one target."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cross.assign_storage import assign_storage
from cross.choose_winograd import choose_winograd
from cross.compile_kernels import compile_kernels
from cross.errors import FileError, NoSpaceError
from cross.fuse_updates import fuse_updates
from cross.graph import Model
from cross.link import link
from cross.lower import Kernels, lower
from cross.native_sources import native_root
from cross.plan import MemoryPlan, plan_memory
from cross.target import Target
from cross.training_cost import training_cost
from cross.training_graph import build_training_graph
from cross.version import VERSION

Progress = Callable[[str, int, int], None]
FILES = ("taste-train", "libtaste.so", "weights.safetensors", "manifest.json")


@dataclass(frozen=True)
class BuildResult:
    """`fixed_bytes` and `per_sample_bytes` are the train program's arena, `saved_bytes` what it keeps for backward, a
    sample; `trained_parameters` counts values; `build_s` is what this call took."""

    out: Path
    binary_bytes: int
    fixed_bytes: int
    per_sample_bytes: int
    build_s: float
    sha256: str
    trainable: str
    trained_parameters: int
    saved_bytes: int


@dataclass(frozen=True)
class BuildOptions:
    """What a build depends on beside model and target."""

    loss: str
    trainable: str
    seed: int
    lean: bool
    bn_policy: str
    symbols: bool
    recomputation: str


def cache_root() -> Path:
    """Where compiled kernels are kept: $TASTE_CACHE, else ~/.cache/taste-edge."""
    configured = os.environ.get("TASTE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "taste-edge"


def build(
    model: Model,
    target: Target,
    out: Path,
    *,
    loss: str = "cross_entropy",
    trainable: str = "all",
    seed: int = 0,
    lean: bool = False,
    bn_policy: str = "per-micro-batch",
    symbols: bool = False,
    recomputation: str = "cheap",
    progress: Progress | None = None,
) -> BuildResult:
    """Build OUT/{taste-train, libtaste.so, weights.safetensors, manifest.json}; at once where OUT holds this very build.

    `trainable`: which parameters train (`cross.trainable`). `lean`: kernels that take the least memory, and the fastest of those.
    `bn_policy`: 'per-micro-batch', or 'frozen' for batch norms that keep to their running statistics. `symbols`: taste-train
    keeps its symbol table, for profilers. `recomputation`: what backward makes again instead of keeping (`cross.recompute`).
    Errors: UsageError (2), UnsupportedModelError (20), MissingToolError (22), NoSpaceError (11), FileError (12).
    """
    started = time.monotonic()
    options = BuildOptions(loss, trainable, seed, lean, bn_policy, symbols, recomputation)
    key = _key(model, target, options)
    try:
        if not _is_built(out, key):
            _build(model, target, out, options, progress)
            (out / "build.key").write_text(key + "\n", encoding="utf-8")
    except OSError as error:
        kind = NoSpaceError if error.errno == 28 else FileError
        raise kind(f"cannot write the build to {out}: {error.strerror}. Free space or choose another --out.") from error
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    program, binary = manifest["programs"]["train"], manifest["files"]["taste-train"]
    return BuildResult(
        out,
        binary["bytes"],
        program["fixed_bytes"],
        program["per_sample_bytes"],
        time.monotonic() - started,
        binary["sha256"],
        manifest["trainable"],
        manifest["trained_parameters"],
        manifest["saved_bytes"],
    )


def _lowered(model: Model, target: Target, options: BuildOptions) -> tuple[Kernels, MemoryPlan]:
    graph = build_training_graph(
        model,
        options.loss,
        trainable=options.trainable,
        bn_policy=options.bn_policy,
        recomputation=options.recomputation,
    )
    stored = assign_storage(graph, target)
    kernels = fuse_updates(lower(stored, target, choose_winograd(stored, target) if options.lean else None))
    return kernels, plan_memory(kernels)


def _build(model: Model, target: Target, out: Path, options: BuildOptions, progress: Progress | None) -> None:
    kernels, plan = _lowered(model, target, options)
    everything = replace(options, trainable="all")
    full = (kernels, plan) if options == everything else _lowered(model, target, everything)
    objects = compile_kernels(kernels, cache_root() / "kernels", progress)
    if progress is not None:
        progress("link", 0, 1)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        link(kernels, plan, objects, part, options.seed, training_cost(*full), options.symbols)
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(part.iterdir()):
            path.rename(out / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if progress is not None:
        progress("link", 1, 1)


def _is_built(out: Path, key: str) -> bool:
    stamp = out / "build.key"
    if not stamp.exists() or stamp.read_text(encoding="utf-8").strip() != key:
        return False
    return all((out / name).exists() for name in FILES)


def _key(model: Model, target: Target, options: BuildOptions) -> str:
    """Everything that decides a build: the model with its weights, the target, the options and our own sources."""
    digest = hashlib.sha256(f"{VERSION} {target} {options} {model.name}".encode())
    digest.update(
        repr((model.nodes, sorted(model.tensors.items()), sorted(model.inits.items()), model.blocks)).encode()
    )
    digest.update(json.dumps(model.metadata, sort_keys=True, default=str).encode())
    arrays: dict[str, Any] = {**model.parameters, **model.states, **model.constants}
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    root = Path(__file__).parent
    for path in sorted((*root.rglob("*.py"), root / "boards.toml", *native_root().rglob("*.[ch]"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
