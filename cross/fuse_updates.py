"""Stage 3, its last step: `train_fused`, the train program whose optimizer steps are calls within backward.

Before    train:        ...  weight_gradient(x, dy, grad:w);  input_gradient(dy, w, dx);  ...      (then one pass over all parameters)
After     train_fused:  ...  weight_gradient(x, dy, grad:w);  input_gradient(dy, w, dx);  update(w, grad:w);  ...

A parameter is updated as soon as nothing in the program reads it any more. So its gradient lives for a few calls: it is a
tensor of the arena, whose place the gradients of other parameters take in turn, and is read while it still lies in a cache. The
update is the runtime's own (native/src/optimizer.c), element by element in the same arithmetic, so the bits are those of `train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cross.lower import Call, Kernels, LoweredProgram

FUSED = "train_fused"

OPERATIONS = 6
"""Of SGD with momentum and weight decay, an element."""


def fuse_updates(kernels: Kernels) -> Kernels:
    """The kernels with the program `train_fused` behind the others."""
    train = next(program for program in kernels.programs if program.stored.graph.name == "train")
    fused = _with_updates(train, kernels.graph.training.gradients)
    return replace(kernels, programs=(*kernels.programs, fused))


def _with_updates(program: LoweredProgram, gradients: Mapping[str, str]) -> LoweredProgram:
    last = {name: position for position, call in enumerate(program.calls) for name in call.arguments}
    due: dict[int, list[str]] = {}
    for parameter, gradient in gradients.items():
        due.setdefault(max(last[parameter], last[gradient]), []).append(parameter)
    calls: list[Call] = []
    for position, call in enumerate(program.calls):
        calls.append(call)
        for parameter in due.get(position, ()):
            pair, work = (parameter, gradients[parameter]), OPERATIONS * program.storages[parameter].elements
            calls.append(Call("", f"update {parameter}", pair, call.phase, call.block, work, 0))
    graph = replace(program.stored.graph, name=FUSED)
    stored = replace(program.stored, graph=graph)
    return replace(program, stored=stored, calls=tuple(calls), own=frozenset(gradients.values()))
