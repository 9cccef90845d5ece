"""Give a file's tensors to a model: whose names are not quite the model's, and whose classifier may have other classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cross.classifier import classifier_parameters
from cross.errors import CompatibilityError, one_line
from cross.graph import Model, Shape
from cross.initialise import initial_value
from cross.weights.element_types import Array

_COMPILED = "_orig_mod"
_COUNTER = "num_batches_tracked"
_SEPARATORS = re.compile(r"[./]")
_LISTED = 6
_LONGEST = 120

Path = tuple[str, ...]


def match_weights(
    model: Model, tensors: Mapping[str, Array], *, source: str = "the weights file", seed: int = 0
) -> Model:
    """The model with the parameters and states of a weights file in place of its own.

    Names are matched as they are, then without what wrappers add (`_orig_mod.`, and whatever all names start with, such
    as `module.`, `state_dict.`, `model.`), then by a suffix that is the only one. Shapes are canonical (OIHW, outputs x
    inputs, [C] also for [C, 1, 1]). A classifier of another number of classes is not taken: the model gets a fresh one
    from `seed`, and a note that says so. Raises CompatibilityError, which lists what is missing, unexpected or of another
    shape.
    """
    own = {**model.parameters, **model.states}
    stored = {n: a for n, a in tensors.items() if _parts(n)[-1] != _COUNTER and n not in model.constants}
    pairs = _paired(list(own), list(stored))
    fresh = _replaced_classifier(model, own, stored, pairs)
    values, wrong = {}, []
    for name in own:
        if name not in pairs or name in fresh:
            continue
        found, shape = stored[pairs[name]], own[name].shape
        if _squeezed(found.shape) != _squeezed(shape):
            wrong.append(f"{name} has shape {list(found.shape)}, not {list(shape)}")
            continue
        values[name] = np.ascontiguousarray(found, np.float32).reshape(shape)
    missing = [name for name in own if name not in pairs and name not in fresh]
    unexpected = sorted(set(stored) - set(pairs.values()))
    problems = [f"{what}: {_listed(names)}" for what, names in
                (("missing", missing), ("unexpected", unexpected), ("shapes", wrong)) if names]  # fmt: skip
    if problems:
        raise CompatibilityError(
            one_line(f"{source} does not fit {model.name}: {'; '.join(problems)}. Give weights of this model.")
        )
    notes = list(model.metadata.get("notes", ()))
    if fresh:
        notes.append(
            f"the weights file has another number of classes than {model.classes}: {', '.join(fresh)} start afresh"
        )
        values |= {name: initial_value(name, own[name].shape, model.inits[name], seed) for name in fresh}
    return replace(
        model,
        parameters={name: values[name] for name in model.parameters},
        states={name: values[name] for name in model.states},
        metadata={**model.metadata, "notes": notes},
    )


def _parts(name: str) -> Path:
    return tuple(part for part in _SEPARATORS.split(name) if part and part != _COMPILED) or (name,)


def _unwrapped(names: Iterable[str]) -> dict[str, Path]:
    """Each name's parts, without those at the start that all of them share."""
    paths = {name: _parts(name) for name in names}
    while len({path[0] for path in paths.values()}) == 1 and all(len(path) > 1 for path in paths.values()):
        paths = {name: path[1:] for name, path in paths.items()}
    return paths


def _paired(own: Sequence[str], stored: Sequence[str]) -> dict[str, str]:
    """{the model's name: the file's name}."""
    exact = {name: name for name in set(own).intersection(stored)}
    wanted = {name: path for name, path in _unwrapped(own).items() if name not in exact}
    offered = {name: path for name, path in _unwrapped(stored).items() if name not in exact}
    by_path = {path: name for name, path in offered.items()}
    bare = {name: by_path[path] for name, path in wanted.items() if path in by_path}
    for name, other in bare.items():
        del wanted[name], offered[other]
    return exact | bare | _by_suffix(wanted, offered)


def _by_suffix(wanted: Mapping[str, Path], offered: Mapping[str, Path]) -> dict[str, str]:
    """Pairs of which one name ends with the other, where neither has a second candidate."""
    leaves: dict[str, list[str]] = {}
    for name, path in offered.items():
        leaves.setdefault(path[-1], []).append(name)
    candidates = {name: [other for other in leaves.get(path[-1], ()) if _ends(path, offered[other])]
                  for name, path in wanted.items()}  # fmt: skip
    claims: dict[str, int] = {}
    for others in candidates.values():
        for other in others:
            claims[other] = claims.get(other, 0) + 1
    return {n: others[0] for n, others in candidates.items() if len(others) == 1 and claims[others[0]] == 1}


def _ends(a: Path, b: Path) -> bool:
    length = min(len(a), len(b))
    return a[-length:] == b[-length:]


def _replaced_classifier(
    model: Model, own: Mapping[str, Array], stored: Mapping[str, Array], pairs: Mapping[str, str]
) -> tuple[str, ...]:
    """The classifier's parameters where the file's has another number of classes, else none."""
    classifier = classifier_parameters(model)
    for name in classifier:
        if name in pairs and _other_classes(_squeezed(stored[pairs[name]].shape), _squeezed(own[name].shape), model):
            return classifier
    return ()


def _other_classes(found: Shape, wanted: Shape, model: Model) -> bool:
    if not found or not wanted or found[0] == wanted[0]:
        return False
    return wanted[0] == model.classes and found[1:] == wanted[1:]


def _squeezed(shape: Shape) -> Shape:
    """Without ones at the end: a bias is [C] to some and [C, 1, 1] to others."""
    end = len(shape)
    while end and shape[end - 1] == 1:
        end -= 1
    return tuple(shape[:end])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(name[:_LONGEST] for name in names[:_LISTED]) + more
