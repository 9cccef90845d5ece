"""What training costs in numbers that need no run: what `--trainable` saves is the difference between two of these."""

from __future__ import annotations

from dataclasses import dataclass

from cross.lower import Kernels
from cross.plan import MemoryPlan, outside_arena


@dataclass(frozen=True)
class TrainingCost:
    """Of the program `train`. `trained_parameters`: values that have a gradient. A sample takes `per_sample_bytes` of the
    arena at its peak; `saved_bytes` are forward tensors that backward reads, `flops` the work of a step, each a sample."""

    trained_parameters: int
    per_sample_bytes: int
    saved_bytes: int
    flops: int


def training_cost(kernels: Kernels, plan: MemoryPlan) -> TrainingCost:
    """Counted from the calls and the plan."""
    training = kernels.graph.training
    lowered, placed = next(
        (program, placed)
        for program, placed in zip(kernels.programs, plan.programs, strict=True)
        if program.stored.graph.name == "train"
    )
    forward = {name for call in lowered.calls if call.phase == "forward" for name in call.arguments}
    backward = {name for call in lowered.calls if call.phase == "backward" for name in call.arguments}
    kept = (forward & backward) - outside_arena(lowered, kernels)
    saved = [name for name in kept if lowered.storages[name].batched]
    return TrainingCost(
        sum(training.model.parameters[name].size for name in training.gradients),
        placed.batched.size_bytes,
        sum(lowered.storages[name].bytes for name in saved),
        sum(call.per_sample_flops for call in lowered.calls),
    )
