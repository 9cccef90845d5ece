"""`python -m host_control VERB ...`."""

import sys

from host_control.cli import main

if __name__ == "__main__":
    sys.exit(main())
