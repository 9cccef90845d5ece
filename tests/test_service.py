"""The unit of a run: its text, systemd's own opinion of it, and what a manager that obeys it makes of restarts and failures.

No systemd runs in a container. `Manager` stands in for one: it reads the unit's text and does what systemd.service(5) and
systemd.unit(5) say of the few settings in it, with a clock of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from cross.errors import CompatibilityError, MissingToolError, UsageError
from host_control.boards.detached import DetachedRun, Patience
from host_control.boards.local import LocalConnection
from host_control.boards.runs import RunSummary
from host_control.boards.service import install_service, remove_service, service_script, unit_text
from host_control.connection import RunResult
from tests.test_boards import gone
from tests.test_detached import LONG, SHORT, command, pid_of, program, wait_for_steps  # noqa: F401


class Manager:
    """Obeys a unit: start conditions, restarts on failure, the limit of starts, codes that are success or final."""

    def __init__(self, unit: str) -> None:
        self.settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
        assert self.settings["Restart"] == "on-failure" and self.settings["WantedBy"] == "default.target"
        self.clock_s = 0.0
        self.starts: list[float] = []

    def codes(self, name: str) -> set[int]:
        return {int(word) for word in self.settings.get(name, "").split()}

    def boot(self) -> str:
        """Start the unit as a manager does with the board; how that ends: skipped, success, failed, start-limit-hit."""
        self.starts = []
        condition = self.settings["ConditionPathExists"].replace("%%", "%")
        words = shlex.split(self.settings["ExecStart"].replace("%%", "%"))
        words = [word.replace("$$", "$") for word in words]
        while True:
            if not Path(condition).exists():
                return "skipped"
            within = float(self.settings["StartLimitIntervalSec"])
            recent = [at for at in self.starts if at > self.clock_s - within]
            if len(recent) >= int(self.settings["StartLimitBurst"]):
                return "start-limit-hit"
            self.starts.append(self.clock_s)
            code = subprocess.run(words, check=False, timeout=60, stdin=subprocess.DEVNULL).returncode
            if code == 0 or code in self.codes("SuccessExitStatus"):
                return "success"
            if code in self.codes("RestartPreventExitStatus"):
                return "failed"
            self.clock_s += float(self.settings["RestartSec"])


@pytest.fixture
def run(tmp_path: Path) -> DetachedRun:
    return DetachedRun(LocalConnection(), str(tmp_path / "runs" / "one"), "one", Patience(seconds=0))


def install(run: DetachedRun, words: Sequence[str]) -> Manager:
    """Script and unit as they are installed, without a systemd to tell of it."""
    Path(run.folder).mkdir(parents=True, exist_ok=True)
    Path(run.path("service.sh")).write_text(service_script(run, words))
    return Manager(unit_text(run))


def test_the_text_of_a_unit_in_a_folder_of_any_name(tmp_path: Path) -> None:
    run = DetachedRun(LocalConnection(), f'{tmp_path}/a "b" $HOME 100% c\\d/one', "one")
    Path(run.folder).mkdir(parents=True)
    marks = tmp_path / "marks"
    manager = install(run, ["sh", "-c", f'printf "%s\\n" "$@" >{shlex.quote(str(marks))}', "sh", "it's $(x)"])
    assert manager.boot() == "success"
    assert marks.read_text().splitlines() == ["it's $(x)", "--resume", "--run", run.folder, "--foreground"]
    with pytest.raises(UsageError, match="cannot stand in a unit"):
        unit_text(DetachedRun(LocalConnection(), "/a\nb", "one"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(run: DetachedRun, tmp_path: Path) -> None:
    install(run, ["true"])
    unit = tmp_path / "taste-edge-one.service"
    unit.write_text(unit_text(run))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    about = [line for line in found.stderr.splitlines() if "taste-edge" in line]
    assert not about, about


def test_a_failure_is_tried_again_five_times_and_the_reason_is_told(run: DetachedRun, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    failing = (
        f'echo x >>{attempts}; echo 12 >{run.path("exit")}; echo "error: no disk." >{run.path("messages")}; exit 12'
    )
    manager = install(run, ["sh", "-c", failing])
    assert manager.boot() == "start-limit-hit" and len(attempts.read_text().split()) == 5
    assert manager.clock_s <= float(manager.settings["StartLimitIntervalSec"])
    state = run.state()
    summary = RunSummary("one", state, {}, {}, run.last_message())
    assert (summary.status, summary.fields()["exit_code"], summary.fields()["reason"]) == ("failed", 12, "no disk.")


@pytest.mark.parametrize("code", [2, 13, 14, 15, 16, 19, 20])
def test_what_another_try_cannot_mend_is_not_tried_again(code: int, run: DetachedRun) -> None:
    manager = install(run, ["sh", "-c", f"exit {code}"])
    assert manager.boot() == "failed" and len(manager.starts) == 1


def test_a_kill_is_tried_again_and_an_orderly_end_is_not(run: DetachedRun, tmp_path: Path) -> None:
    once = tmp_path / "once"
    manager = install(run, ["sh", "-c", f"[ -e {once} ] && exit 130; touch {once}; kill -9 $$"])
    assert manager.boot() == "success" and len(manager.starts) == 2


@pytest.mark.parametrize("mark", ["stopped", "exit"])
def test_a_run_that_was_stopped_or_has_finished_is_not_begun_again(mark: str, run: DetachedRun, tmp_path: Path) -> None:
    manager = install(run, ["touch", str(tmp_path / "begun")])
    Path(run.path(mark)).write_text("0\n")
    assert manager.boot() == "success" and not (tmp_path / "begun").exists()
    shutil.rmtree(run.folder)
    assert manager.boot() == "skipped"


@pytest.mark.faults
def test_after_a_restart_of_the_board_it_goes_on_to_the_hash_of_an_undisturbed_run(
    run: DetachedRun,
    command: object,  # noqa: F811
) -> None:
    assert callable(command)
    steps = 100 * SHORT
    kept = ("--checkpoint", run.path("checkpoint"), "--checkpoint-every", "50steps", "--save", run.path("weights"))
    plain = subprocess.run(command(steps), capture_output=True, text=True, check=True)
    run.start(command(steps, *kept), {})
    manager = install(run, run.record()["program"])
    for _ in range(2):
        wait_for_steps(run, 100)
        pid = pid_of(run)
        # The board loses its power: nobody saves, nobody notes anything.
        os.kill(os.getsid(pid), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid) and run.state().status == "lost"
        run.start([*command(steps, *kept), "--resume"], {})
    pid = pid_of(run)
    os.kill(os.getsid(pid), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert manager.boot() == "success" and run.state().exit_code == 0
    events = [json.loads(line) for line in Path(run.path("events.jsonl")).read_text().splitlines()]
    assert any(event["event"] == "resume" for event in events)
    assert events[-1]["sha256"] == json.loads(plain.stdout.splitlines()[-1])["sha256"]
    assert manager.boot() == "success" and len(manager.starts) == 1, "what has finished is left alone"


def test_a_stopped_run_is_marked_and_a_new_start_takes_the_mark_away(
    run: DetachedRun,
    command: object,  # noqa: F811
) -> None:
    assert callable(command)
    run.start(command(LONG), {})
    run.stop()
    assert run.follow(lambda _: None).exit_code == 130 and Path(run.path("stopped")).exists()
    run.start(command(SHORT), {})
    assert not Path(run.path("stopped")).exists() and run.follow(lambda _: None).exit_code == 0


class Systemd(LocalConnection):
    """A board whose systemctl and loginctl answer as told; everything else is this machine's."""

    def __init__(self, home: Path, refused: Sequence[str] = ()) -> None:
        super().__init__("pi")
        self._home, self._refused = home, refused
        self.asked: list[str] = []

    def home(self) -> str:
        return str(self._home)

    def run(self, arguments: Sequence[str], *, timeout: float | None = None, tied: bool = False) -> RunResult:
        text = " ".join(arguments)
        if "systemctl" not in text and "loginctl" not in text:
            return super().run(arguments, timeout=timeout, tied=tied)
        asked = "command -v" if "command -v" in text else " ".join(arguments[4:])
        self.asked.append(asked)
        code = int(any(word in asked for word in self._refused))
        return RunResult(tuple(arguments), code, "", "Access denied." if code else "")


def installed(tmp_path: Path, *refused: str) -> tuple[DetachedRun, Systemd]:
    link = Systemd(tmp_path / "home", refused)
    run = DetachedRun(link, str(tmp_path / "runs" / "one"), "one", Patience(seconds=0))
    Path(run.folder).mkdir(parents=True)
    Path(run.path("run.json")).write_text(json.dumps({"program": ["/bin/taste-train", "train"]}))
    return run, link


def test_installing_and_removing(tmp_path: Path) -> None:
    run, link = installed(tmp_path)
    service = install_service(run)
    unit = tmp_path / "home/.config/systemd/user/taste-edge-one.service"
    assert unit.read_text() == unit_text(run) and service.linger and service.unit == unit.name
    assert [words for words in link.asked if "enable" in words] == [
        "systemctl --user enable taste-edge-one.service",
        "loginctl enable-linger",
    ]
    assert not any("start " in words for words in link.asked), "the run may be under way"
    remove_service(run)
    assert not unit.exists() and not Path(run.path("service.sh")).exists() and Path(run.folder).is_dir()
    before = len(link.asked)
    remove_service(run)
    assert len(link.asked) == before


def test_what_stands_in_the_way_of_a_service(tmp_path: Path) -> None:
    run, _ = installed(tmp_path / "linger", "linger")
    service = install_service(run)
    assert not service.linger and "sudo loginctl enable-linger" in service.remedy and "Access denied" in service.remedy
    with pytest.raises(MissingToolError, match="pi has no systemd"):
        install_service(installed(tmp_path / "none", "command -v")[0])
    with pytest.raises(CompatibilityError, match=r"runs no systemd for its users \(Access denied\)"):
        install_service(installed(tmp_path / "user", "show-environment")[0])
    old, _ = installed(tmp_path / "old")
    Path(old.path("run.json")).write_text("{}")
    with pytest.raises(UsageError, match="does not say how it was begun"):
        install_service(old)
