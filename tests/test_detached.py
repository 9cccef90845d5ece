"""Runs that outlive the link: the program's lock, watcher and files; following, cuts, Ctrl-C, a board that was rebooted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.errors import BusyError, LinkLostError, TasteError, UsageError
from host_control.boards.detached import DetachedRun, Patience, _Follower, alive, is_run
from host_control.boards.local import LocalConnection
from host_control.connection import Lines, RunResult
from tests.native_builds import ARM, HOST, RISCV, Toolchain, refuse
from tests.packed_data import pack
from tests.test_boards import gone

LONG, SHORT = 100_000_000, 40


@pytest.fixture(scope="session")
def program(build: Callable[..., Path]) -> Path:
    return build(HOST, "taste-train")


@pytest.fixture
def command(program: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`command(steps) -> words`: a training of the small test model, saving and with checkpoints in `tmp_path`/run."""
    random = np.random.default_rng(8)
    x, y = random.integers(0, 256, (23, 2, 4, 5)).astype(np.uint8), random.integers(0, 5, 23).astype(np.int32)
    packed = pack(tmp_path / "train.safetensors", x, y)

    def words(steps: int, *more: object, binary: Path = program) -> list[str]:
        fixed = ("--samples", packed, "--batch-size", 4, "--lr", 0.001, "--report-rate", 20, "--threads", 1)
        return list(map(str, (binary, "train", *fixed, "--steps", steps, *more)))

    return words


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DetachedRun]:
    made = DetachedRun(LocalConnection(), str(tmp_path / "runs" / "one"), "one", Patience(seconds=0))
    yield made
    if (pid := made.state().pid) is not None and made.state().status == "running":
        os.kill(pid, signal.SIGKILL)


def pid_of(run: DetachedRun) -> int:
    pid = run.state().pid
    assert pid is not None
    return pid


def wait_for_steps(run: DetachedRun, at_least: int = 1) -> None:
    until = time.monotonic() + 20
    while int(run.progress().get("step", 0)) < at_least:
        assert time.monotonic() < until, "the run does not get on"
        time.sleep(0.02)


def test_a_run_is_begun_followed_and_ends_with_the_hash_of_an_ordinary_one(
    run: DetachedRun, command: Callable[..., list[str]]
) -> None:
    assert run.state().status == "none"
    plain = subprocess.run(command(SHORT), capture_output=True, text=True, check=True)
    run.start(command(SHORT), {"verb": "train"})
    lines: list[str] = []
    result = run.follow(lines.append)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(lines[-1])["sha256"] == json.loads(plain.stdout.splitlines()[-1])["sha256"]
    assert [json.loads(line)["event"] for line in lines][0] == "plan"
    assert (run.state().status, run.state().exit_code) == ("ended", 0)
    assert run.progress()["step"] == SHORT and run.record() == {"verb": "train", "program": command(SHORT)}
    again: list[str] = []
    assert run.follow(again.append).exit_code == 0 and again == lines, "whoever attaches later hears the same"
    run.remove()
    assert run.state().status == "none" and not Path(run.folder).exists()


def test_one_run_after_the_other_is_never_refused(run: DetachedRun, command: Callable[..., list[str]]) -> None:
    for _ in range(10):
        run.start(command(1), {})
        assert run.follow(lambda _: None).exit_code == 0


def test_a_watcher_that_still_notes_the_end_counts_as_running(
    run: DetachedRun, command: Callable[..., list[str]]
) -> None:
    run.start(command(LONG), {})
    pid = pid_of(run)
    watcher = os.getsid(pid)
    os.kill(watcher, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid) and run.state().status == "running", "a slow card is no lost run"
    os.kill(watcher, signal.SIGCONT)
    assert run.follow(lambda _: None).exit_code == 137


def test_it_is_a_process_group_of_its_own_that_heeds_no_hang_up(
    run: DetachedRun, command: Callable[..., list[str]]
) -> None:
    run.start(command(LONG), {})
    pid = pid_of(run)
    assert os.getsid(pid) not in (os.getsid(0), pid) and os.getpgid(pid) == os.getsid(pid)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000", "the kernel takes it first"
    assert [os.readlink(f"/proc/{pid}/fd/{n}") for n in (0, 1, 2)] == [
        "/dev/null",
        run.path("events.jsonl"),
        run.path("messages"),
    ]
    os.killpg(os.getpgid(pid), signal.SIGHUP)
    before = run.progress().get("step", 0)
    wait_for_steps(run, before + 1)
    run.stop()
    assert gone(pid) and run.follow(lambda _: None).exit_code == 130


def test_ctrl_c_stops_it_in_order_and_it_goes_on_from_there(
    run: DetachedRun, command: Callable[..., list[str]]
) -> None:
    folder = ("--checkpoint", run.path("checkpoint"))
    run.start(command(LONG, *folder), {})

    heard: list[str] = []

    def listen(line: str) -> None:
        heard.append(line)
        if len(heard) == 3:
            raise KeyboardInterrupt

    result = run.follow(listen)
    assert result.exit_code == 130 and "checkpoint saved" in result.stderr
    kept = [json.loads(line) for line in heard if "checkpoint" in line]
    assert kept[0]["event"] == "checkpoint"
    done = int(kept[0]["step"])
    run.start(command(LONG, *folder, "--resume"), {})
    wait_for_steps(run, done + 1)
    assert json.loads(Path(run.path("events.jsonl")).read_text().splitlines()[1])["event"] == "resume"


def test_ctrl_c_while_it_begins_leaves_nothing_running(
    run: DetachedRun, command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = LocalConnection.run

    def interrupted(self: LocalConnection, arguments: Any, **options: Any) -> RunResult:
        result = begin(self, arguments, **options)
        if "--run" in arguments:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(LocalConnection, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.start(command(LONG), {})
    assert run.follow(lambda _: None).exit_code == 130


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGKILL, 137), (signal.SIGILL, 132)])
def test_a_signal_that_ends_it_is_noted(
    run: DetachedRun, command: Callable[..., list[str]], ending: signal.Signals, code: int
) -> None:
    run.start(command(LONG), {})
    os.kill(pid_of(run), ending)
    assert run.follow(lambda _: None).exit_code == code


def test_a_second_run_is_refused_by_name_and_the_lock_dies_with_its_holder(
    run: DetachedRun, command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start(command(LONG), {})
    other = DetachedRun(run.connection, str(Path(run.folder).parent / "other"), "other", Patience(seconds=0))
    with pytest.raises(BusyError, match=r"in use by run one \(process \d+\)") as caught:
        other.start(command(SHORT), {})
    assert caught.value.exit_code == 16 and other.state().status == "none"
    run.start(command(SHORT), {})  # To begin what runs already changes nothing.
    # Its watcher first: nothing but the kernel is left to give the lock back.
    pid = pid_of(run)
    os.kill(os.getsid(pid), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert run.state().status == "lost"
    # A follower asks after ten quiet seconds whether the run is still there.
    monkeypatch.setattr("host_control.boards.detached._QUIET_S", 0.2)
    with pytest.raises(TasteError, match="is gone and has not noted how it ended"):
        run.follow(lambda _: None)
    other.start(command(SHORT), {})
    assert other.follow(lambda _: None).exit_code == 0


def race(binary: Path, folder: Path, command: Callable[..., list[str]], count: int) -> int:
    """How many of `count` runs that begin at the same time get the board."""
    begun = []
    for number in range(count):
        (folder / f"run{number}").mkdir(parents=True)
        words = [*command(LONG, binary=binary), "--run", str(folder / f"run{number}")]
        begun.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    codes = [process.wait(30) for process in begun]
    for file in folder.glob("run*/process"):
        os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
    assert set(codes) <= {0, 16}
    return codes.count(0)


@pytest.mark.faults
def test_of_runs_that_begin_together_exactly_one_gets_the_board(
    program: Path, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    winners = [race(program, tmp_path / f"race{number}", command, 4) for number in range(20)]
    assert winners == [1] * 20


@pytest.mark.faults
def test_the_race_catches_a_program_without_a_lock(
    build: Callable[..., Path], command: Callable[..., list[str]], tmp_path: Path
) -> None:
    planted = build(HOST, "taste-train -DTASTE_PLANT_UNLOCKED")
    assert race(planted, tmp_path / "race", command, 4) > 1


class Cut(LocalConnection):
    """A connection whose link is away from its n-th operation on, for so many operations."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__("pi")
        self.first, self.count, self.done = first, count, 0

    def _cross(self) -> None:
        self.done += 1
        if self.first <= self.done < self.first + self.count:
            raise LinkLostError("the link to pi was cut.")

    def run(self, arguments: Any, *, timeout: float | None = None, tied: bool = False) -> RunResult:
        result = super().run(arguments, timeout=timeout, tied=tied)
        self._cross()  # The answer is lost, not the deed.
        return result

    def read(self, path: str, offset: int = 0) -> bytes | None:
        self._cross()
        return super().read(path, offset)

    def put(self, source: Path, path: str, *, offset: int = 0) -> int:
        self._cross()
        return super().put(source, path, offset=offset)


def told_otherwise(command: Callable[..., list[str]], tmp_path: Path) -> Iterator[int]:
    """Operations whose cut changes what is heard of a run, of all that following one takes."""
    expected: list[str] | None = None
    for first in range(0, 40):
        said: list[str] = []
        patience = Patience(seconds=60, say=said.append, sleep=lambda _: time.sleep(0.01))
        link = Cut(first, 2)
        there = DetachedRun(link, str(tmp_path / "runs" / "one"), "one", patience)
        lines: list[str] = []
        there.start(command(SHORT, "--report-rate", "1e9"), {"verb": "train"})
        assert there.follow(lines.append).exit_code == 0
        told = [json.loads(line) for line in lines]
        # Every event once, whatever was cut when: rates are the only thing that differs.
        facts = [f"{event['event']} {event.get('step')} {event.get('loss')} {event.get('sha256')}" for event in told]
        expected = expected or facts
        if facts != expected:
            yield first
        there.remove()
        if link.done < first:
            assert first > 10 and said == []
            return
        assert ("trying again for 60 s" in said[0] and said[-1] == "the link is there again.") or first == 0
    raise AssertionError("the run never completed without a cut")


@pytest.mark.faults
def test_a_cut_at_any_operation_changes_nothing(command: Callable[..., list[str]], tmp_path: Path) -> None:
    assert list(told_otherwise(command, tmp_path)) == []


@pytest.mark.faults
def test_the_cuts_catch_a_follower_that_begins_again(
    command: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(self: _Follower) -> None:
        self._offset = 0

    monkeypatch.setattr(_Follower, "_after_a_cut", forget)
    assert next(told_otherwise(command, tmp_path)) > 0


def test_a_link_that_stays_away_ends_with_how_to_attach(run: DetachedRun, command: Callable[..., list[str]]) -> None:
    run.start(command(LONG), {})
    pid, link = pid_of(run), Cut(3, 10**6)
    waits: list[float] = []
    away = DetachedRun(link, run.folder, "one", Patience(seconds=0.5, sleep=lambda s: waits.append(s)))
    with pytest.raises(LinkLostError, match=r"Run one goes on there: attach --board pi one follows it again") as caught:
        away.follow(lambda _: None)
    assert caught.value.exit_code == 17 and not gone_now(pid)
    run.stop()
    assert gone(pid)


def gone_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_events_that_a_power_cut_took_are_heard_from_the_start(run: DetachedRun) -> None:
    class Said(LocalConnection):
        events, code = b"one\ntwo\nthr", b""

        def read(self, path: str, offset: int = 0) -> bytes | None:
            if path.endswith("exit"):
                return self.code or None
            return self.events[offset:] if path.endswith("events.jsonl") else b""

        def size(self, path: str) -> int | None:
            return len(self.events)

    link, heard = Said(), list[str]()
    after = DetachedRun(link, run.folder, "one", Patience(seconds=0))
    follower = _Follower(after, Lines(heard.append))
    assert follower.step() is None and heard == ["one", "two"]
    link.events, link.code = b"one\nback\n", b"0\n"
    follower._after_a_cut()
    assert follower.step() is None and follower.step() == 0 and heard == ["one", "two", "one", "back"]


def test_patience_has_its_bounds() -> None:
    clock = {"tries": 0}

    def lost() -> None:
        clock["tries"] += 1
        raise LinkLostError("no link.")

    with pytest.raises(LinkLostError):
        Patience(seconds=0).keep_trying(lost)
    assert clock["tries"] == 1
    pauses: list[float] = []
    with pytest.raises(LinkLostError):
        Patience(seconds=20, sleep=pauses.append).keep_trying(lambda: lost() if len(pauses) < 6 else None) or lost()
    assert pauses == [1, 2, 4, 8, 15, 15]

    def unknown() -> None:
        raise UsageError("no host pi is known.")

    with pytest.raises(UsageError):
        Patience(seconds=60).keep_trying(unknown)


def test_who_is_alive_and_whose_number_is_another_s_now(run: DetachedRun, command: Callable[..., list[str]]) -> None:
    run.start(command(LONG), {})
    pid = pid_of(run)
    found = alive(run.connection, [pid, os.getpid(), 2**22 + 1])
    assert set(found) == {pid, os.getpid()}
    assert is_run(found[pid], run.folder) and not is_run(found[os.getpid()], run.folder)
    # The number of a dead run that somebody else has now.
    run.stop()
    assert run.follow(lambda _: None).exit_code == 130
    Path(run.path("exit")).unlink()
    Path(run.path("process")).write_text(f"{os.getpid()}\n")
    assert run.state().status == "lost"


def test_in_the_foreground_the_process_that_is_called_waits(
    run: DetachedRun, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    Path(run.folder).mkdir(parents=True)
    words = [*command(LONG, "--checkpoint", run.path("checkpoint")), "--run", run.folder, "--foreground"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as service:
        wait_for_steps(run, 3)
        service.terminate()
        out, err = service.communicate(timeout=30)
    assert (service.returncode, out, err) == (130, b"", b"") and run.state().exit_code == 130
    assert list(Path(run.path("checkpoint")).glob("*.safetensors"))


def test_a_caller_that_follows_says_what_the_run_says_and_may_go_away(
    run: DetachedRun, command: Callable[..., list[str]]
) -> None:
    Path(run.folder).mkdir(parents=True)
    Path(run.path("events.jsonl")).write_text("of an earlier attempt\n")
    words = [*command(SHORT), "--run", run.folder, "--follow"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    started, *said = done.stdout.splitlines()
    assert json.loads(started) == {"event": "started", "run": "one"} and done.stderr == ""
    assert Path(run.path("events.jsonl")).read_text().splitlines() == ["of an earlier attempt", *said]
    assert json.loads(said[-1])["event"] == "result" and run.state().exit_code == 0

    lines: list[str] = []
    assert run.run_through(command(SHORT), {}, lines.append, limit_s=60).exit_code == 0
    assert json.loads(lines[-1])["sha256"] == json.loads(said[-1])["sha256"]
    assert json.loads(lines[0])["event"] == "plan" and Path(run.path("events.jsonl")).read_text().splitlines() == lines
    failed = run.run_through([*command(SHORT), "--lr", "1e30"], {}, lines.append, limit_s=60)
    assert failed.exit_code == 15 and failed.stderr.startswith("error: ")

    run.remove()
    Path(run.folder).mkdir()
    with subprocess.Popen([*command(LONG), *words[-3:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as caller:
        wait_for_steps(run)
        caller.terminate()
        assert caller.wait(10) == 130 and run.state().status == "running"


def test_a_run_that_is_followed_in_one_command_outlives_a_cut(
    run: DetachedRun, command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is cut before the command was given, and after the run ended: once each it is begun, and heard whole."""
    begin, heard = DetachedRun._begin, list[list[str]]()
    for after in (False, True):
        tries: list[int] = []

        def cut(self: DetachedRun, *words: Any, after: bool = after, tries: list[int] = tries, **limits: Any) -> Any:
            tries.append(1)
            if len(tries) == 1:
                if after:
                    begin(self, *words, **limits)
                raise LinkLostError("cut")
            return begin(self, *words, **limits)

        monkeypatch.setattr(DetachedRun, "_begin", cut)
        heard.append([])
        assert run.run_through(command(SHORT), {}, heard[-1].append, limit_s=60).exit_code == 0
        assert len(tries) == (1 if after else 2)
        run.remove()
    ends = [json.loads(lines[-1]) for lines in heard]
    assert ends[0]["sha256"] == ends[1]["sha256"]


@pytest.mark.boards
@pytest.mark.needs("qemu")
@pytest.mark.parametrize("toolchain", [ARM, RISCV], ids=["arm64", "riscv64"])
def test_other_architectures_do_the_same(
    toolchain: Toolchain,
    build: Callable[..., Path],
    run: DetachedRun,
    command: Callable[..., list[str]],
) -> None:
    binary = build(toolchain, "taste-train")
    kept = ("--checkpoint", run.path("checkpoint"), "--save", run.path("weights"))
    run.start([*toolchain.emulator, *command(LONG, *kept, binary=binary)], {})
    wait_for_steps(run)
    run.stop()
    assert run.follow(lambda _: None).exit_code == 130
    lines: list[str] = []
    run.start([*toolchain.emulator, *command(SHORT, binary=binary)], {})
    assert run.follow(lines.append).exit_code == 0 and json.loads(lines[-1])["steps"] == SHORT


def test_what_a_run_refuses(program: Path, command: Callable[..., list[str]], tmp_path: Path) -> None:
    arguments = command(SHORT)[1:]
    refuse(2, "without a slash behind it", program, *arguments, "--run", f"{tmp_path}/runs/")
    for flag in ("--foreground", "--follow"):
        refuse(2, f"{flag} without a run", program, *arguments, flag)
    refuse(2, "--foreground and --follow", program, *arguments, "--run", tmp_path / "x", "--foreground", "--follow")
    refuse(12, "cannot open", program, *arguments, "--run", tmp_path / "none" / "x")
    refuse(2, "does not know '--run'", program, "info", "--run", tmp_path)
    (tmp_path / "lock").mkdir()
    refuse(12, "cannot open", program, *arguments, "--run", tmp_path / "x")
