"""The one exception of this package. (cross.errors, the host's tree, is not on the board.)"""

from __future__ import annotations


class DeviceError(Exception):
    """A call into libtaste failed. The text is one line: what failed with its numbers. What to do.

    `exit_code` is the status of taste.h, the same number that taste-train exits with: 2 usage, 10 does not fit,
    12 I/O, 13 incompatible, 14 corrupt, 15 loss or gradient not finite.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
