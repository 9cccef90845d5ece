"""A board that a build is sent to: deploy, probe, measure, clean, over any Connection."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cross.errors import INTERRUPTED, FileError, MissingToolError, UsageError
from cross.probe import PROBE_SCRIPT, BoardFacts, check_runs_on, parse_probe
from host_control.board import Counters, DeployResult, OperatingPoint
from host_control.boards.bench import (
    BenchSettings,
    bench_arguments,
    bench_limit_s,
    check_exit,
    last_record,
    read_bench,
)
from host_control.boards.detached import DetachedRun, Patience
from host_control.connection import Connection, RunResult
from host_control.deploy import (
    LIBRARY,
    PROGRAM,
    PROGRAM_FILES,
    Deployment,
    activate,
    check_executable,
    find_previous,
    remove_all,
    resolve_folder,
    roll_back,
    upload,
    upload_file,
)

_INFO_S = 60.0
_IMPORT = 'cd "$1" && exec python3 -c "import device_runtime; device_runtime.load_library(\'libtaste.so\')"'


class DeployedBoard:
    """A machine behind a Connection, and what is deployed on it. A context manager; opened when first needed.

    `launcher` stands in front of the program's path (an emulator); `emulated` marks every result, otherwise the
    program's own word and the probe decide. `outlives_link`: training and measurements run on when the link is cut, and
    when this process dies (host_control.boards.detached).
    """

    def __init__(
        self,
        name: str,
        connection: Connection,
        remote_dir: str,
        settings: BenchSettings,
        *,
        launcher: tuple[str, ...] = (),
        emulated: bool = False,
        outlives_link: bool = False,
    ) -> None:
        self.name = name
        self.connection = connection
        self.settings = settings
        self.outlives_link = outlives_link
        self.remote_dir = remote_dir
        self._launcher = launcher
        self._emulated = emulated
        self._facts: BoardFacts | None = None
        self._deployment: Deployment | None = None

    def __enter__(self) -> DeployedBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> BoardFacts:
        """What the board is; free memory as of the first call."""
        if self._facts is None:
            # Tools that a board lacks complain on stderr and leave their section empty.
            facts = parse_probe(self.connection.run(["sh", "-c", PROBE_SCRIPT]).stdout)
            self._facts = replace(facts, emulated=facts.emulated or self._emulated)
        return self._facts

    @property
    def emulated(self) -> bool:
        """Whether it is known to be an emulator's, so that nothing timed on it is a board's speed."""
        return self._emulated or (self._facts is not None and self._facts.emulated)

    def deploy(self, build_dir: Path, *, files: tuple[str, ...] = PROGRAM_FILES) -> DeployResult:
        """Send a build's `files` and make them current, once the program has started there and printed its info.

        What is there already is not sent. An interruption leaves the old deployment as it was. Raises
        CompatibilityError (13) before anything is sent where the board's CPU could not run it, NoSpaceError (11) with
        the numbers, FileError (12) where its folder refuses (a noexec mount too), LinkLostError (17); with the files of
        Python, MissingToolError (22) where the board's Python cannot import the package.
        """
        manifest_path = build_dir / "manifest.json"
        if manifest_path.is_file():
            check_runs_on(json.loads(manifest_path.read_text(encoding="utf-8")), self.facts())
        folder = resolve_folder(self.connection, self.remote_dir)
        deployment = upload(self.connection, build_dir, folder, files)
        self._start_program(deployment)
        if LIBRARY in files and not self._launcher:  # an emulator of programs has no Python of the board's
            self._import_package(deployment)
        activate(self.connection, deployment)
        self._deployment = deployment
        return DeployResult(folder, deployment.sha256, deployment.sent_bytes)

    def roll_back(self) -> Deployment:
        """Make the deployment before the current one current again, once its program has started and printed its info.

        UsageError where there is none; the current one stays where the other does not start.
        """
        folder = resolve_folder(self.connection, self.remote_dir)
        previous = find_previous(self.connection, folder)
        program = self.connection.read_link(f"{folder}/deployments/{previous}/{PROGRAM}") or ""
        deployment = Deployment(folder, previous, posixpath.basename(posixpath.dirname(program)), 0)
        self._start_program(deployment)
        roll_back(self.connection, folder, previous)
        self._deployment = deployment
        return deployment

    def info(self, flags: Sequence[str] = ()) -> Mapping[str, Any]:
        """What `taste-train info` of the current deployment prints; with a batch size, what a run of it will take too."""
        result = self.run_program(["info", *flags], timeout=_INFO_S)
        check_exit(result, f"taste-train info on {self.name}")
        return last_record(result.stdout, "info") or {}

    def measure(self, point: OperatingPoint) -> Counters:
        """Run `taste-train bench` for one point, a process of its own; raises what its exit code stands for."""
        return self.bench(point)[0]

    def bench(self, point: OperatingPoint) -> tuple[Counters, str]:
        """The same, with everything that the program printed."""
        arguments = bench_arguments(point, self.settings)
        run = self._measure_detached if self.outlives_link else self._measure_tied
        result = run(arguments, bench_limit_s(point, self.settings, self.emulated))
        # Where we do not know, the program's own word counts.
        return read_bench(result, point, self.name, emulated=self.emulated or None), result.stdout

    def _measure_tied(self, arguments: list[str], limit: float) -> RunResult:
        return self.run_program(arguments, timeout=limit)

    def _measure_detached(self, arguments: list[str], limit: float) -> RunResult:
        """Begin a measurement, or collect the one that an earlier process of this study began: it ran on meanwhile."""
        program = self._current()
        # Who has no name finds nothing again that somebody without a name began.
        owner = self.settings.owner or uuid4().hex
        asked = hashlib.sha256("\0".join([owner, program, *arguments]).encode()).hexdigest()[:12]
        run, lines = self.detached(f"bench-{asked}"), list[str]()
        state = run.patience.keep_trying(run.state)
        try:
            if state.delivers:
                result = run.follow(lines.append, limit_s=limit)
            else:
                words = self.program_words(arguments)
                result = run.run_through(words, self.settings.record, lines.append, limit_s=limit)
        except KeyboardInterrupt:
            run.remove()
            raise
        run.remove(ended=True)
        if result.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        return replace(result, stdout="\n".join(lines))

    def run_program(self, arguments: list[str], *, timeout: float) -> RunResult:
        """Run the deployed taste-train to its end; it is ended when this side goes away."""
        return self._run_at(self._current(), arguments, timeout)

    def program_words(self, arguments: list[str]) -> list[str]:
        """The command that runs the deployed taste-train with `arguments`, as the board's shell would take it."""
        return [*self._launcher, self._current(), *arguments]

    def follow_program(self, arguments: list[str], on_line: Callable[[str], None]) -> RunResult:
        """Run the deployed taste-train however long it takes, line by line (see Connection.follow)."""
        return self.connection.follow(self.program_words(arguments), on_line)

    def runs_folder(self) -> str:
        """Where the runs of this board lie, each in a folder of its name."""
        return f"{resolve_folder(self.connection, self.remote_dir)}/runs"

    def detached(self, name: str, patience: Patience | None = None) -> DetachedRun:
        """The run `name` of this board, begun or not."""
        return DetachedRun(self.connection, f"{self.runs_folder()}/{name}", name, patience or Patience())

    def send_file(self, source: Path) -> tuple[str, int]:
        """Put a file on the board by its content; its path there, and the bytes that were sent."""
        return upload_file(self.connection, source, resolve_folder(self.connection, self.remote_dir))

    def run_folder(self, name: str) -> str:
        """The board's folder of a training run, made if need be."""
        path = f"{self.runs_folder()}/{name}"
        result = self.connection.run(["mkdir", "-p", path])
        if not result.ok:
            raise FileError(f"{self.name}: {result.stderr.strip()}. Pass a --remote-dir that can be written.")
        return path

    def remove_folder(self, path: str) -> None:
        """Remove a folder that `run_folder` made."""
        self.connection.run(["rm", "-rf", path])

    def clean(self) -> None:
        """Remove everything of ours from the board."""
        remove_all(self.connection, resolve_folder(self.connection, self.remote_dir))
        self._deployment = None

    def close(self) -> None:
        self.connection.close()

    def _run_at(self, program: str, arguments: list[str], timeout: float) -> RunResult:
        return self.connection.run([*self._launcher, program, *arguments], timeout=timeout, tied=True)

    def _current(self) -> str:
        if self._deployment is not None:
            return self._deployment.path(PROGRAM)
        folder = resolve_folder(self.connection, self.remote_dir)
        if self.connection.read_link(f"{folder}/current") is None:
            raise UsageError(f"nothing is deployed on {self.name} in {folder}. Deploy a build first.")
        return f"{folder}/current/{PROGRAM}"

    def _start_program(self, deployment: Deployment) -> None:
        program = deployment.path(PROGRAM)
        result = self._run_at(program, ["info"], _INFO_S)
        if not result.ok:
            check_executable(self.connection, program, result)
            check_exit(result, f"taste-train info on {self.name}")

    def _import_package(self, deployment: Deployment) -> None:
        """Whether the board's own Python loads what was sent, in the folder where a script of the user's would be."""
        result = self.connection.run(["sh", "-c", _IMPORT, "sh", deployment.path("")], timeout=_INFO_S)
        if not result.ok:
            said = (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1].rstrip(".")
            raise MissingToolError(
                f"Python on {self.name} cannot use device_runtime: {said}. It needs Python 3.9, numpy and cffi "
                "(Debian: apt-get install python3-numpy python3-cffi there)."
            )
