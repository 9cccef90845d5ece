"""The strategies that `--search` knows, by name."""

from __future__ import annotations

from cross.errors import UsageError
from host_control.search.space import SearchSpace
from host_control.search.strategy import MakeStrategy, Strategy

DEFAULT = "tpe"
NAMES = ("tpe", "paper", "grid", "random")


def make_strategy(name: str, space: SearchSpace, seed: int) -> Strategy:
    """The strategy called `name` over `space`; UsageError names the known ones."""
    from host_control.search.grid import GridSearch
    from host_control.search.paper import PaperSearch
    from host_control.search.random_search import RandomSearch
    from host_control.search.tpe import TpeSearch

    kinds: dict[str, MakeStrategy] = {
        "tpe": TpeSearch,
        "paper": PaperSearch,
        "grid": GridSearch,
        "random": RandomSearch,
    }
    if name not in kinds:
        raise UsageError(f"unknown search {name!r}. Known: {', '.join(NAMES)}.")
    return kinds[name](space, seed)
