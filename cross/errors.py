"""The one exception tree, and the exit codes it maps to.

    TasteError                 internal error                              1
    |-- UsageError             bad flag, unknown board or model            2
    |   `-- FreeShapeError     a model leaves its shape open               2
    |-- DoesNotFitError        more memory than there is                  10
    |-- NoSpaceError           disk full                                  11
    |-- FileError              I/O error                                  12
    |-- CompatibilityError     wrong CPU, version or kernel               13
    |-- CorruptInputError      broken model, checkpoint or packed data    14
    |-- NonFiniteLossError     loss is NaN or Inf                         15
    |-- BusyError              locked by another run                      16
    |-- LinkLostError          link lost or timeout                       17
    |-- UnstableError          measurement does not settle                18
    |-- SecurityError          host key, path or file refused             19
    |-- UnsupportedModelError  operator or shape we do not train          20
    |-- AuthenticationError    SSH authentication refused                 21
    |-- MissingToolError       QEMU, zig or another tool is missing       22
    |-- DataError              bad image, label or data set of the user   23
    `-- NoOperatingPointError  no operating point under the limit         24

Each is raised with one line: what failed with its numbers, then what to do about it.
"""

from __future__ import annotations


class TasteError(Exception):
    """Base of every error that is reported in one line; `exit_code` is the process's."""

    exit_code = 1


class UsageError(TasteError):
    exit_code = 2


class FreeShapeError(UsageError):
    """An ONNX file with free dimensions beside the batch: whoever has data may try again with their shape."""


class DoesNotFitError(TasteError):
    exit_code = 10


class NoSpaceError(TasteError):
    exit_code = 11


class FileError(TasteError):
    exit_code = 12


class CompatibilityError(TasteError):
    exit_code = 13


class CorruptInputError(TasteError):
    exit_code = 14


class NonFiniteLossError(TasteError):
    exit_code = 15


class BusyError(TasteError):
    exit_code = 16


class LinkLostError(TasteError):
    exit_code = 17


class UnstableError(TasteError):
    exit_code = 18


class SecurityError(TasteError):
    exit_code = 19


class UnsupportedModelError(TasteError):
    exit_code = 20


class AuthenticationError(TasteError):
    exit_code = 21


class MissingToolError(TasteError):
    exit_code = 22


class DataError(TasteError):
    exit_code = 23


class NoOperatingPointError(TasteError):
    exit_code = 24


INTERRUPTED = 130
"""Exit code after Ctrl-C, once everything worth keeping is saved."""


def one_line(message: str) -> str:
    """Names in a file may hold anything: nothing but printable characters reaches the terminal."""
    return "".join(c if c.isprintable() else "?" for c in message)


def error_for_exit_code(code: int, message: str) -> TasteError:
    """The exception that a child process's exit code stands for."""
    for kind in TasteError.__subclasses__():
        if kind.exit_code == code:
            return kind(message)
    return TasteError(message)
