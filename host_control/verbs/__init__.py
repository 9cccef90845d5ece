"""One module a verb: `add_arguments(parser)` and `run(args) -> int`; the docstring's first line is its help.

Imports of TVM, paramiko, Optuna and matplotlib stay inside functions, so that `--help` answers at once.
"""
