"""What the distribution carries: the wheel holds the packages, the board table, the C sources and the command."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cross.native_sources import native_root
from cross.version import VERSION

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built as any installer builds it, but for downloading the build tool."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=_ROOT,
        check=True,
        timeout=120,
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_carries_every_source_file_of_the_board(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = [path.relative_to(native_root()) for path in native_root().rglob("*.[ch]")]
    assert sources
    assert [str(path) for path in sources if f"cross/_native/{path}" not in names] == []


def test_the_wheel_carries_packages_data_and_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    metadata = f"taste_edge-{VERSION}.dist-info"
    for wanted in (
        "cross/boards.toml",
        "host_control/__main__.py",
        "device_runtime/__init__.py",
        f"{metadata}/licenses/LICENSE",
    ):
        assert wanted in names
    assert not [name for name in names if name.startswith(("tests/", "build/", "runs/"))]
    assert "taste-edge = host_control.__main__:main" in wheel.read(f"{metadata}/entry_points.txt").decode()


def test_installed_sources_are_found_without_a_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = "from cross.native_sources import native_root; print(native_root())"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == str(tmp_path / "cross" / "_native")


def test_the_lock_is_hashed_pinned_and_names_no_index() -> None:
    lines = (_ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if line[:1].isalnum()]
    hashes = [line for line in lines if line.startswith("    --hash=sha256:")]
    assert len(packages) > 20 and len(hashes) > len(packages)
    assert all("==" in line for line in packages)
    assert not [line for line in lines if "://" in line or line.startswith("-")]


def test_an_interrupt_ends_with_its_code_and_not_with_the_signal() -> None:
    """Also where it came inside `exec`, after which CPython by itself would die of SIGINT."""
    caught = "try:\n  exec('raise KeyboardInterrupt')\nexcept KeyboardInterrupt:\n  pass\n"
    end = "from host_control import __main__, cli\ncli.main = lambda: 130\n__main__.main()"
    assert subprocess.run([sys.executable, "-c", caught + end], cwd=_ROOT, timeout=60, check=False).returncode == 130
