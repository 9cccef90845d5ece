"""Storage of every tensor of every program, and the copies that follow from it.

Rules, in this order:
  - weights of convolutions and vectors of channels get their own storages, the same in every program;
  - a 4-dimensional float tensor that a (direct or depthwise) convolution reads or writes is blocked, and so is every
    4-dimensional tensor that element-wise work, pooling or sums connect with one; everything else is plain;
  - a tensor that convolutions read is stored with the zero border they need, if its producer can write one;
  - where a kernel needs another storage than a tensor has, a copy (an identity `map`) is inserted before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cross.expression import arg
from cross.graph import BATCH, Node, TensorType
from cross.kernels.convolution import ConvSpec, convolution_class, forward_pads, input_gradient_pads
from cross.program_graph import ProgramGraph, TrainingGraph
from cross.storage import (
    NO_PADS,
    Pads,
    Storage,
    blocked,
    convolution_weight,
    depthwise_weight,
    plain,
    vector_of,
)
from cross.target import Target

CONVOLUTIONS = ("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient")
PLAIN_ONLY = ("dense", "dense_input_gradient", "dense_weight_gradient", "matmul", "embedding", "embedding_gradient")
CONNECTING = ("map", "reduce", "batch_statistics", "max_pool2d", "max_pool2d_gradient", "avg_pool2d", "avg_pool2d_gradient",
              "concat", "slice", "unslice", "channel_window_sum")  # fmt: skip
POOLING = ("max_pool2d", "max_pool2d_gradient", "avg_pool2d", "avg_pool2d_gradient")
"""Operators whose kernels want input and output stored alike."""
FRAMED = ("map", "reshape", "transpose", "concat", "slice", "unslice", "channel_window_sum")
"""Operators whose kernels can write a border of zeros."""


@dataclass(frozen=True)
class StoredProgram:
    """A program whose every tensor has a storage and whose convolutions have a spec (keyed by node position)."""

    graph: ProgramGraph
    storages: Mapping[str, Storage]
    specs: Mapping[int, ConvSpec]


@dataclass(frozen=True)
class StoredGraph:
    """All programs, and the storages that they share (parameters, gradients, states, constants, scalars)."""

    training: TrainingGraph
    programs: tuple[StoredProgram, ...]
    shared: Mapping[str, Storage]


def assign_storage(training: TrainingGraph, target: Target) -> StoredGraph:
    """Decide storages for one target."""
    shared = _shared_storages(training, target)
    programs = tuple(_store_program(program, shared, target) for program in training.programs)
    return StoredGraph(training, programs, shared)


def convolution_spec(node: Node, tensors: Mapping[str, TensorType]) -> ConvSpec:
    """The convolution that a node (forward or gradient) belongs to, without storage pads."""
    x, weight = _convolution_types(node, tensors)
    return ConvSpec(
        in_channels=x.shape[1],
        out_channels=weight.shape[0],
        height=x.shape[2],
        width=x.shape[3],
        kernel=(weight.shape[2], weight.shape[3]),
        strides=tuple(node.attrs["strides"]),
        pads=tuple(node.attrs["pads"]),
        dilations=tuple(node.attrs["dilations"]),
        groups=int(node.attrs["groups"]),
    )


def _convolution_types(node: Node, tensors: Mapping[str, TensorType]) -> tuple[TensorType, TensorType]:
    if node.op == "conv2d":
        return tensors[node.inputs[0]], tensors[node.inputs[1]]
    if node.op == "conv2d_input_gradient":
        return tensors[node.outputs[0]], tensors[node.inputs[1]]
    return tensors[node.inputs[0]], tensors[node.outputs[0]]


def _shared_storages(training: TrainingGraph, target: Target) -> dict[str, Storage]:
    model, vector = training.model, target.channel_block
    shared: dict[str, Storage] = {}
    for node in model.nodes:
        if node.op == "conv2d":
            spec = convolution_spec(node, model.tensors)
            kind, name = convolution_class(spec, target), node.inputs[1]
            if kind == "direct":
                shared[name] = convolution_weight(spec.weight_shape, vector, spec.groups)
            elif kind == "depthwise":
                shared[name] = depthwise_weight(spec.weight_shape, vector)
    for name in (*model.parameters, *model.states, *model.constants):
        if name not in shared:
            shared[name] = unbatched_storage(model.tensors[name], vector)
    for name, gradient in training.gradients.items():
        shared[gradient] = shared[name]
    return shared


def unbatched_storage(kind: TensorType, vector: int) -> Storage:
    """Vectors ([C], [C, 1, 1]) are filled up to whole blocks; the rest is plain."""
    is_vector = len(kind.shape) in (1, 3) and kind.dtype == "float32" and all(d == 1 for d in kind.shape[1:])
    return vector_of(kind.shape, vector) if is_vector and kind.shape[0] > 1 else plain(kind)


def _store_program(program: ProgramGraph, shared: Mapping[str, Storage], target: Target) -> StoredProgram:
    in_blocks = _blocked_tensors(program, target)
    pads = _needed_pads(program, target)
    producers = {name: node for node in program.nodes for name in node.outputs}
    storages = {name: shared[name] for name in program.tensors if name in shared}
    for name, kind in program.tensors.items():
        if name not in storages:
            producer = producers.get(name)
            frame = pads.get(name, NO_PADS) if producer is not None and producer.op in FRAMED else NO_PADS
            storages[name] = _storage_of(kind, name in in_blocks, frame, target)
    if program.target and program.tensors[program.target].dtype == "int32":
        # Labels are [N] to the caller and [N, 1] to kernels, where they broadcast against logits [N, classes].
        labels = storages[program.target]
        storages[program.target] = replace(labels, axes=labels.axes[:-1])
    return _with_copies(program, storages, target)


def _storage_of(kind: TensorType, in_blocks: bool, pads: Pads, target: Target) -> Storage:
    if in_blocks:
        return blocked(kind, target.channel_block, pads)
    return plain(kind) if kind.batched or kind.dtype != "float32" else unbatched_storage(kind, target.channel_block)


def _blocked_tensors(program: ProgramGraph, target: Target) -> set[str]:
    def is_image(name: str) -> bool:
        shape = program.tensors[name].shape
        return len(shape) == 4 and shape[0] == BATCH and name != program.input

    plain_only: set[str] = set()
    found: set[str] = set()
    for node in program.nodes:
        if node.op in PLAIN_ONLY or (node.op in CONVOLUTIONS and _class_of(node, program, target) == "grouped"):
            plain_only.update(node.outputs)
        elif node.op in CONVOLUTIONS:
            found.update(name for name in (*node.inputs, *node.outputs) if is_image(name))
        elif node.op == "batch_statistics":
            found.update(name for name in (*node.inputs, *node.outputs) if is_image(name))
    found -= plain_only
    while True:
        grown = set(found)
        for node in program.nodes:
            names = [name for name in (*node.inputs, *node.outputs) if is_image(name)]
            if node.op in CONNECTING and any(name in grown for name in names):
                grown.update(name for name in names if name not in plain_only)
        if grown == found:
            return found
        found = grown


def _class_of(node: Node, program: ProgramGraph, target: Target) -> str:
    return convolution_class(convolution_spec(node, program.tensors), target)


def _wanted_pads(node: Node, program: ProgramGraph, target: Target) -> dict[str, Pads]:
    """Border that a convolution node needs of its inputs."""
    if node.op not in CONVOLUTIONS or _class_of(node, program, target) == "grouped":
        return {}
    spec = convolution_spec(node, program.tensors)
    if node.op == "conv2d_input_gradient":
        return {node.inputs[0]: input_gradient_pads(spec)}
    return {node.inputs[0]: forward_pads(spec)}


def _needed_pads(program: ProgramGraph, target: Target) -> dict[str, Pads]:
    found: dict[str, Pads] = {}
    for node in program.nodes:
        for name, pads in _wanted_pads(node, program, target).items():
            found[name] = _widest(found.get(name, NO_PADS), pads)
    return found


def _widest(a: Pads, b: Pads) -> Pads:
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))


def _with_copies(program: ProgramGraph, storages: dict[str, Storage], target: Target) -> StoredProgram:
    """Insert copies where a kernel needs another storage, and attach the specs."""
    tensors = dict(program.tensors)
    nodes: list[Node] = []
    specs: dict[int, ConvSpec] = {}
    copies: dict[tuple[str, Storage, int], str] = {}

    def copied(name: str, storage: Storage, reader: Node) -> str:
        if storages[name] == storage:
            return name
        key = (name, storage, reader.block)
        if key not in copies:
            copies[key] = f"{name}:{storage.kind}~{len(copies)}"
            tensors[copies[key]] = tensors[name]
            storages[copies[key]] = storage
            copy = Node("map", (name,), (copies[key],), {"expr": arg(0)}, reader.source, reader.block, reader.phase)
            nodes.append(copy)
        return copies[key]

    for node in program.nodes:
        wanted = _wanted_storages(node, program, storages, target)
        inputs = tuple(copied(name, wanted[i], node) if i in wanted else name for i, name in enumerate(node.inputs))
        if node.op in CONVOLUTIONS:
            specs[len(nodes)] = _stored_spec(replace(node, inputs=inputs), tensors, storages)
        nodes.append(replace(node, inputs=inputs))
    return StoredProgram(replace(program, nodes=tuple(nodes), tensors=tensors), storages, specs)


def _wanted_storages(
    node: Node, program: ProgramGraph, storages: Mapping[str, Storage], target: Target
) -> dict[int, Storage]:
    """Storages that a node's inputs must have, by input position, where they are not as they should be."""
    if node.op in PLAIN_ONLY:
        return {i: plain(program.tensors[name]) for i, name in enumerate(node.inputs) if program.tensors[name].batched}
    if node.op == "batch_statistics":
        name = node.inputs[0]
        if storages[name].kind != "blocked":
            return {0: blocked(program.tensors[name], target.channel_block)}
    if node.op in POOLING:
        kinds = {i: program.tensors[name] for i, name in enumerate(node.inputs)}
        if storages[node.outputs[0]].kind == "blocked":
            return {i: blocked(k, target.channel_block) for i, k in kinds.items() if not _is_blocked(node, i, storages)}
        return {i: plain(k) for i, k in kinds.items() if _is_blocked(node, i, storages)}
    if node.op not in CONVOLUTIONS:
        return {}
    batched = {i: name for i, name in enumerate(node.inputs) if program.tensors[name].batched}
    if _class_of(node, program, target) == "grouped":
        return {i: plain(program.tensors[name]) for i, name in batched.items()}
    pads, wanted = _wanted_pads(node, program, target), {}
    for i, name in batched.items():
        have, need = storages[name], pads.get(name, NO_PADS)
        if have.kind != "blocked" or _widest(have.pads, need) != have.pads:
            wanted[i] = blocked(program.tensors[name], target.channel_block, need)
    return wanted


def _is_blocked(node: Node, position: int, storages: Mapping[str, Storage]) -> bool:
    return storages[node.inputs[position]].kind == "blocked"


def _stored_spec(node: Node, tensors: Mapping[str, TensorType], storages: Mapping[str, Storage]) -> ConvSpec:
    spec = convolution_spec(node, tensors)
    if node.op == "conv2d":
        return replace(spec, x_pads=storages[node.inputs[0]].pads)
    if node.op == "conv2d_input_gradient":
        return replace(spec, y_pads=storages[node.inputs[0]].pads)
    return replace(spec, x_pads=storages[node.inputs[0]].pads, y_pads=storages[node.inputs[1]].pads)
