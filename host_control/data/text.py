"""A text for next-character prediction: windows of T characters, and the same moved on by one.

Classes are the characters that occur, sorted; at most 256, since tokens are bytes. The last part of the text is the
test split: windows next to each other share words, so held-out windows are not drawn at random.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cross.errors import DataError
from host_control.data.data_set import DEFAULT_TEXT_SPLIT, Bytes, DataSet, PackOptions, Split

_MAX_BYTES = 2**29


def looks_like_text(path: Path) -> bool:
    """UTF-8 without control bytes, as far as the beginning shows."""
    with path.open("rb") as file:
        head = file.read(65536)
    try:
        # The last character may be cut.
        head[: max(len(head) - 3, 0) or len(head)].decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 6 and error.start > 0
    return bool(head) and b"\0" not in head


def read(path: Path, options: PackOptions) -> DataSet:
    """The data set of a UTF-8 file; DataError where it has too many characters, or too few for two windows."""
    if path.stat().st_size > _MAX_BYTES:
        raise DataError(f"{path} has {path.stat().st_size} bytes; a text may have {_MAX_BYTES}. Give a part of it.")
    tokens, characters = _tokens(path)
    if options.window < 1:
        raise DataError(f"--window {options.window} is not at least 1. Give the characters of one sample.")
    share = DEFAULT_TEXT_SPLIT if options.val_split is None else options.val_split
    held = max(round(len(tokens) * share), options.window + 1) if share else 0
    parts = (tokens[: len(tokens) - held], tokens[len(tokens) - held :])
    if min(len(part) for part in parts[: 2 if held else 1]) <= options.window:
        raise DataError(
            f"{path} has {len(tokens)} characters, too few for --window {options.window}. Give more text or a smaller window."
        )
    title = f"text {path.name}"
    notes = (f"the last {held} of {len(tokens)} characters are the test split",) if held else ()
    test = _windows(parts[1], options.window, "test") if held else None
    return DataSet("text", title, "text", characters, _windows(parts[0], options.window, "train"), test, notes)


def _tokens(path: Path) -> tuple[Bytes, tuple[str, ...]]:
    try:
        # Line ends are characters like others: they stay as they are.
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}. Save it as UTF-8.") from None
    characters = tuple(sorted(set(text)))
    if not 2 <= len(characters) <= 256:
        raise DataError(
            f"{path} has {len(characters)} different characters; 2 to 256 can be learnt. Replace rare ones."
        )
    table = {ord(character): index for index, character in enumerate(characters)}
    return np.frombuffer(text.translate(table).encode("latin-1"), np.uint8), characters


def _windows(tokens: Bytes, window: int, split: str) -> Split:
    count = (len(tokens) - 1) // window
    x = tokens[: count * window].reshape(count, window)
    y = tokens[1 : count * window + 1].reshape(count, window)
    return Split(y, lambda i: x[i], lambda i: f"window {i} of {split}")
