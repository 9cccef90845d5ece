"""Where the board's C sources are: beside `cross/` in a checkout, inside the package when installed."""

from __future__ import annotations

from pathlib import Path

from cross.errors import FileError

_PACKAGE = Path(__file__).resolve().parent


def native_root() -> Path:
    """The folder that holds `include/taste.h` and `src/`.

    A wheel carries it as `cross/_native` (pyproject.toml); a checkout has it as `native/`. FileError where neither is.
    """
    candidates = (_PACKAGE / "_native", _PACKAGE.parent / "native")
    for folder in candidates:
        if (folder / "src").is_dir():
            return folder
    raise FileError(f"no C sources in {candidates[0]} or {candidates[1]}. Reinstall taste-edge.")
