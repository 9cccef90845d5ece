"""Models of a few thousand weights for tests, drawn by the zoo's own builders."""

from __future__ import annotations

from pathlib import Path

import onnx

from cross.zoo.chartransformer import build_sized

SMALL_TRANSFORMER = "chartransformer-small"
"""2 layers, 32 wide, 4 heads, windows of 24 characters, a vocabulary of 96."""

_FOLDER = Path(__file__).resolve().parent.parent / "build" / "tests"


def source_of(name: str) -> str:
    """What `load_model` takes for a model of the zoo or of this file: a name, or a path in build/tests."""
    if name != SMALL_TRANSFORMER:
        return name
    _FOLDER.mkdir(parents=True, exist_ok=True)
    path = _FOLDER / f"{name}.onnx"
    onnx.save(build_sized((24,), 96, 2, 32, 4), path)
    return str(path)
