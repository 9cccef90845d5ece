"""The command line: finds the verb, and turns every failure into one line and an exit code.

A verb is a module of `host_control.verbs`; adding a file there adds a verb.
"""

from __future__ import annotations

import argparse
import errno
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import FrameType, ModuleType
from typing import NoReturn

from cross.errors import INTERRUPTED, FileError, MissingToolError, NoSpaceError, TasteError, UsageError
from host_control import verbs
from host_control.console import Console
from host_control.flags import add_output_flags

PROGRAM = "taste-edge"


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors raised as UsageError: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def load_verbs() -> dict[str, ModuleType]:
    """Every verb's module, by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(verbs.__path__))
    return {name.replace("_", "-"): import_module(f"host_control.verbs.{name}") for name in names}


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; `args.run` is the verb's function."""
    parser = _Parser(prog=PROGRAM, description="Train neural networks on the board, at the batch size it runs fastest.")
    choices = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in load_verbs().items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        verb = choices.add_parser(name, help=summary, description=summary)
        module.add_arguments(verb)
        add_output_flags(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code (reliability.md): nothing else ends this program."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug, json_lines = "--debug" in words, "--json" in words
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        args = make_parser().parse_args(words)
        args.command = words
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        return _report(str(interrupt) or "interrupted. Nothing was left to save.", INTERRUPTED, debug, json_lines)
    except BrokenPipeError:
        # The reader went away (`| head`): not an error of ours, and Python must not complain about stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  every failure becomes one line and a code
        known = explain(error)
        return _report(str(known), known.exit_code, debug, json_lines)


def explain(error: Exception) -> TasteError:
    """The TasteError that says in one line what any exception means for the user."""
    if isinstance(error, TasteError):
        return error
    cause = getattr(error, "orig", None) or error
    if isinstance(error, ModuleNotFoundError):
        return MissingToolError(f"Python package {error.name!r} is not installed. Run `make tune`, or pip install it.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(cause):
        return NoSpaceError(f"no space left: {_one_line(cause)}. Free some, or choose another --out.")
    if isinstance(error, OSError) or type(cause).__module__ == "sqlite3":
        return FileError(f"{_one_line(cause)}. Check the path and its permissions.")
    return TasteError(
        f"internal error: {type(error).__name__}: {_one_line(error)}. Run again with --debug and report it."
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _report(message: str, code: int, debug: bool, json_lines: bool) -> int:
    if debug:
        traceback.print_exc()
    text = " ".join(message.split())
    Console(json_lines).event("error", code=code, message=text)
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM is handled as Ctrl-C: what is worth keeping is saved."""
    raise KeyboardInterrupt
