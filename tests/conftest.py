"""The frame of all tests: needs, groups, and models built once a session."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.native_builds import Toolchain, build_main
from tests.needs import NEEDS, data_folder, unmet
from tests.sshd.server import Sshd, run_sshd

_ROOT = Path(__file__).resolve().parent.parent
_BOARD_NEEDS = frozenset({"boards", "vm-boards", "netns-boards", "buildah", "debian-roots"})
_REQUIRED = pytest.StashKey[frozenset[str]]()

# A shared two-core machine stalls at any time: a deadline a case would only measure that.
settings.register_profile("taste", deadline=None, print_blob=True)
settings.load_profile("taste")


def pytest_configure(config: pytest.Config) -> None:
    """Reads TASTE_REQUIRE: comma-separated needs whose absence is a failure."""
    required = frozenset(filter(None, os.environ.get("TASTE_REQUIRE", "").replace(" ", "").split(",")))
    unknown = sorted(required - set(NEEDS))
    if unknown:
        raise pytest.UsageError(f"TASTE_REQUIRE lists unknown needs {unknown}. Known: {', '.join(sorted(NEEDS))}.")
    config.stash[_REQUIRED] = required
    # A background process of a shell ignores SIGINT, and would hand that on to every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _needs_of(item: pytest.Item) -> list[str]:
    return [name for marker in item.iter_markers("needs") for name in marker.args]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks the names of needs and puts whatever needs a board into the group `boards`, before groups are selected."""
    for item in items:
        names = _needs_of(item)
        unknown = sorted(set(names) - set(NEEDS))
        if unknown:
            raise pytest.UsageError(f"{item.nodeid} needs unknown {unknown}. Known: {', '.join(sorted(NEEDS))}.")
        if not _BOARD_NEEDS.isdisjoint(names):
            item.add_marker(pytest.mark.boards)
            # Side by side: images are built while boards, which share their names and their memory, come one after the other.
            item.add_marker(pytest.mark.xdist_group("images" if "buildah" in names else "boards"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    action = unmet(_needs_of(item), item.config.stash[_REQUIRED])
    if action is None:
        return
    verdict, reason = action
    if verdict == "fail":
        pytest.fail(f"{reason} (TASTE_REQUIRE forbids to skip it)", pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself (`importorskip`) for want of a required need fails, as its tests would."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if any(f"'{name}'" in reason for name in collector.config.stash[_REQUIRED]):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid}: {reason} (TASTE_REQUIRE forbids to skip it)"
    return report


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data sets; the test is marked needs("data")."""
    folder = data_folder()
    assert folder is not None, 'the test uses `data` but is not marked needs("data")'
    return folder


@pytest.fixture(scope="session")
def built() -> Callable[..., Path]:
    """`built(model, target, **options) -> Path`: the folder of a build, made once for all tests that ask for it.

    `model` and `options` go to `cross.load_model.load_model`, `target` is a name of boards.toml. The folder lies in
    build/tests; whether it is still right is for `cross.build.build` to say, whose builds are content-addressed.
    """
    done: dict[str, Path] = {}

    def build_once(model: str | Path, target: str, **options: Any) -> Path:
        from cross.build import build
        from cross.load_model import load_model
        from cross.target import find_target

        wanted = json.dumps([str(model), options], sort_keys=True, default=str)
        name = f"{Path(model).stem}-{target}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
        if name not in done:
            out = _ROOT / "build" / "tests" / name
            build(load_model(model, **options), find_target(target), out)
            done[name] = out
        return done[name]

    return build_once


@pytest.fixture(scope="session")
def board_up(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[..., str]]:
    """`board_up("rpi4-vm", **settings) -> name`: an emulated board, started once for all tests that ask for it.

    All are ended with the session. None of the user's own is touched: their records are elsewhere.
    """
    from host_control.emulation.lifecycle import end_board, start_board

    up: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

        def start(name: str, **settings: Any) -> str:
            if name not in up:
                start_board(name, lambda *_: None, **settings)
                up.append(name)
            return name

        try:
            yield start
        finally:
            for name in up:
                end_board(name)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Toolchain, str], Path]:
    """`build(toolchain, what) -> Path`: one of tests.native_builds.MAINS, made once."""
    folder = tmp_path_factory.mktemp("native")
    done: dict[str, Path] = {}

    def build_once(toolchain: Toolchain, what: str) -> Path:
        key = f"{toolchain.name}-{what}".replace(" ", "")
        if key not in done:
            done[key] = build_main(toolchain, what, folder / key)
        return done[key]

    return build_once


@pytest.fixture(scope="session")
def session_sshd(tmp_path_factory: pytest.TempPathFactory) -> Generator[Sshd, None, None]:
    with run_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def sshd(session_sshd: Sshd) -> Sshd:
    """A real SSH server on loopback, one for all tests, its host key known."""
    session_sshd.know()
    return session_sshd


@pytest.fixture
def own_cores() -> Generator[None]:
    """TVM's pool pins the thread that configures it, for good; all later tests and their processes would share one core."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)
