"""The program tables as C source (native/src/program.h): data only, one `taste_model_table`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cross.graph import Init, Model
from cross.kernels.limit import SYMBOL, limit_of
from cross.lower import Kernels, LoweredProgram
from cross.plan import MemoryPlan, blocks_of, parameter_group
from cross.rules.context import DROPOUT_COUNTER, LABEL_SMOOTHING, LOSS_SCALE, gradient_name
from cross.storage import Storage

NO_TENSOR = 0xFFFF
SHARED_PROGRAM = 0xFF
DTYPES = {"float32": 0, "int32": 1, "uint32": 2}
INIT_KINDS = {"uniform": 1, "constant": 2}
PHASES = {"forward": 0, "loss": 1, "backward": 2}
REGIONS = ("PARAMETERS", "STATES", "CONSTANTS", "GRADIENTS", "FIXED", "BATCHED", "SCALARS")
MAXIMUM_DIMENSIONS = 8


@dataclass(frozen=True)
class _Row:
    """One taste_tensor."""

    name: str
    storage: Storage
    region: str
    program: int
    offset_bytes: int
    segment: int = 0
    init: Init | None = None


def emit_tables(kernels: Kernels, plan: MemoryPlan, build_id: str, seed: int) -> str:
    """tables.c of one build."""
    rows = _rows(kernels, plan)
    index = {(row.program, row.name): i for i, row in enumerate(rows)}
    model = kernels.graph.training.model
    lines = ['#include "program.h"', ""]
    lines += [f"extern int __tvm_ffi_{symbol}(void *, const struct taste_ffi_any *, int32_t, struct taste_ffi_any *);"
              for symbol in kernels.builders]  # fmt: skip
    lines += ["", "static const taste_tensor tensors[] = {", *(_tensor(row) for row in rows), "};", ""]
    for number, program in enumerate(kernels.programs):
        lines += _calls(number, program, index)
        lines += _block_calls(number, program, model, index)
    lines += _programs(kernels, plan, index)
    lines += _segments(kernels, plan)
    names = ", ".join(_text(block.name) for block in model.blocks)
    lines += [f"static const char *const block_names[] = {{{names}}};", ""]
    lines += _model(kernels, plan, build_id, seed, index)
    return "\n".join(lines) + "\n"


def minimum_batch(kernels: Kernels) -> int:
    """2 where a batch norm that counts statistics would see one value a channel at batch 1, else 1."""
    train = kernels.graph.training.program("train")
    counts = (node for node in train.nodes if node.op == "batch_norm_finish")
    return 2 if any(node.attrs["pixels"] == 1 for node in counts) else 1


def _constant_inits(model: Model) -> dict[str, Init]:
    """Constants that are one number throughout need no weights file. (Others come with the model's.)"""
    same = {n: a for n, a in model.constants.items() if a.size and bool((a == a.flat[0]).all())}
    return {name: Init("constant", float(array.flat[0])) for name, array in same.items()}


def _rows(kernels: Kernels, plan: MemoryPlan) -> list[_Row]:
    training, shared = kernels.graph.training, kernels.graph.shared
    block, inits = blocks_of(kernels), {**training.model.inits, **_constant_inits(training.model)}
    rows = []
    for region, offsets in (("PARAMETERS", plan.parameters), ("STATES", plan.states), ("CONSTANTS", plan.constants)):
        rows += [
            _Row(name, shared[name], region, SHARED_PROGRAM, offset, block.get(name, 0), inits.get(name))
            for name, offset in offsets.items()
        ]
    for name in plan.parameters:
        if name in training.gradients:
            gradient, offset = training.gradients[name], plan.parameters[name]
            rows.append(_Row(gradient, shared[gradient], "GRADIENTS", SHARED_PROGRAM, offset, block.get(name, 0)))
    for number, name in enumerate(kernels.scalars):
        storage = next(p.storages[name] for p in kernels.programs if name in p.storages)
        rows.append(_Row(name, storage, "SCALARS", SHARED_PROGRAM, 64 * number))
    for number, (program, placed) in enumerate(zip(kernels.programs, plan.programs, strict=True)):
        for region, arena in (("FIXED", placed.fixed), ("BATCHED", placed.batched)):
            rows += [_Row(n, program.storages[n], region, number, o) for n, o in sorted(arena.offsets.items())]
    return rows


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=True) if value.isascii() else _bytes_text(value)


def _bytes_text(value: str) -> str:
    """A C string of any UTF-8 text: octal escapes, which take three digits at most."""
    return '"' + "".join(f"\\{b:03o}" if b < 32 or b > 126 or b in (34, 92) else chr(b) for b in value.encode()) + '"'


def _numbers(values: Iterable[int]) -> str:
    return "{" + ", ".join(str(v) for v in values) + "}"


def _tensor(row: _Row) -> str:
    storage = row.storage
    kind = INIT_KINDS[row.init.kind] if row.init is not None else 0
    scale = float(row.init.scale).hex() + "f" if row.init is not None else "0"
    axes = ", ".join(_numbers((a.extent, a.block, a.outer_stride, a.inner_stride)) for a in storage.axes) or "{0}"
    return (
        f"    {{{_text(row.name)}, {DTYPES[storage.dtype]}, TASTE_REGION_{row.region}, {row.program}, {kind}, {scale}, "
        f"{len(storage.shape)}, {len(storage.axes)}, {row.segment}, {_numbers(storage.shape or (1,))}, {{{axes}}}, "
        f"{storage.base}, {row.offset_bytes}, {storage.bytes}}},"
    )


def _lookup(index: dict[tuple[int, str], int], program: int, name: str) -> int:
    if not name:
        return NO_TENSOR
    return index.get((program, name), index.get((SHARED_PROGRAM, name), NO_TENSOR))


def _calls(number: int, program: LoweredProgram, index: dict[tuple[int, str], int]) -> list[str]:
    lines, table = [], []
    for position, call in enumerate(program.calls):
        arguments = [_lookup(index, number, name) for name in call.arguments]
        lines.append(f"static const uint16_t arguments_{number}_{position}[] = {_numbers(arguments)};")
        kernel = f"__tvm_ffi_{call.kernel}" if call.kernel else "0"
        table.append(
            f"    {{{kernel}, {_text(call.name)}, arguments_{number}_{position}, {len(arguments)}, "
            f"{PHASES[call.phase]}, {call.block}, {call.fixed_flops}, {call.per_sample_flops}}},"
        )
    return [*lines, f"static const taste_call calls_{number}[] = {{", *table, "};", ""]


def _ranges(program: LoweredProgram, phase: str, blocks: int) -> list[tuple[int, int]]:
    """[first, end) of each block's calls of a phase; an empty range lies where the block's calls would be."""
    found: list[tuple[int, int]] = []
    end_of_phase = max((i + 1 for i, c in enumerate(program.calls) if c.phase == phase), default=0)
    for block in range(blocks):
        own = [i for i, call in enumerate(program.calls) if call.phase == phase and call.block == block]
        if own and own != list(range(own[0], own[-1] + 1)):
            raise AssertionError(f"calls of block {block} in {phase} are not contiguous")
        found.append((own[0], own[-1] + 1) if own else (end_of_phase, end_of_phase))
    return found


def _block_calls(number: int, program: LoweredProgram, model: Model, index: dict[tuple[int, str], int]) -> list[str]:
    forward = _ranges(program, "forward", len(model.blocks))
    backward = _ranges(program, "backward", len(model.blocks))
    lines = [f"static const taste_block_calls blocks_{number}[] = {{"]
    for block, ahead, back in zip(model.blocks, forward, backward, strict=True):
        tensors = (block.input, block.output, gradient_name(block.input), gradient_name(block.output))
        edges = [_lookup(index, number, name) for name in tensors]
        lines.append(f"    {_numbers((*ahead, *back, *edges))},")
    return [*lines, "};", ""]


def _programs(kernels: Kernels, plan: MemoryPlan, index: dict[tuple[int, str], int]) -> list[str]:
    lines = ["static const taste_program programs[] = {"]
    model = kernels.graph.training.model
    segments = len(model.blocks)
    every = 0
    for segment in range(segments):
        every |= 1 << min(segment, 63)
    trained = 0
    for segment, span in enumerate(segment_spans(kernels, plan)):
        trained |= (span.updated_bytes > 0) << min(segment, 63)
    for number, (program, placed) in enumerate(zip(kernels.programs, plan.programs, strict=True)):
        graph, loss = program.stored.graph, [i for i, c in enumerate(program.calls) if c.phase == "loss"]
        first, end = (loss[0], loss[-1] + 1) if loss else (0, 0)
        edges = [_lookup(index, number, name) for name in (graph.input, graph.target, graph.output, graph.loss)]
        updated = trained if graph.loss else 0
        lines.append(
            f"    {{{_text(graph.name)}, calls_{number}, {len(program.calls)}, {first}, {end}, blocks_{number}, "
            f"{placed.fixed.size_bytes}, {placed.batched.size_bytes}, {', '.join(map(str, edges))}, "
            f"UINT64_C({every}), UINT64_C({updated}), {int(has_joined_backward(program, model))}, "
            f"{int(bool(program.own))}}},"
        )
    return [*lines, "};", ""]


def has_joined_backward(program: LoweredProgram, model: Model) -> bool:
    """Whether backward of some block reads what the forward pass of another one keeps, beside the boundaries between them."""
    boundaries = {block.output for block in model.blocks}
    nodes = program.stored.graph.nodes
    makers = {name: node.block for node in nodes if node.phase == "forward" for name in node.outputs}
    return any(
        makers.get(name, node.block) != node.block and name not in boundaries
        for node in nodes
        if node.phase == "backward"
        for name in node.inputs
    )


def _span(offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(offset, bytes) that (offset, size) pairs cover."""
    if not offsets:
        return 0, 0
    start = min(o for o, _ in offsets)
    return start, max(o + s for o, s in offsets) - start


class SegmentSpan(NamedTuple):
    """One taste_segment without its name; `decayed_bytes` and `updated_bytes` are prefixes of `parameter_bytes`."""

    parameter_offset: int
    parameter_bytes: int
    decayed_bytes: int
    updated_bytes: int
    state_offset: int
    state_bytes: int


def segment_spans(kernels: Kernels, plan: MemoryPlan) -> list[SegmentSpan]:
    """Per block: its parameters, those that are trained and decayed (see plan.parameter_group), its states."""
    block, shared, training = blocks_of(kernels), kernels.graph.shared, kernels.graph.training
    spans = []
    for number in range(len(training.model.blocks)):
        own = [n for n in plan.parameters if block.get(n, 0) == number]
        groups = [(parameter_group(training, n), plan.parameters[n], shared[n].bytes) for n in own]
        (start, whole), (_, updated), (_, decayed) = (
            _span([(offset, size) for group, offset, size in groups if group <= last]) for last in (2, 1, 0)
        )
        states = _span([(o, shared[n].bytes) for n, o in plan.states.items() if block.get(n, 0) == number])
        spans.append(SegmentSpan(start, whole, decayed, updated, states[0], states[1]))
    return spans


def _segments(kernels: Kernels, plan: MemoryPlan) -> list[str]:
    blocks = kernels.graph.training.model.blocks
    lines = ["static const taste_segment segments[] = {"]
    for block, span in zip(blocks, segment_spans(kernels, plan), strict=True):
        lines.append(f"    {{{_text(block.name)}, {', '.join(map(str, span))}}},")
    return [*lines, "};", ""]


def _model(
    kernels: Kernels, plan: MemoryPlan, build_id: str, seed: int, index: dict[tuple[int, str], int]
) -> list[str]:
    model, target = kernels.graph.training.model, kernels.target
    scalars = [_lookup(index, SHARED_PROGRAM, name) for name in (LOSS_SCALE, LABEL_SMOOTHING, DROPOUT_COUNTER)]
    shape, limit = model.input_shape, limit_of(target)
    fields = [
        "TASTE_TABLE_VERSION", _text(model.name), _text(target.name), _text(" ".join(target.features)),
        _text(build_id), target.vector_bits if target.rvv else 0, minimum_batch(kernels), model.classes, f"{seed}u",
        len(shape), _numbers(shape or (1,)), "tensors", "sizeof tensors / sizeof tensors[0]", "programs",
        len(kernels.programs), "segments", len(model.blocks), "block_names", len(model.blocks),
        plan.parameter_bytes, plan.state_bytes, plan.constant_bytes, *scalars, f"{model.input_values}u",
        f"{{__tvm_ffi_{SYMBOL}, {limit.row_elements}, {limit.row_flops}}}",
    ]  # fmt: skip
    return ["const taste_model taste_model_table = {", "    " + ", ".join(str(f) for f in fields) + ",", "};"]


__all__ = ["SegmentSpan", "emit_tables", "has_joined_backward", "minimum_batch", "segment_spans"]
