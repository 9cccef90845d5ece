"""`python -m host_control VERB ...`, and the command `taste-edge`."""

import contextlib
import os
import sys

from cross.errors import INTERRUPTED
from host_control import cli


def main() -> int:
    """Run the verb of the command line; its exit code."""
    code = cli.main()
    if code == INTERRUPTED:
        # An interrupt that comes while CPython executes a string, as dataclasses do, is caught; yet at its end CPython kills
        # itself with the signal, whatever code it was given.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
