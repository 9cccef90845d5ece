"""A board that a build is sent to: deploy, probe, measure, clean, over any Connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cross.errors import FileError, UsageError
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
from host_control.connection import Connection, RunResult
from host_control.deploy import (
    PROGRAM,
    Deployment,
    activate,
    check_executable,
    remove_all,
    resolve_folder,
    upload,
    upload_file,
)

_INFO_S = 60.0


class DeployedBoard:
    """A machine behind a Connection, and what is deployed on it. A context manager; opened when first needed.

    `launcher` stands in front of the program's path (an emulator); `emulated` marks every result, otherwise the
    program's own word and the probe decide.
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
    ) -> None:
        self.name = name
        self.connection = connection
        self.settings = settings
        self._remote_dir = remote_dir
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

    def deploy(self, build_dir: Path, *, files: tuple[str, ...] = (PROGRAM, "manifest.json")) -> DeployResult:
        """Send a build's `files` and make them current, once the program has started there and printed its info.

        What is there already is not sent. An interruption leaves the old deployment as it was. Raises
        CompatibilityError (13) before anything is sent where the board's CPU could not run it, NoSpaceError (11) with
        the numbers, FileError (12) where its folder refuses (a noexec mount too), LinkLostError (17).
        """
        manifest_path = build_dir / "manifest.json"
        if manifest_path.is_file():
            check_runs_on(json.loads(manifest_path.read_text(encoding="utf-8")), self.facts())
        folder = resolve_folder(self.connection, self._remote_dir)
        deployment = upload(self.connection, build_dir, folder, files)
        self._start_program(deployment)
        activate(self.connection, deployment)
        self._deployment = deployment
        return DeployResult(folder, deployment.sha256, deployment.sent_bytes)

    def info(self) -> Mapping[str, Any]:
        """What `taste-train info` of the current deployment prints."""
        result = self.run_program(["info"], timeout=_INFO_S)
        check_exit(result, f"taste-train info on {self.name}")
        return last_record(result.stdout, "info") or {}

    def measure(self, point: OperatingPoint) -> Counters:
        """Run `taste-train bench` for one point, a process of its own; raises what its exit code stands for."""
        arguments = bench_arguments(point, self.settings)
        result = self.run_program(arguments, timeout=bench_limit_s(point, self.settings, self.emulated))
        # Where we do not know, the program's own word counts.
        return read_bench(result, point, self.name, emulated=self.emulated or None)

    def run_program(self, arguments: list[str], *, timeout: float) -> RunResult:
        """Run the deployed taste-train to its end; it is ended when this side goes away."""
        return self._run_at(self._current(), arguments, timeout)

    def follow_program(self, arguments: list[str], on_line: Callable[[str], None]) -> RunResult:
        """Run the deployed taste-train however long it takes, line by line (see Connection.follow)."""
        return self.connection.follow([*self._launcher, self._current(), *arguments], on_line)

    def send_file(self, source: Path) -> tuple[str, int]:
        """Put a file on the board by its content; its path there, and the bytes that were sent."""
        return upload_file(self.connection, source, resolve_folder(self.connection, self._remote_dir))

    def run_folder(self, name: str) -> str:
        """The board's folder of a training run, made if need be."""
        path = f"{resolve_folder(self.connection, self._remote_dir)}/runs/{name}"
        result = self.connection.run(["mkdir", "-p", path])
        if not result.ok:
            raise FileError(f"{self.name}: {result.stderr.strip()}. Pass a --remote-dir that can be written.")
        return path

    def remove_folder(self, path: str) -> None:
        """Remove a folder that `run_folder` made."""
        self.connection.run(["rm", "-rf", path])

    def clean(self) -> None:
        """Remove everything of ours from the board."""
        remove_all(self.connection, resolve_folder(self.connection, self._remote_dir))
        self._deployment = None

    def close(self) -> None:
        self.connection.close()

    def _run_at(self, program: str, arguments: list[str], timeout: float) -> RunResult:
        return self.connection.run([*self._launcher, program, *arguments], timeout=timeout, tied=True)

    def _current(self) -> str:
        if self._deployment is not None:
            return self._deployment.path(PROGRAM)
        folder = resolve_folder(self.connection, self._remote_dir)
        if self.connection.read_link(f"{folder}/current") is None:
            raise UsageError(f"nothing is deployed on {self.name} in {folder}. Deploy a build first.")
        return f"{folder}/current/{PROGRAM}"

    def _start_program(self, deployment: Deployment) -> None:
        program = deployment.path(PROGRAM)
        result = self._run_at(program, ["info"], _INFO_S)
        if not result.ok:
            check_executable(self.connection, program, result)
            check_exit(result, f"taste-train info on {self.name}")
