"""Training over SSH whose link is cut: it goes on, and whoever attaches finishes it; `status`, `stop`, a second run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import host_control.boards as boards
from host_control.boards import open_board
from host_control.boards.detached import DetachedRun
from host_control.cli import main
from host_control.preparation import read_build
from host_control.training.view import TrainView
from tests.host import host_target
from tests.sshd.server import ALIAS, Sshd, run_sshd
from tests.sshd.silent import Relay

pytestmark = [pytest.mark.boards, pytest.mark.needs("sshd", "zig")]

STEPS = 2500
FIXED = (
    "--model",
    "mlp",
    "--batch-size",
    "4",
    "--effective-batch",
    "8",
    "--threads",
    "1",
    "--checkpoint-every",
    "500steps",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with run_sshd(tmp_path_factory.mktemp("sshd")) as server:
        server.know()
        yield server


@pytest.fixture(autouse=True)
def frame(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[..., Path]) -> Iterator[None]:
    """A host folder of its own, data, a build made once, and a board whose runs are ended at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))
    folder = built("mlp", host_target(), input_shape=(1, 8, 8), classes=2)
    monkeypatch.setattr("host_control.verbs.train.build_imported", lambda *_: (read_build(folder), None))
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (48, 8, 8), np.uint8), np.arange(48) % 2
    np.savez("data.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    use(monkeypatch, server.config)
    # A fast machine would be through with the run before its host hears of the first step.
    monkeypatch.setattr("host_control.boards.detached._POLL_S", (0.02, 0.05))
    yield
    for file in (tmp_path / "board" / "runs").glob("*/process"):
        if not (file.parent / "exit").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text().split()[0]), signal.SIGKILL)


def use(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    monkeypatch.setattr(boards, "open_board", partial(open_board, ssh_config=config))


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict[str, Any]], str]:
    code = main([*map(str, words), "--board", ALIAS, "--remote-dir", str(Path.cwd() / "board"), "--json"])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def train(
    capsys: pytest.CaptureFixture[str], *words: object, steps: int = STEPS
) -> tuple[int, list[dict[str, Any]], str]:
    return call(capsys, "train", *FIXED, "--data", "data.npz", "--steps", steps, *words)


def cut_at(monkeypatch: pytest.MonkeyPatch, step: int, deed: Callable[[], None]) -> None:
    """Does `deed` once, when the host hears of `step` or a later one."""
    show, done = TrainView.show, list[bool]()

    def shown(self: TrainView, event: Any) -> None:
        show(self, event)
        if event["event"] == "step" and event["step"] >= step and not done:
            done.append(True)
            deed()

    monkeypatch.setattr(TrainView, "show", shown)


def hold(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    """Cut the link once a run has done some steps, and hold the run still: a fast machine would end it meanwhile.
    Its host gives up at once."""
    monkeypatch.setattr("host_control.boards.detached.RETRY_S", 0.0)
    follow = DetachedRun.follow

    def lost(self: DetachedRun, on_line: Any, **limits: Any) -> Any:
        monkeypatch.setattr(DetachedRun, "follow", follow)
        while True:
            os.kill(process(), signal.SIGSTOP)
            if (Path.cwd() / "board" / "runs" / self.name / "progress.json").exists():
                break
            os.kill(process(), signal.SIGCONT)
            time.sleep(0.02)
        relay.cut()
        return follow(self, on_line, **limits)

    monkeypatch.setattr(DetachedRun, "follow", lost)


def cut_when_followed(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    """Cut the link as soon as a run has begun; its host gives up at once."""
    monkeypatch.setattr("host_control.boards.detached.RETRY_S", 0.0)
    follow = DetachedRun.follow

    def lost(self: DetachedRun, on_line: Any, **limits: Any) -> Any:
        relay.cut()
        monkeypatch.setattr(DetachedRun, "follow", follow)
        return follow(self, on_line, **limits)

    monkeypatch.setattr(DetachedRun, "follow", lost)


def process() -> int:
    (file,) = (Path.cwd() / "board" / "runs").glob("*/process")
    return int(file.read_text().split()[0])


def steps_recorded(folder: Path) -> list[int]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["step"] for record in records if record["event"] == "step"]


@pytest.fixture
def relay(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """The only way to the board, for a test to cut."""
    with Relay(server.port) as relay:
        config = tmp_path / "through"
        config.write_text(
            server.config.read_text().replace(f"Port {server.port}", f"Port {relay.port}\n  HostKeyAlias pi")
        )
        server.known_hosts.write_text(server.host_key_line() + server.host_key_line("pi"))
        use(monkeypatch, config)
        yield relay


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Filled by the first test that trains without a cut."""
    return {}


def uncut(capsys: pytest.CaptureFixture[str], expected: dict[str, Any]) -> dict[str, Any]:
    """The result of a run that nothing disturbs."""
    if not expected:
        code, lines, err = train(capsys, "--out", "uncut")
        assert (code, err) == (0, "") and lines[-1]["steps"] == STEPS
        expected.update(lines[-1])
    return expected


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    names = ("sha256", "test_accuracy", "test_loss", "steps")
    return {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_a_link_that_comes_back_changes_nothing(
    relay: Relay,
    expected: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncut(capsys, expected)
    timer = threading.Timer(1.5, relay.mend)

    def cut() -> None:
        relay.cut()
        timer.start()

    cut_at(monkeypatch, 20, cut)
    code, lines, err = train(capsys, "--out", "cut")
    timer.join()
    assert (code, err) == (0, "")
    links = [line["message"] for line in lines if line["event"] == "link"]
    assert "goes on; trying again for 300 s" in links[0] and links[-1] == "the link is there again."
    assert same(lines[-1], expected)
    found = steps_recorded(tmp_path / "cut")
    assert found == sorted(set(found)) and found[-1] == STEPS
    assert not list((tmp_path / "board" / "runs").glob("*/*")), "what was fetched does not stay"


@pytest.mark.acceptance
def test_five_cuts_in_one_run(
    relay: Relay, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random steps, each for a second or two; the run is long enough for all of them."""
    code, lines, err = train(capsys, "--out", "uncut", steps=8 * STEPS)
    assert (code, err) == (0, "")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw, show, cuts = random.Random(seed), TrainView.show, list[int]()
    at = sorted(draw.sample(range(20, 6 * STEPS), 5))

    def shown(self: TrainView, event: Any) -> None:
        show(self, event)
        if event["event"] == "step" and at and event["step"] >= at[0]:
            cuts.append(at.pop(0))
            relay.cut()
            threading.Timer(draw.uniform(0.2, 2), relay.mend).start()

    monkeypatch.setattr(TrainView, "show", shown)
    code, again, err = train(capsys, "--out", "cut", steps=8 * STEPS)
    assert (code, err) == (0, "") and len(cuts) == 5 and same(again[-1], lines[-1])
    found = steps_recorded(tmp_path / "cut")
    assert found == sorted(set(found)) and found[-1] == 8 * STEPS


@pytest.mark.parametrize("how", ["attach", "resume", "elsewhere"])
def test_whoever_attaches_later_finishes_it(
    how: str,
    relay: Relay,
    expected: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncut(capsys, expected)
    hold(monkeypatch, relay)
    code, lines, err = train(capsys, "--out", "cut")
    assert (code, err.count("\n")) == (17, 1) and f"attach --board {ALIAS} cut-" in err, err
    assert lines[-1]["event"] == "error" and not (tmp_path / "cut" / "weights.safetensors").exists()
    relay.mend()
    code, lines, _ = call(capsys, "status")
    (run,) = lines[-1]["runs"]
    assert code == 0 and run["verb"] == "train" and run["out"] == str(tmp_path / "cut")
    assert run["status"] == "running" and lines[-1]["busy"] == run["name"] and run["step"] > 0
    code, _, err = train(capsys, "--out", "second")
    assert code == 16 and f"in use by run {run['name']} (process {process()})" in err
    code, _, err = call(capsys, "board", "clean")
    assert code == 16 and f"in use by run {run['name']}" in err
    os.kill(process(), signal.SIGCONT)
    out = tmp_path / "cut"
    if how == "attach":
        assert main(["status", "--board", ALIAS, "--remote-dir", str(tmp_path / "board")]) == 0
        assert run["name"] in capsys.readouterr().out
        code, lines, err = call(capsys, "attach")
    elif how == "elsewhere":
        monkeypatch.setattr("host_control.verbs.attach.platform.node", lambda: "another host")
        out = tmp_path / "runs" / run["name"]
        code, lines, err = call(capsys, "attach", run["name"])
    else:
        code, lines, err = train(capsys, "--out", "cut", "--resume")
    assert (code, err) == (0, "") and same(lines[-1], expected)
    assert steps_recorded(out)[-1] == STEPS
    names = {path.name for path in out.iterdir()}
    assert {"weights.safetensors", "result.json", "curves.png", "metrics.csv", "options.json"} <= names
    assert json.loads((out / "train.json").read_text())["complete"] is True
    code, lines, _ = call(capsys, "status")
    assert lines[-1]["runs"] == [] and lines[-1]["busy"] is None
    code, _, err = call(capsys, "attach")
    assert code == 2 and "has no run to attach to" in err


def test_stop_saves_and_the_same_command_goes_on(
    relay: Relay,
    expected: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncut(capsys, expected)
    hold(monkeypatch, relay)
    code, _, err = train(capsys, "--out", "stopped")
    assert code == 17
    relay.mend()
    timer = threading.Timer(2, lambda: os.kill(process(), signal.SIGCONT))
    timer.start()
    code, lines, err = call(capsys, "stop")
    timer.join()
    assert (code, err) == (0, "") and (lines[-1]["status"], lines[-1]["exit_code"]) == ("stopped", 130)
    code, _, err = call(capsys, "attach", lines[-1]["name"])
    assert code == 2 and "is stopped, there is nothing to follow. Go on with its own command" in err
    code, lines, err = train(capsys, "--out", "stopped", "--resume")
    assert (code, err) == (0, "") and same(lines[-1], expected)


def test_a_measurement_that_went_on_is_collected_not_repeated(
    relay: Relay,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    built: Callable[..., Path],
) -> None:
    begin, begun = DetachedRun._begin, list[str]()

    def cut_once_begun(there: Path) -> None:
        while not there.exists():
            time.sleep(0.01)
        relay.cut()

    def begin_and_cut(self: DetachedRun, *words: Any, **limits: Any) -> Any:
        begun.append(self.name)
        if len(begun) == 1:
            threading.Thread(target=cut_once_begun, args=(Path(self.path("process")),), daemon=True).start()
        return begin(self, *words, **limits)

    monkeypatch.setattr(DetachedRun, "_begin", begin_and_cut)
    monkeypatch.setattr("host_control.boards.detached.RETRY_S", 0.0)
    folder = built("mlp", host_target(), input_shape=(1, 8, 8), classes=2)
    bench = ("bench", "--build", folder, "--batch-size", 8, "--seconds", 1, "--threads", 1, "--out", "measured")
    code, _, err = call(capsys, *bench)
    assert code == 17 and f"attach --board {ALIAS} bench-" in err
    relay.mend()
    code, lines, err = call(capsys, "attach")
    assert (code, err) == (0, "") and lines[-1]["verb"] == "bench" and lines[-1]["samples_per_s"] > 0
    assert len(begun) == 1 and json.loads((tmp_path / "measured" / "result.json").read_text())["batch_size"] == 8
    code, lines, _ = call(capsys, *bench)
    assert code == 0 and len(begun) == 2, "what was collected once is measured anew"


def test_a_stream_of_tasks_goes_on_with_its_own_command(
    relay: Relay,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    built: Callable[..., Path],
) -> None:
    folder = built("mlp", host_target(), input_shape=(1, 8, 8), classes=2)
    monkeypatch.setattr("host_control.verbs.learn.build_imported", lambda *_: (read_build(folder), None))
    fixed = ("--model", "mlp", "--data", "data.npz", "--tasks", 2, "--buffer", 8, "--batch-size", 4, "--threads", 1)
    words = ("learn", *fixed, "--seeds", 2, "--passes", 400)
    code, lines, err = call(capsys, *words, "--out", "uncut")
    assert (code, err) == (0, "")
    expected = lines[-1]["settings"]
    cut_when_followed(monkeypatch, relay)
    code, _, err = call(capsys, *words, "--out", "cut")
    assert code == 17 and "attach --board" in err
    relay.mend()
    code, lines, err = call(capsys, "attach")
    assert (code, err) == (0, "") and lines[-1]["verb"] == "learn" and lines[-1]["out"] == str(tmp_path / "cut")
    for name in ("name", "updates", "final_average_accuracy", "forgetting"):
        assert [setting[name] for setting in lines[-1]["settings"]] == [setting[name] for setting in expected]


@pytest.mark.parametrize("verb", ["attach", "status", "stop"])
def test_what_there_is_not_is_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, verb, "nothing")
    assert code == 2 and "has no run 'nothing'. It has: none." in err and err.count("\n") == 1
