"""Dockerfile.arm64 and Dockerfile.riscv: built without a daemon, and what they put into the image runs on the board's CPU.

The base is made here from Debian's packages under the name that the files give, so nothing is pulled from a registry.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cross.target import find_target
from host_control.emulation.packages import TOOL_ENVIRONMENT
from host_control.emulation.root_image import find_mirror

_ROOT = Path(__file__).resolve().parent.parent
_SUITE, _ARCHITECTURE = "trixie", "amd64"
_PACKAGES = "ca-certificates,make,python3,python3-venv"
_MODEL = "mlp"

Buildah = Callable[..., str]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """`buildah(*words) -> stdout`, in a storage of its own; removed at the end."""
    store = tmp_path_factory.mktemp("buildah")
    places = ["--root", str(store / "root"), "--runroot", str(store / "run")]
    # vfs works everywhere, and copies every layer: minutes of writing.
    overlay = subprocess.run(
        ["buildah", "--storage-driver", "overlay", *places, "info"], capture_output=True, check=False
    )
    options = ["--storage-driver", "vfs" if overlay.returncode else "overlay", *places]

    def run(*words: str) -> str:
        done = subprocess.run(["buildah", *options, *words], capture_output=True, text=True, check=False, cwd=_ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    yield run
    run("rmi", "--all", "--force")
    # overlay's own mount outlives the program.
    subprocess.run(["umount", str(store / "root" / "overlay")], capture_output=True, check=False)


@pytest.fixture(scope="module")
def base(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The image that both files start from."""
    tar = tmp_path_factory.mktemp("base") / "debian.tar"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(tar), find_mirror()]
    subprocess.run(command, check=True, env=TOOL_ENVIRONMENT)
    container = buildah("from", "--arch", _ARCHITECTURE, "scratch")
    buildah("add", "--quiet", container, str(tar), "/")
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    buildah("config", "--arch", _ARCHITECTURE, "--os", "linux", "--env", path, container)
    buildah("commit", "--quiet", "--rm", container, f"docker.io/library/debian:{_SUITE}-slim")
    tar.unlink()


def mounts() -> list[str]:
    """What the builds find besides the files' own words: this machine's settings of pip, all that they name, and the
    compiler's cache."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=False
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


@pytest.mark.acceptance
@pytest.mark.needs("buildah", "zig", "qemu")
@pytest.mark.parametrize(("file", "target"), [("Dockerfile.arm64", "rpi4"), ("Dockerfile.riscv", "bpi-f3")])
def test_the_image_holds_a_trainer_that_runs_on_the_board(file: str, target: str, buildah: Buildah, base: None) -> None:
    tag = f"taste-train:{target}"
    arguments = ["--build-arg", f"MODEL={_MODEL}", "--build-arg", f"TARGET={target}"]
    how = ["--isolation", "chroot", "--layers", "--pull=never", "--ulimit", "nofile=20000:20000"]
    buildah("bud", *how, *mounts(), *arguments, "-f", file, "-t", tag, ".")

    configuration = json.loads(buildah("inspect", "--type", "image", tag))["OCIv1"]
    chosen = find_target(target)
    assert configuration["architecture"] == {"aarch64": "arm64", "riscv64": "riscv64"}[chosen.arch]
    assert (
        configuration["config"]["Entrypoint"] == ["/taste-train"] and configuration["config"]["User"] == "65534:65534"
    )
    container = buildah("from", "--pull=never", tag)
    folder = Path(buildah("mount", container))
    try:
        # Nothing else is in it.
        assert [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] == ["taste-train"]
        command = chosen.emulator(str(folder / "taste-train"))
        info = json.loads(subprocess.run([*command, "info"], capture_output=True, check=True).stdout.splitlines()[0])
        assert (info["model"], info["target"]) == (_MODEL, target)
        ran = subprocess.run(
            [*command, "bench", "--batch-size", "2", "--seconds", "0.1"], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1])["emulated"] is True
    finally:
        buildah("umount", container)
        buildah("rm", container)
