"""Dockerfile.arm64 and Dockerfile.riscv: built without a daemon, and what they put into the image runs on the board's CPU.

The base is made here from Debian's packages under the name that the files give, so nothing is pulled from a registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cross.target import find_target
from host_control.emulation.packages import TOOL_ENVIRONMENT
from host_control.emulation.root_image import find_mirror
from tests.needs import IMAGE_MEMORY

_ROOT = Path(__file__).resolve().parent.parent
_SUITE, _ARCHITECTURE = "trixie", "amd64"
_PACKAGES = "ca-certificates,make,python3,python3-venv"
_MODEL = "mlp"

# Seconds: no command may hang the group. The longest, a build with an empty cache, takes some 60 s alone on two cores.
_SHORT, _LONG = 60, 480

_STORE = """
set -e
mount -t tmpfs -o mode=700,size=$2 taste-store "$1"
mkdir "$1/tmp"
echo ready
exec cat
"""


@dataclass(frozen=True)
class Builder:
    """Buildah in namespaces of its own, its storage in memory: whatever ends the tests ends its processes, and no mount,
    container or layer outlives them. (Its driver vfs, for file systems without overlay, takes ten times as long.)"""

    keeper: int
    store: Path

    def run(self, *command: str | Path, seconds: float = _SHORT) -> str:
        """What `command` printed, run inside."""
        spaces = [f"--mount=/proc/{self.keeper}/ns/mnt", f"--pid=/proc/{self.keeper}/ns/pid_for_children"]
        done = subprocess.run(
            ["nsenter", *spaces, "--", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
            env={**TOOL_ENVIRONMENT, "TMPDIR": str(self.store / "tmp")},
        )
        assert done.returncode == 0, (command, done.stderr[-3000:])
        return done.stdout.strip()

    def buildah(self, *words: str, seconds: float = _SHORT) -> str:
        places = ["--root", str(self.store / "root"), "--runroot", str(self.store / "run")]
        return self.run("buildah", "--storage-driver", "overlay", *places, *words, seconds=seconds)

    def path(self, inside: str) -> Path:
        """Where this process finds what lies at `inside` there."""
        return Path(f"/proc/{self.keeper}/root{inside}")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Ends with its stdin: its `cat` is the first process of the namespace, and the kernel ends all others with it."""
    store = tmp_path_factory.mktemp("buildah")
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*alone, "sh", "-c", _STORE, "store", store, str(IMAGE_MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        yield Builder(keeper.pid, store)
        keeper.stdin.close()
        keeper.wait(timeout=_SHORT)


@pytest.fixture(scope="module")
def base(builder: Builder) -> None:
    """The image that both files start from."""
    tar, buildah = str(builder.store / "debian.tar"), builder.buildah
    options = ["--quiet", "--variant=minbase", f"--include={_PACKAGES}", f"--architectures={_ARCHITECTURE}"]
    builder.run("mmdebstrap", *options, _SUITE, tar, find_mirror(), seconds=_LONG)
    container = buildah("from", "--arch", _ARCHITECTURE, "scratch")
    buildah("add", "--quiet", container, tar, "/", seconds=_LONG)
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    buildah("config", "--arch", _ARCHITECTURE, "--os", "linux", "--env", path, container)
    buildah("commit", "--quiet", "--rm", container, f"docker.io/library/debian:{_SUITE}-slim", seconds=_LONG)
    builder.path(tar).unlink()


def mounts() -> list[str]:
    """What the builds find besides the files' own words: this machine's settings of pip, all that they name, and the
    compiler's cache, of which some of the C libraries serve here too."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=False, timeout=_SHORT
    ).stdout
    files = set(re.findall(r"^\s+(/\S+), exists: True", shown, re.MULTILINE))
    for scheme, word in re.findall(r"(file://)?(/[^\s'\"]+)", shown):
        if not word.startswith("//") and Path(word).exists() and word not in ("/", "/usr", "/etc"):
            # The pages of an index name their files beside it.
            files.add(str(Path(word).parent) if scheme else word)
    variables = [f"--env={key}={value}" for key, value in os.environ.items() if key.startswith("PIP_")]
    cache = Path.home() / ".cache" / "zig"
    cache.mkdir(parents=True, exist_ok=True)
    volumes = [*(f"{file}:{file}:ro" for file in sorted(files)), f"{cache}:/root/.cache/zig"]
    return [*(f"--volume={volume}" for volume in volumes), *variables]


@pytest.mark.needs("buildah", "zig", "qemu")
@pytest.mark.parametrize(
    ("file", "target", "other", "reason"),
    [
        ("Dockerfile.arm64", "rpi5", ["qemu-aarch64", "-cpu", "cortex-a72"], "lacks 'fp16'"),
        ("Dockerfile.riscv", "bpi-f3", ["qemu-riscv64", "-cpu", "rv64,v=true,vlen=128,vext_spec=v1.0"], "256"),
    ],
    ids=["arm64", "riscv"],
)
def test_the_image_holds_a_trainer_that_runs_on_the_board(
    file: str, target: str, other: list[str], reason: str, builder: Builder, base: None, tmp_path: Path
) -> None:
    """And is refused by a CPU that lacks what the target has."""
    tag = f"taste-train:{target}"
    arguments = ["--build-arg", f"MODEL={_MODEL}", "--build-arg", f"TARGET={target}"]
    how = ["--isolation", "chroot", "--layers", "--pull=never", "--ulimit", "nofile=20000:20000"]
    words = ["bud", *how, *mounts(), *arguments, "-f", str(_ROOT / file), "-t", tag, str(_ROOT)]
    builder.buildah(*words, seconds=_LONG)

    configuration = json.loads(builder.buildah("inspect", "--type", "image", tag))["OCIv1"]
    chosen = find_target(target)
    assert configuration["architecture"] == {"aarch64": "arm64", "riscv64": "riscv64"}[chosen.arch]
    assert configuration["config"]["Entrypoint"] == ["/taste-train"]
    assert configuration["config"]["User"] == "65534:65534"
    container = builder.buildah("from", "--pull=never", tag)
    folder = builder.path(builder.buildah("mount", container))
    # Nothing else is in it.
    assert [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] == ["taste-train"]
    program = Path(shutil.copy(folder / "taste-train", tmp_path))

    info = _run([*chosen.emulator(str(program)), "info"])
    told = json.loads(info.stdout.splitlines()[0])
    assert (told["model"], told["target"]) == (_MODEL, target)
    bench = ["bench", "--batch-size", "2", "--seconds", "0.1"]
    ran = _run([*chosen.emulator(str(program)), *bench])
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["emulated"] is True
    refused = _run([*other, str(program), *bench])
    assert refused.returncode == 13 and reason in refused.stderr, refused.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SHORT)
