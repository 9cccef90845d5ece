"""Stage 5: tables, kernels and the C runtime become one static program, one shared library, a weights file, a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from cross import toolchain
from cross.errors import TasteError
from cross.graph import Model
from cross.lower import Kernels
from cross.native_sources import native_root
from cross.plan import MemoryPlan
from cross.tables import emit_tables, minimum_batch
from cross.target import Target
from cross.training_cost import TrainingCost, training_cost
from cross.version import VERSION

CFLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
    "-g0",
    "-ffunction-sections",
)


@dataclass(frozen=True)
class Binary:
    """What a build leaves in its folder; sizes in bytes, `sha256` of taste-train."""

    folder: Path
    binary_bytes: int
    sha256: str
    manifest: Mapping[str, Any]


def link(
    kernels: Kernels,
    plan: MemoryPlan,
    objects: Mapping[str, Path],
    folder: Path,
    seed: int,
    full: TrainingCost,
    symbols: bool = False,
) -> Binary:
    """Write FOLDER/{tables.c, taste-train, libtaste.so, weights.safetensors, manifest.json}.

    `full`: what training every parameter costs, for the manifest to compare with. `symbols`: the program keeps its symbol
    table, so that a profiler can name kernels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    build_id = _build_id(kernels, plan, objects, seed)
    tables = folder / "tables.c"
    tables.write_text(emit_tables(kernels, plan, build_id, seed), encoding="utf-8")
    target, root = kernels.target, native_root()
    library = sorted((root / "src").glob("*.c"))
    program = sorted((root / "taste-train").glob("*.c"))
    inputs: list[str | Path] = [*library, tables, *objects.values()]
    strip = [] if symbols else ["-s"]
    alone: list[str | Path] = ["-static", *strip, "-Wl,--gc-sections", "-o", folder / "taste-train"]
    exports = f"-Wl,--version-script={root / 'libtaste.map'}"
    shared: list[str | Path] = ["-shared", "-s", "-fvisibility=hidden", exports, "-o", folder / "libtaste.so"]
    # Side by side: the first link for a target also builds a C library, on one core each.
    with ThreadPoolExecutor(2) as pool:
        links = [
            pool.submit(_zig, target.zig_static_triple, target, [*program, *inputs, *alone]),
            pool.submit(_zig, target.zig_shared_triple, target, [*inputs, *shared]),
        ]
        for done in links:
            done.result()
    write_weights(kernels.graph.training.model, folder / "weights.safetensors")
    manifest = _manifest(kernels, plan, build_id, folder) | _training(kernels, plan, full)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    binary = manifest["files"]["taste-train"]
    return Binary(folder, binary["bytes"], binary["sha256"], manifest)


def write_weights(model: Model, path: Path) -> None:
    """Parameters, states and constants in canonical layout, under their own names."""
    arrays = {**model.parameters, **model.states, **model.constants}
    # Not save_file: what that writes only its owner may read.
    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def _zig(triple: str, target: Target, arguments: Sequence[str | Path]) -> None:
    root = native_root()
    includes = [f"-I{root / 'include'}", f"-I{root / 'src'}", f'-DTASTE_VERSION="{VERSION}"']
    own = [toolchain.cpu_flag(target), *CFLAGS, *includes]
    result = toolchain.run_compiler(triple, [*own, *arguments, "-lm", "-lpthread"])
    if result.returncode != 0:
        text = " ".join(result.stderr.split())[:2000]
        raise TasteError(f"the C compiler failed for {triple}: {text}. Report this as a bug.")


def _build_id(kernels: Kernels, plan: MemoryPlan, objects: Mapping[str, Path], seed: int) -> str:
    digest = hashlib.sha256(emit_tables(kernels, plan, "", seed).encode())
    for symbol, path in objects.items():
        digest.update(symbol.encode() + path.read_bytes())
    for path in sorted(native_root().rglob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _manifest(kernels: Kernels, plan: MemoryPlan, build_id: str, folder: Path) -> dict[str, Any]:
    model, target = kernels.graph.training.model, kernels.target
    files = {}
    for name in ("taste-train", "libtaste.so", "weights.safetensors"):
        data = (folder / name).read_bytes()
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    return {
        "format": 1,
        "version": VERSION,
        "model": model.name,
        "target": target.name,
        "features": list(target.features),
        "vector_bits": target.vector_bits if target.rvv else 0,
        "cores": target.cores,
        "build_id": build_id,
        "input_shape": list(model.input_shape),
        "classes": model.classes,
        "minimum_batch": minimum_batch(kernels),
        "blocks": [block.name for block in model.blocks],
        "programs": {
            lowered.stored.graph.name: {
                "fixed_bytes": placed.fixed.size_bytes,
                "per_sample_bytes": placed.batched.size_bytes,
            }
            for lowered, placed in zip(kernels.programs, plan.programs, strict=True)
        },
        "parameter_bytes": plan.parameter_bytes,
        "state_bytes": plan.state_bytes,
        "constant_bytes": plan.constant_bytes,
        "parameters": _tensors(model, kernels.graph.training.gradients),
        "metadata": dict(model.metadata),
        "files": files,
    }


def _training(kernels: Kernels, plan: MemoryPlan, full: TrainingCost) -> dict[str, Any]:
    """What is trained and what that costs, beside the cost of training everything."""
    cost = asdict(training_cost(kernels, plan))
    own = {key: cost[key] for key in ("trained_parameters", "saved_bytes", "flops")}
    return {"trainable": kernels.graph.training.trainable, **own, "full_training": asdict(full)}


def _tensors(model: Model, trained: Collection[str]) -> list[dict[str, Any]]:
    found = []
    for kind, arrays in (("parameter", model.parameters), ("state", model.states), ("constant", model.constants)):
        for name, array in arrays.items():
            entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": str(array.dtype), "kind": kind}
            if kind == "parameter":
                entry["trained"] = name in trained
            if name in model.inits:
                entry["init"] = {"kind": model.inits[name].kind, "scale": model.inits[name].scale}
            found.append(entry)
    return found
