"""host_control/deploy.py over a local connection: what is sent, what is kept, and what every interruption leaves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cross.errors import CorruptInputError, FileError, LinkLostError, NoSpaceError, TasteError, UsageError
from cross.probe import parse_probe
from host_control.boards.bench import BenchSettings
from host_control.boards.deployed import DeployedBoard
from host_control.boards.local import LocalConnection
from host_control.connection import RunResult
from host_control.deploy import mount_of, resolve_folder
from tests.fake_program import FILES, write_build


class Interrupted(LocalConnection):
    """Fails for good at its n-th operation that changes something; a put that fails has written a part."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__("faulty")
        self.done, self.fail_at = 0, fail_at

    def _step(self) -> None:
        self.done += 1
        if self.fail_at is not None and self.done >= self.fail_at:
            raise LinkLostError("cut")

    def run(self, arguments: Sequence[str], *, timeout: float | None = None, tied: bool = False) -> RunResult:
        self._step()
        return super().run(arguments, timeout=timeout, tied=tied)

    def put(self, source: Path, path: str, *, offset: int = 0) -> int:
        try:
            self._step()
        except LinkLostError:
            data = source.read_bytes()
            Path(path).write_bytes(data[: offset + (len(data) - offset) // 2])
            raise
        return super().put(source, path, offset=offset)

    def rename(self, old: str, new: str) -> None:
        self._step()
        super().rename(old, new)

    def link(self, target: str, path: str) -> None:
        self._step()
        super().link(target, path)


class Answering(LocalConnection):
    """Answers some programs itself: `answers[program](arguments)` gives the result, or None to run it."""

    def __init__(self, answers: dict[str, Callable[[Sequence[str]], RunResult | None]]) -> None:
        super().__init__("board")
        self.answers = answers

    def run(self, arguments: Sequence[str], *, timeout: float | None = None, tied: bool = False) -> RunResult:
        answer = self.answers[arguments[0]](arguments) if arguments[0] in self.answers else None
        return answer or super().run(arguments, timeout=timeout, tied=tied)


@pytest.fixture(autouse=True)
def known_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe before each deployment: it takes longer than the rest together, and has tests of its own."""
    text = (Path(__file__).parent / "probes" / "x86-64-avx2.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(DeployedBoard, "facts", lambda _: parse_probe(text))


def board_at(folder: Path, connection: LocalConnection | None = None) -> DeployedBoard:
    return DeployedBoard("local", connection or LocalConnection(), str(folder), BenchSettings())


def current_text(folder: Path) -> str:
    """Which build is current, read as the board would; fails on any mixture."""
    current = folder / "current"
    texts = {name: (current / name).read_bytes() for name in FILES}
    script = texts["taste-train"].decode().splitlines()[1].removeprefix("# ")
    assert f'"text": "{script}"'.encode() in texts["manifest.json"]
    assert texts["weights.safetensors"].startswith(hashlib.sha256(script.encode()).digest())
    return script


def test_a_deployment_is_verified_and_runs(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build", weights_bytes=5000)
    board = board_at(tmp_path / "board")
    result = board.deploy(build, files=FILES)
    digest = hashlib.sha256((build / "taste-train").read_bytes()).hexdigest()
    assert result.remote_dir == str(tmp_path / "board") and result.sha256 == digest
    assert result.sent_bytes == sum((build / name).stat().st_size for name in FILES)
    program = tmp_path / "board" / "objects" / digest / "taste-train"
    assert program.read_bytes() == (build / "taste-train").read_bytes() and os.access(program, os.X_OK)
    assert current_text(tmp_path / "board") == "first"
    assert board.info()["model"] == "fake"


def test_nothing_unchanged_is_sent_again(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build", weights_bytes=5000)
    board_at(tmp_path / "board").deploy(build, files=FILES)
    assert board_at(tmp_path / "board").deploy(build, files=FILES).sent_bytes == 0
    (build / "manifest.json").write_text((build / "manifest.json").read_text() + "\n")
    assert (
        board_at(tmp_path / "board").deploy(build, files=FILES).sent_bytes == (build / "manifest.json").stat().st_size
    )


def test_the_last_two_deployments_are_kept(tmp_path: Path) -> None:
    folder, programs = tmp_path / "board", []
    for text in ("one", "two", "three"):
        build = write_build(tmp_path / text, text, weights_bytes=128)
        programs.append(board_at(folder).deploy(build, files=FILES).sha256)
        board_at(folder).deploy(build, files=FILES)
    assert len(list((folder / "deployments").iterdir())) == 2
    kept = {path.name for path in (folder / "objects").iterdir()}
    assert programs[0] not in kept and {programs[1], programs[2]} <= kept and len(kept) == 6


def deploy_with_cuts(tmp_path: Path) -> Iterator[str]:
    """Deploys `new` over `old`, cut at the n-th operation, n = 1.. until it completes; yields what is current then."""
    old = write_build(tmp_path / "old", "old", weights_bytes=50_000)
    new = write_build(tmp_path / "new", "new", weights_bytes=50_000)
    board_at(tmp_path / "start").deploy(old, files=FILES)
    for number in range(1, 200):
        folder = tmp_path / f"board-{number}"
        shutil.copytree(tmp_path / "start", folder, symlinks=True)
        try:
            board_at(folder, Interrupted(number)).deploy(new, files=FILES)
        except LinkLostError:
            yield current_text(folder)
            for path in folder.glob("objects/*/*"):
                assert path.suffix == ".part" or hashlib.sha256(path.read_bytes()).hexdigest() == path.parent.name
            board_at(folder).deploy(new, files=FILES)
            assert current_text(folder) == "new" and not list(folder.rglob("*.part"))
        else:
            return
    raise AssertionError("the deployment never completed")


def test_a_cut_at_any_operation_leaves_the_old_deployment_or_the_new(tmp_path: Path) -> None:
    states = list(deploy_with_cuts(tmp_path))
    switched = states.index("new")
    assert switched > 10 and states == ["old"] * switched + ["new"] * (len(states) - switched)


def test_the_loop_of_cuts_catches_a_deployment_that_writes_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place(connection: LocalConnection, deployment: Any) -> None:
        Path(deployment.folder, "current").unlink(missing_ok=True)
        connection.link(f"deployments/{deployment.id}", f"{deployment.folder}/current")

    monkeypatch.setattr("host_control.boards.deployed.activate", in_place)
    with pytest.raises(FileNotFoundError):
        list(deploy_with_cuts(tmp_path))


def test_the_loop_of_cuts_catches_an_upload_to_the_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(connection: LocalConnection, source: Path, part: str) -> int:
        final = part.removesuffix(".part")
        sent = connection.put(source, final)
        os.chmod(final, 0o755)
        return sent

    monkeypatch.setattr("host_control.deploy._send", send)
    monkeypatch.setattr("host_control.deploy._settle", lambda *_: None)
    with pytest.raises(AssertionError):
        list(deploy_with_cuts(tmp_path))


def test_rollback_goes_back_by_one_rename_and_forth_again(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    board = board_at(folder)
    for text in ("one", "two", "three"):
        sent = board.deploy(write_build(tmp_path / text, text, weights_bytes=128), files=FILES)
    back = board.roll_back()
    assert current_text(folder) == "two" and back.sha256 != sent.sha256
    assert board.info()["model"] == "fake", "what is measured next is what is current"
    assert board.roll_back().sha256 == sent.sha256 and current_text(folder) == "three"
    board.roll_back()
    board.deploy(tmp_path / "one", files=FILES)
    board.roll_back()
    assert current_text(folder) == "two", "the last two are kept, not the last two that were sent"


def test_a_rollback_needs_something_to_go_back_to_that_starts(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    with pytest.raises(UsageError, match="nothing is deployed"):
        board_at(folder).roll_back()
    board_at(folder).deploy(write_build(tmp_path / "one", "one", weights_bytes=64), files=FILES)
    with pytest.raises(UsageError, match="has no deployment before the current one"):
        board_at(folder).roll_back()
    old = (folder / "current" / "taste-train").resolve()
    board_at(folder).deploy(write_build(tmp_path / "two", "two", weights_bytes=64), files=FILES)
    old.write_text("#!/bin/sh\nexit 13\n")
    with pytest.raises(TasteError) as refused:
        board_at(folder).roll_back()
    assert refused.value.exit_code == 13 and current_text(folder) == "two"


def rollbacks_with_cuts(tmp_path: Path) -> Iterator[str]:
    """A rollback that is cut at its n-th operation, n = 1.. until it completes; yields what is current then."""
    for text in ("old", "new"):
        board_at(tmp_path / "start").deploy(write_build(tmp_path / text, text, weights_bytes=64), files=FILES)
    for number in range(1, 50):
        folder = tmp_path / f"board-{number}"
        shutil.copytree(tmp_path / "start", folder, symlinks=True)
        try:
            board_at(folder, Interrupted(number)).roll_back()
        except LinkLostError:
            state = current_text(folder)
            yield state
            board_at(folder).roll_back()
            assert current_text(folder) == ("old" if state == "new" else "new"), "one can still go the other way"
        else:
            return
    raise AssertionError("the rollback never completed")


def test_a_cut_at_any_operation_of_a_rollback_leaves_the_one_or_the_other(tmp_path: Path) -> None:
    states = list(rollbacks_with_cuts(tmp_path))
    assert "new" in states and "old" in states and states == sorted(states)


def test_rollback_is_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from host_control.cli import main

    for text in ("one", "two"):
        board_at(tmp_path / "board").deploy(write_build(tmp_path / text, text, weights_bytes=64), files=FILES)
    assert main(["rollback", "--board", "local", "--remote-dir", str(tmp_path / "board"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == sha256_of(tmp_path / "one" / "taste-train")
    assert current_text(tmp_path / "board") == "one"
    assert main(["rollback", "--board", "local", "--remote-dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: nothing is deployed")


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("damage", [False, True])
def test_a_part_is_resumed_where_its_hash_fits(tmp_path: Path, damage: bool) -> None:
    build = write_build(tmp_path / "build", weights_bytes=100_000)
    data = (build / "weights.safetensors").read_bytes()
    part = tmp_path / "board" / "objects" / hashlib.sha256(data).hexdigest() / "weights.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((b"X" if damage else data[:1]) + data[1:60_000])
    rest = sum((build / name).stat().st_size for name in FILES[:2])
    assert board_at(tmp_path / "board").deploy(build, files=FILES).sent_bytes == rest + (100_000 if damage else 40_000)
    assert current_text(tmp_path / "board") == "first"


def test_a_file_that_rotted_on_the_board_is_sent_again(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build", weights_bytes=5000)
    board_at(tmp_path / "board").deploy(build, files=FILES)
    weights = tmp_path / "board" / "current" / "weights.safetensors"
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    assert board_at(tmp_path / "board").deploy(build, files=FILES).sent_bytes == 5000
    assert current_text(tmp_path / "board") == "first"


def test_what_arrives_damaged_is_refused_and_removed(tmp_path: Path) -> None:
    class Flipping(LocalConnection):
        def put(self, source: Path, path: str, *, offset: int = 0) -> int:
            sent = super().put(source, path, offset=offset)
            Path(path).write_bytes(b"?" + Path(path).read_bytes()[1:])
            return sent

    with pytest.raises(FileError, match="arrived on local with SHA-256"):
        board_at(tmp_path / "board", Flipping()).deploy(write_build(tmp_path / "build"))
    assert not [path for path in (tmp_path / "board").rglob("*") if path.is_file()]


def test_a_program_that_does_not_start_never_becomes_current(tmp_path: Path) -> None:
    board_at(tmp_path / "board").deploy(write_build(tmp_path / "old", "old", weights_bytes=64), files=FILES)
    with pytest.raises(TasteError) as refused:
        broken = write_build(tmp_path / "new", "new", info_exit=13, weights_bytes=64)
        board_at(tmp_path / "board").deploy(broken, files=FILES)
    assert refused.value.exit_code == 13
    assert current_text(tmp_path / "board") == "old"


def test_a_build_that_differs_from_its_manifest_is_refused(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build")
    (build / "taste-train").write_text("#!/bin/sh\n")
    with pytest.raises(CorruptInputError, match="its manifest says"):
        board_at(tmp_path / "board").deploy(build)
    with pytest.raises(UsageError, match="holds no taste-train"):
        board_at(tmp_path / "board").deploy(tmp_path)


def test_too_little_space_is_told_with_the_numbers_before_anything_is_sent(tmp_path: Path) -> None:
    table = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/mmcblk0p2 100 90 512 90% /\n"
    board = board_at(tmp_path / "board", Answering({"df": lambda words: RunResult(tuple(words), 0, table, "")}))
    with pytest.raises(NoSpaceError, match=r"0.5 MiB free.*needs 2.0 MiB"):
        board.deploy(write_build(tmp_path / "build", weights_bytes=10**6), files=FILES)
    assert not list((tmp_path / "board").glob("objects/*/*"))


def test_a_disk_that_fills_up_meanwhile_is_recognised_and_the_part_removed(tmp_path: Path) -> None:
    class Filling(Answering):
        def put(self, source: Path, path: str, *, offset: int = 0) -> int:
            # What SFTP says of a full disk: a failure without a reason.
            Path(path).write_bytes(b"x" * 1000)
            raise FileError(f"cannot write {path}: Failure.")

    free = iter(["99999", "0"])

    def df(words: Sequence[str]) -> RunResult:
        return RunResult(tuple(words), 0, f"Filesystem\n/dev/root 1 1 {next(free)} 99% /\n", "")

    with pytest.raises(NoSpaceError, match="to write, full after 0.0 MiB"):
        board_at(tmp_path / "board", Filling({"df": df})).deploy(write_build(tmp_path / "build"))
    assert not list(tmp_path.rglob("*.part"))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`mounted(options) -> folder`: a tmpfs, where this user may mount one."""
    folders: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mnt {len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("may not mount a tmpfs")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path, mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=3m")
    board_at(folder).deploy(write_build(tmp_path / "old", "old", weights_bytes=1000), files=FILES)
    (folder / "ballast").write_bytes(b"x" * 1_500_000)
    new = write_build(tmp_path / "new", "new", weights_bytes=2_000_000)
    with pytest.raises(NoSpaceError, match="needs 2.9 MiB"):
        board_at(folder).deploy(new, files=FILES)
    # A `df` that promises too much, as with quotas: the write itself meets the end.
    promise = "Filesystem\n/dev/root 1 1 99999 1% /\n"
    lying = Answering({"df": lambda words: RunResult(tuple(words), 0, promise, "")})
    with pytest.raises(NoSpaceError, match="no space left"):
        board_at(folder, lying).deploy(new, files=FILES)
    assert current_text(folder) == "old" and not list(folder.rglob("*.part"))


def test_a_noexec_mount_is_recognised(tmp_path: Path, mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=3m,noexec")
    with pytest.raises(FileError, match=f"{folder} is mounted noexec. Pass --remote-dir"):
        board_at(folder / "in").deploy(write_build(tmp_path / "build"))
    assert not (folder / "in" / "current").exists()


def test_themount_of_a_path_is_the_longest_that_holds_it() -> None:
    mounts = "/dev/a / ext4 rw 0 0\n/dev/b /home ext4 rw,noexec 0 0\n/dev/c /home/my\\040disk ext4 rw 0 0\nbroken\n"
    find = mount_of
    assert find("/home/pi/x", mounts) == ("/home", ("rw", "noexec"))
    assert find("/home/my disk/x", mounts)[0] == "/home/my disk"
    assert find("/homework/x", mounts) == ("/", ("rw",))


@pytest.mark.parametrize("tools", [("sha256sum",), ("sha256sum", "busybox")])
def test_a_board_without_sha256sum_is_served_too(tmp_path: Path, tools: tuple[str, ...]) -> None:
    def missing(words: Sequence[str]) -> RunResult:
        return RunResult(tuple(words), 127, "", "not found")

    board = board_at(tmp_path / "board", Answering(dict.fromkeys(tools, missing)))
    board.deploy(write_build(tmp_path / "build", weights_bytes=3000), files=FILES)
    assert current_text(tmp_path / "board") == "first"


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "quo'te\"s",
        "$(touch pwned)",
        "`touch pwned`",
        "-rf",
        "line\nbreak",
        "back\\slash",
        "* ?[x]",
        "~",
        "ü\udcff",
        ";",
    ],
)
def test_any_name_of_a_folder_is_just_a_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in" / name
    board = board_at(folder)
    board.deploy(write_build(tmp_path / "build", weights_bytes=64), files=FILES)
    assert current_text(folder) == "first"
    board.clean()
    assert not folder.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["build", "in"]


def test_clean_removes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    board = board_at(tmp_path / "board")
    board.deploy(write_build(tmp_path / "build"))
    (tmp_path / "board" / "mine.txt").write_text("keep me")
    board.clean()
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["mine.txt"]
    board.clean()
    with pytest.raises(UsageError, match="nothing is deployed"):
        board.info()


def test_a_folder_that_cannot_be_written_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="Not a directory.*--remote-dir"):
        board_at(tmp_path / "file" / "board").deploy(write_build(tmp_path / "build"))


def test_where_a_remote_folder_lies() -> None:
    home = str(Path.home())
    assert resolve_folder(LocalConnection(), "~/.local/share/taste-edge") == f"{home}/.local/share/taste-edge"
    assert resolve_folder(LocalConnection(), "a/../b") == f"{home}/b"
    assert resolve_folder(LocalConnection(), "/srv//x/") == "/srv/x"
    for wrong in ("", "a\0b"):
        with pytest.raises(UsageError):
            resolve_folder(LocalConnection(), wrong)
