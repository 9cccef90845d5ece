"""host_control/emulation without a board: what is packed, recorded, capped, refused, and what is left when it is killed."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cross.errors import BusyError, MissingToolError, TasteError, UsageError
from cross.probe import check_runs_on, cpu_fields, parse_probe
from cross.target import find_target, load_targets
from host_control.boards import open_board
from host_control.cli import main
from host_control.emulation import lifecycle, namespace_board, packages
from host_control.emulation.boot_files import load_order, pack_cpio
from host_control.emulation.catalogue import EmulatedKind, find_emulated, load_catalogue
from host_control.emulation.control_group import make_group, remove_group
from host_control.emulation.debian_tree import USER_ID, Keys, pack_overlay
from host_control.emulation.image_cache import cached
from host_control.emulation.launch import guarded
from host_control.emulation.state import (
    Running,
    board_folder,
    boot_id,
    find_up,
    held,
    list_boards,
    read_board,
    start_of,
    write_board,
)

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield


def image(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    folder.mkdir()
    for name in ("id", "id.pub", "host.pub"):
        (folder / name).write_text("ssh-ed25519 AAAA comment\n")
    return folder


def running(process: subprocess.Popen[bytes], **changes: object) -> Running:
    board = Running("rpi4-vm", "127.0.0.1", 2222, process.pid, start_of(process.pid), boot_id(), "/image")
    return replace(board, **changes)  # type: ignore[arg-type]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("board", load_catalogue().values(), ids=lambda board: board.name)
def test_the_face_of_a_board_is_read_back_as_its_own_cpu(board: EmulatedKind) -> None:
    fields = "".join(f"{key}\t: {value}\n" for key, value in cpu_fields(board.target).items())
    text = f"== machine\n{board.target.arch}\n== /proc/cpuinfo\nvendor_id : QEMU\nprocessor : 0\n{fields}"
    facts = parse_probe(text)
    assert facts.emulated and facts.vector_bits == board.target.vector_bits
    check_runs_on(board.target, facts)


def test_a_name_that_no_emulated_board_has_is_a_usage_error() -> None:
    for name in ("rpi4", "x86-64-avx2-vm", "../rpi4-vm", ""):
        with pytest.raises(UsageError, match="unknown emulated board.*rpi4-vm"):
            find_emulated(name)


def test_what_is_not_up_cannot_be_used_and_says_how_to_start_it() -> None:
    with pytest.raises(UsageError, match="rpi4-vm is not up. Start it: .* board up rpi4-vm"):
        open_board("rpi4-vm").__enter__()


def test_missing_packages_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages, "SEARCH_PATH", str(tmp_path))
    monkeypatch.setattr(packages, "binfmt_file", lambda _: tmp_path / "none")
    with pytest.raises(MissingToolError) as caught:
        packages.check_packages(find_emulated("visionfive2-vm"), build=True)
    assert caught.value.exit_code == 22 and "\n" not in str(caught.value)
    named = str(caught.value).partition("--no-install-recommends ")[2].split()
    assert {"mmdebstrap", "e2fsprogs", "kmod", "qemu-system-misc", "qemu-utils", "openssh-client"} <= set(named)
    with pytest.raises(MissingToolError, match="device-tree-compiler"):
        packages.check_packages(find_emulated("rpi4-vm"), build=False, cpufreq=True)
    with pytest.raises(MissingToolError, match="qemu-user-static"):
        packages.check_packages(find_emulated("rpi4-netns"), build=False)


def test_without_root_a_netns_board_names_the_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingToolError, match="rpi4-netns needs root.*rpi4-vm") as caught:
        namespace_board.check_rights(find_emulated("rpi4-netns"))
    assert caught.value.exit_code == 22


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "rpi4-vm", "--memory", "1M"], "too little for Debian"),
        (["up", "rpi4-netns", "--icount"], "--icount needs a machine of its own"),
        (["up", "rpi4-netns", "--cpufreq"], "--cpufreq needs an arm64 machine of its own"),
        (["up", "bpi-f3-vm", "--cpufreq"], "--cpufreq needs an arm64 machine of its own"),
        (["up", "pdp11-vm"], "unknown emulated board"),
        (["down", "pdp11-vm"], "unknown emulated board"),
    ],
)
def test_bad_words_are_usage_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["board", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_cpio_archive_is_what_cpio_says_it_is() -> None:
    packed = pack_cpio([("bin", 0o040755, b""), ("bin/a", 0o100755, b"12345"), ("order", 0o100644, b"x\n")])
    # Offsets by the format: 110 bytes of header, name and content each filled up to four.
    found, at = {}, 0
    while at < len(packed):
        assert packed[at : at + 6] == b"070701" and at % 4 == 0
        fields = [int(packed[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = packed[at + 110 : at + 110 + fields[11] - 1].decode()
        start = (at + 110 + fields[11] + 3) // 4 * 4
        found[name] = (fields[1], packed[start : start + fields[6]])
        at = (start + fields[6] + 3) // 4 * 4
    assert found == {
        "bin": (0o040755, b""),
        "bin/a": (0o100755, b"12345"),
        "order": (0o100644, b"x\n"),
        "TRAILER!!!": (0, b""),
    }


def test_modules_are_loaded_in_the_order_of_modprobe() -> None:
    shown = "insmod /k/crc16.ko.xz \ninsmod /k/ext4.ko.xz opt=1\nbuiltin virtio_pci\n\ninsmod /k/crc16.ko.xz \n"
    assert load_order(shown) == [Path("/k/crc16.ko.xz"), Path("/k/ext4.ko.xz")]


def test_the_overlay_keeps_secrets_to_their_owners() -> None:
    archive = tarfile.open(fileobj=io.BytesIO(pack_overlay(Keys("user", "secret", "host"))))
    entries = {entry.name: entry for entry in archive}
    assert entries["etc/ssh/ssh_host_ed25519_key"].mode == 0o600 and entries["etc/shadow"].mode == 0o640
    home = [entry for name, entry in entries.items() if name.startswith("home/board")]
    assert len(home) == 3 and all(entry.uid == entry.gid == USER_ID for entry in home)
    shadow = archive.extractfile("etc/shadow")
    assert shadow is not None and all(line.split(b":")[1] in (b"*", b"!") for line in shadow.read().splitlines())


# State.


@pytest.mark.needs("sshd")
def test_a_board_that_is_up_is_found_and_ssh_understands_its_config(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    board_folder("rpi4-vm").mkdir(parents=True)
    write_board(running(sleeper), image(tmp_path))
    assert read_board("rpi4-vm") == running(sleeper) and list_boards() == {"rpi4-vm": running(sleeper)}
    config = find_up("rpi4-vm")
    with open_board("rpi4-vm") as board:
        host = board.connection.host  # type: ignore[union-attr]
    assert (host.address, host.port, host.user, host.key_names) == ("127.0.0.1", 2222, "board", ("rpi4-vm",))
    assert host.identity_files == (config.parent / "id",) and host.user_known_hosts == (config.parent / "known_hosts",)
    assert host.agent is None and (config.parent / "id").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", [{"boot": "another"}, {"started": 1}, {"pid": 2**22 + 1}])
def test_a_number_that_another_process_has_is_no_board(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    """After a crash of this machine, or when the number was given away."""
    board_folder("rpi4-vm").mkdir(parents=True)
    write_board(running(sleeper, **change), image(tmp_path))
    with pytest.raises(UsageError, match="is not up"):
        find_up("rpi4-vm")
    assert lifecycle.end_board("rpi4-vm") and sleeper.poll() is None
    assert not board_folder("rpi4-vm").exists() and not lifecycle.end_board("rpi4-vm")


def test_down_ends_the_process_and_removes_the_folder(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    board_folder("rpi4-vm").mkdir(parents=True)
    write_board(running(sleeper), image(tmp_path))
    assert main(["board", "down", "rpi4-vm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "event": "result", "verb": "board", "action": "down", "name": "rpi4-vm", "was_there": True
    }  # fmt: skip
    assert sleeper.wait(5) == -signal.SIGKILL and not board_folder("rpi4-vm").exists()


def test_a_second_up_is_refused(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "check_packages", lambda *_, **__: None)
    monkeypatch.setattr(lifecycle, "make_image", lambda *_: tmp_path / "image")
    board_folder("rpi4-vm").mkdir(parents=True)
    write_board(running(sleeper), image(tmp_path))
    with pytest.raises(BusyError, match="rpi4-vm is up already, at 127.0.0.1 port 2222"):
        lifecycle.start_board("rpi4-vm", lambda *_: None)
    with held("rpi4-vm"), pytest.raises(BusyError, match="by another process"):
        lifecycle.end_board("rpi4-vm")
    assert sleeper.poll() is None


def test_a_damaged_record_is_removed_by_down() -> None:
    board_folder("rpi4-vm").mkdir(parents=True)
    for text in ("{", "[]", '{"name": 3}'):
        board_folder("rpi4-vm").mkdir(exist_ok=True)
        (board_folder("rpi4-vm") / "board.json").write_text(text)
        with pytest.raises(TasteError) as caught:
            open_board("rpi4-vm").__enter__()
        assert caught.value.exit_code == 14 and list_boards() == {}
        assert lifecycle.end_board("rpi4-vm")


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Running:
        (board_folder("rpi4-vm") / "disk.qcow2").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle, "check_packages", lambda *_, **__: None)
    monkeypatch.setattr(lifecycle, "make_image", lambda *_: tmp_path)
    monkeypatch.setattr(lifecycle, "start_machine", fail)
    with pytest.raises(KeyboardInterrupt):
        lifecycle.start_board("rpi4-vm", lambda *_: None)
    assert not board_folder("rpi4-vm").exists()


# What outlives us, and what must not.

_START = """
import os, sys, time
from pathlib import Path
from host_control.emulation.launch import guarded
with guarded(["sleep", "600"], Path(sys.argv[1])) as process:
    print(process.pid, flush=True)
    if sys.argv[2] == "hang": time.sleep(600)
    if sys.argv[2] == "fail": raise OSError("no")
"""


def gone(pid: int, started: int, within_s: float = 5) -> bool:
    """`started` 0: it was gone before anybody looked."""
    until = time.monotonic() + within_s
    while start_of(pid) == started != 0 and time.monotonic() < until:
        time.sleep(0.02)
    return started == 0 or start_of(pid) != started


@pytest.mark.parametrize(("how", "lives"), [("end", True), ("fail", False), ("hang", False)])
def test_a_process_lives_on_only_where_its_start_ended_well(tmp_path: Path, how: str, lives: bool) -> None:
    command = [sys.executable, "-c", _START, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        started = start_of(pid)
        if how == "hang":
            starter.kill()
        starter.wait(10)
    assert gone(pid, started, 0.3 if lives else 5) is not lives
    if lives:
        os.kill(pid, signal.SIGKILL)


def test_a_program_that_is_not_there_says_so_in_the_log(tmp_path: Path) -> None:
    with guarded(["no-such-emulator"], tmp_path) as process:
        assert gone(process.pid, process.started)
    assert "no-such-emulator" in (tmp_path / "log").read_text()


# The cache.


def test_an_image_is_made_once_and_appears_whole(tmp_path: Path) -> None:
    made = []

    def make(part: Path) -> None:
        assert not (tmp_path / "image").exists()
        (part / "disk").write_text("whole")
        made.append(part)

    for _ in range(2):
        assert (cached(tmp_path / "image", make) / "disk").read_text() == "whole"
    assert len(made) == 1

    def fail(part: Path) -> None:
        (part / "disk").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "other", fail)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")) == ["image"]


_MAKE = """
import sys, time
from pathlib import Path
from host_control.emulation.image_cache import cached
def make(part):
    (part / "disk").write_text("half"); print("made", flush=True); time.sleep(float(sys.argv[2])); (part / "disk").write_text("whole")
cached(Path(sys.argv[1]), make)
"""


def test_a_killed_build_leaves_no_image_and_the_next_removes_its_rest(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MAKE, str(tmp_path / "image")]
    with subprocess.Popen([*command, "600"], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline()
        assert not (tmp_path / "image").exists()
        first.kill()
    subprocess.run([*command, "0"], check=True, capture_output=True)
    assert (tmp_path / "image" / "disk").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".image.lock", "image"]


# Control groups, in a folder that looks like /sys/fs/cgroup.


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ("memory/memory.limit_in_bytes", {"memory/x/memory.limit_in_bytes": "268435456"}),
        ("cgroup.controllers", {"x/memory.max": "268435456", "cgroup.subtree_control": "+memory"}),
    ],
)
def test_a_memory_cap_in_both_versions(tmp_path: Path, present: str, expected: dict[str, str]) -> None:
    (tmp_path / present).parent.mkdir(exist_ok=True)
    (tmp_path / present).write_text("")
    group = make_group("x", 256 << 20, tmp_path)
    for path, text in expected.items():
        assert (tmp_path / path).read_text() == text
    for path in group.iterdir():
        path.unlink()
    remove_group(group)
    remove_group(group)
    assert not group.exists()


def test_a_cap_that_cannot_be_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file where the group should be")
    with pytest.raises(MissingToolError, match="--memory needs a control group.*-vm board") as caught:
        make_group("x", 1 << 28, tmp_path)
    assert caught.value.exit_code == 22


def test_every_target_with_an_emulator_has_both_boards() -> None:
    boards = [target.name for target in load_targets().values() if target.arch != "x86_64"]
    assert set(load_catalogue()) == {f"{name}-{kind}" for name in boards for kind in ("vm", "netns")}
    assert {"rpi4-vm", "visionfive2-netns", "bpi-f3-vm"} <= set(load_catalogue())
    assert find_emulated("rpi4-vm").cpu == find_target("rpi4").qemu[1] == "cortex-a72"


def test_the_lines_of_a_new_board_in_the_documentation_are_all_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(
        r"^    \[rock5\]\n(?:    .+\n)+", (_ROOT / "docs/boards.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert block is not None and block[0].count("\n") <= 13
    table = (_ROOT / "cross/boards.toml").read_text(encoding="utf-8")
    (tmp_path / "boards.toml").write_text(f"{table}\n{textwrap.dedent(block[0])}", encoding="utf-8")
    monkeypatch.setattr("cross.target.resources.files", lambda _: tmp_path)
    try:
        for known in (load_targets, load_catalogue):
            known.cache_clear()
        assert main(["board", "list"]) == 0
        assert {"rock5", "rock5-vm", "rock5-netns"} <= set(capsys.readouterr().out.split())
        assert find_emulated("rock5-vm").cpu == "cortex-a76" and find_target("rock5").emulator("x")[0] == "qemu-aarch64"
    finally:
        for known in (load_targets, load_catalogue):
            known.cache_clear()
