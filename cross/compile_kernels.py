"""Kernels to object files, one a kernel, kept in a cache by content.

For RISC-V with V there is a detour: TVM would make vectorised loops scalable and lose the register tiles. The kernel is
lowered for plain rv64gc, so that its LLVM IR holds fixed vectors; the functions are then given the real core's
features and zig's clang (the same LLVM major as TVM's) compiles the IR. Operators that take fewer instructions without V
(`scalar_kernels` of boards.toml, counted by benchmarks/instructions.py) are left as TVM compiles them for rv64gc.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from cross import toolchain
from cross.errors import TasteError
from cross.lower import Kernels
from cross.target import Target

RV64GC = ("+m", "+a", "+f", "+d", "+c")

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


def compile_kernels(kernels: Kernels, cache: Path, progress: Progress | None = None) -> dict[str, Path]:
    """Object file of every kernel; those in `cache` already are not built again. One worker process a core."""
    folder = cache / f"{kernels.target.name}-{_sources_digest(kernels.target)}"
    folder.mkdir(parents=True, exist_ok=True)
    objects = {symbol: folder / f"{symbol}.o" for symbol in kernels.builders}
    wanted = [symbol for symbol, path in objects.items() if not path.exists()]
    report = _Report(len(objects), len(objects) - len(wanted), progress)
    count = min(os.cpu_count() or 1, -(-len(wanted) // KERNELS_A_WORKER))
    if count <= 1:
        for symbol in wanted:
            compile_to(symbol, kernels.builders[symbol](), kernels.target, objects[symbol])
            report.one_more()
    else:
        _in_workers(kernels, wanted, folder, count, report)
    return objects


KERNELS_A_WORKER = 8
"""Fewer kernels than this are not worth another Python process."""


@dataclass
class _Report:
    total: int
    done: int
    progress: Progress | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._tell()

    def one_more(self) -> None:
        with self._lock:
            self.done += 1
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress("kernels", self.done, self.total)


def _in_workers(kernels: Kernels, wanted: list[str], folder: Path, count: int, report: _Report) -> None:
    """Hand symbols to `cross.compile_worker` processes, one at a time each, until none is left or one fails."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for symbol in wanted:
        waiting.put(symbol)
    with tempfile.TemporaryDirectory(prefix="taste-kernels-") as scratch:
        graph = Path(scratch) / "graph.pickle"
        graph.write_bytes(pickle.dumps((kernels.graph, kernels.target, kernels.winograd)))
        command = [sys.executable, "-m", "cross.compile_worker", str(graph), str(folder)]
        search = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": search.rstrip(os.pathsep)}
        workers = [
            # Not of the group that Ctrl-C goes to: the parent ends them, without their tracebacks.
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
            )
            for _ in range(count)
        ]
        failures: list[str] = []
        threads = [threading.Thread(target=_feed, args=(w, waiting, report, failures)) for w in workers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    if failures:
        raise TasteError(failures[0])


def _feed(worker: subprocess.Popen[str], waiting: queue.SimpleQueue[str], report: _Report, failures: list[str]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    while not failures:
        try:
            symbol = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            worker.stdin.write(symbol + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline().strip()
        except OSError as error:
            answer = str(error)
        if answer != symbol:
            reason = answer or "the compiler process ended"
            failures.append(f"kernel {symbol} cannot be compiled: {reason}. Report this as a bug.")
            return
        report.one_more()


def _sources_digest(target: Target) -> str:
    """What an object depends on beside its symbol: the target, the code that builds and schedules kernels, and TVM."""
    digest = hashlib.sha256(f"{tvm.__version__} {target}".encode())
    root = Path(__file__).parent
    for path in sorted((root / "kernels").glob("*.py")) + [Path(__file__), root / "storage.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def tvm_target(target: Target) -> Any:
    """TVM's target for kernels; rv64gc for every RISC-V (see above)."""
    config: dict[str, Any] = {"kind": "llvm", "mtriple": f"{target.arch}-linux-gnu"}
    if target.arch == "riscv64":
        cpu = "generic-rv64" if target.rvv else target.cpu
        return tvm.target.Target({**config, "mcpu": cpu, "mattr": list(RV64GC), "mabi": "lp64d"})
    return tvm.target.Target({**config, "mcpu": target.cpu, "mattr": list(target.llvm_attrs)})


def compile_kernel(symbol: str, function: Any, target: Target) -> Any:
    """TVM's executable of one PrimFunc under its symbol.

    TVM's storage rewrite is off: it would drop the mark that keeps local buffers on the stack (`arithmetic.ON_STACK`) and
    turn each into a call for workspace memory. Its common subexpressions are off too: a quarter of the compile time, and
    LLVM finds them again.
    """
    module = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol)})
    with tvm.transform.PassContext(config={"tirx.disable_storage_rewrite": True, "tirx.disable_cse_tir": True}):
        return tvm.compile(module, target=tvm_target(target))


def compile_to(symbol: str, function: Any, target: Target, path: Path) -> None:
    """Compile one PrimFunc to the object file `path`, which appears whole or not at all."""
    module = compile_kernel(symbol, function, target).mod
    part = path.with_name(f".{path.stem}.{os.getpid()}.o")
    if target.takes_vectors(operator_of(symbol)):
        source = part.with_suffix(".ll")
        source.write_text(with_vector_features(module.inspect_source("ll"), target), encoding="utf-8")
        _compile_ir(source, part, target)
        source.unlink()
    else:
        module.write_to_file(str(part))
    part.rename(path)


def operator_of(symbol: str) -> str:
    """taste_conv2d_0123456789ab -> conv2d, as `cross.lower` names kernels."""
    return symbol.removeprefix("taste_").rpartition("_")[0]


def with_vector_features(ir: str, target: Target) -> str:
    """The IR with every function's CPU and features replaced by the target's."""
    length = f"+zvl{target.vector_bits}b"
    features = ",".join(dict.fromkeys((*RV64GC, "+v", length, *target.llvm_attrs)))
    wanted = f'"target-cpu"="{target.cpu}" "target-features"="{features}"'
    changed, count = re.subn(r'"target-cpu"="[^"]*" "target-features"="[^"]*"', wanted, ir)
    if count == 0:
        raise TasteError("TVM's LLVM IR names no target CPU: vector features cannot be set. Report this as a bug.")
    return changed


def _compile_ir(source: Path, output: Path, target: Target) -> None:
    flags = ["-O3", "-Wno-override-module", "-fPIC", "-c"]
    result = toolchain.run_compiler(target.zig_static_triple, [*flags, source, "-o", output])
    if result.returncode != 0:
        raise TasteError(f"zig cannot compile {source.name}: {result.stderr.strip()[:300]}. Report this as a bug.")
