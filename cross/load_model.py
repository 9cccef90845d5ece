"""Stage 1 of the line: a model file or a zoo name -> `cross.graph.Model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from cross.errors import CorruptInputError, FreeShapeError, TasteError, UnsupportedModelError, UsageError, one_line
from cross.graph import BATCH, Init, Model, Shape, TensorType
from cross.initialise import initial_value
from cross.onnx_import.blocks import compute_blocks
from cross.onnx_import.calibrate import calibrate
from cross.onnx_import.draft import Draft
from cross.onnx_import.head import flatten_logits, remove_softmax, replace_classes
from cross.onnx_import.inits import choose_inits
from cross.onnx_import.layout import TO_CHANNELS_FIRST, to_channels_first
from cross.onnx_import.operators import convert, preflight
from cross.onnx_import.propagate import fold_constants, propagate
from cross.onnx_import.read import read_model
from cross.onnx_import.simplify import simplify
from cross.onnx_import.source import INTEGERS, SourceGraph, build_source
from cross.onnx_import.unfold import unfold_batch_norm as unfold
from cross.zoo import ZOO

Array = np.ndarray[Any, np.dtype[Any]]

FOLDED_NOTE = (
    "the model has no batch norm (its exporter may have folded it into the convolutions): "
    "learning rate 0.01 with warm-up and clipping by default, or --unfold-bn"
)

_PIXELWISE = frozenset(("Add", "Cast", "Div", "Identity", "Mul", "Pad", "Sub"))


def load_model(
    source: str | Path,
    *,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
    init: str = "file",
    seed: int = 0,
    unfold_batch_norm: Array | None = None,
) -> Model:
    """A forward graph from an ONNX file or a zoo name.

    `input_shape`: [C, H, W] of one sample, [T] of tokens; a file's own where it has one, 3x32x32 for the zoo
    (resnet18-imagenet 3x224x224, chartransformer 64 characters). `classes`: replaces the last dense layer or 1x1
    convolution where its size differs. `input_name`, `output_name`: which, where the file has several; any tensor may be
    the output. `init`: 'file' keeps the file's weights, 'seeded' makes all of them from `seed`; zoo models are always
    seeded. `unfold_batch_norm`: float32 samples [B, C, H, W]; a batch norm set from their statistics follows every
    convolution with a bias, the function unchanged.

    Raises UsageError, CorruptInputError, SecurityError, FileError or UnsupportedModelError, each in one line.
    """
    if init not in ("file", "seeded"):
        raise UsageError(f"unknown init {init!r}. Known: file, seeded.")
    shape = _checked_shape(input_shape)
    if classes is not None and classes < 1:
        raise UsageError(f"{classes} classes. Give 1 or more.")
    name = str(source)
    if name in ZOO:
        model = _from_zoo(name, shape, classes, input_name, output_name, seed)
    else:
        path = Path(source)
        if not path.exists():
            raise UsageError(f"no model {name!r}: no such file, and not one of {', '.join(sorted(ZOO))}.")
        try:
            proto = read_model(path)
            model = _import(proto, path.stem, shape, classes, input_name, output_name, init, seed, from_zoo=False)
        except TasteError as error:
            raise type(error)(one_line(str(error))) from error
        except Exception as error:  # whatever a broken file provokes in protobuf, numpy or onnx is the file's fault
            reason = one_line((str(error) or type(error).__name__).strip().splitlines()[0].rstrip("."))
            raise CorruptInputError(f"{path} is not a valid ONNX model: {reason}. Export it again.") from error
    return model if unfold_batch_norm is None else unfold(model, unfold_batch_norm)


def _from_zoo(
    name: str, shape: Shape | None, classes: int | None, input_name: str | None, output_name: str | None, seed: int
) -> Model:
    zoo = ZOO[name]
    if shape is not None and len(shape) != len(zoo.default_shape) and not zoo.any_rank:
        example = ",".join(map(str, zoo.default_shape))
        raise UsageError(
            f"input shape {','.join(map(str, shape))}: {name} takes samples like {example}. "
            "Give such data, or choose another model."
        )
    shape = shape or zoo.default_shape
    proto = zoo.build(shape, classes or zoo.default_classes)
    try:
        return _import(proto, name, shape, classes, input_name, output_name, "seeded", seed, from_zoo=True)
    except UnsupportedModelError as error:
        refused, _, reason = str(error).partition("cannot be trained: ")
        if refused or not reason:
            raise
        size = ",".join(map(str, shape))
        raise UsageError(
            f"{name} cannot take samples of {size}: {reason.partition('. ')[0]}. Give larger ones."
        ) from error


def _import(
    proto: onnx.ModelProto,
    name: str,
    input_shape: Shape | None,
    classes: int | None,
    input_name: str | None,
    output_name: str | None,
    init: str,
    seed: int,
    *,
    from_zoo: bool,
) -> Model:
    """The line inside the stage; every step is one file of cross/onnx_import."""
    source = build_source(proto, input_name, output_name)
    preflight(source.nodes, folded=False)
    sample_shape = _sample_shape(source, input_shape)
    source, origins = fold_constants(source)
    try:
        graph = propagate(source, sample_shape, origins)
    except CorruptInputError as error:
        if input_shape is None:
            raise
        raise UsageError(str(error)) from error
    preflight(graph.nodes, folded=True)
    draft, output = convert(graph, source.input, source.output)
    draft, output, turned = to_channels_first(draft, output)
    draft, output = simplify(draft, output)
    output, softmax = remove_softmax(draft, output)
    output = flatten_logits(draft, output)
    fresh: set[str] = set()
    file_classes, axes = draft.shapes[output][-1], dict[str, int]()
    if classes is not None:
        axes = {name: shape.index(file_classes) for name, shape in draft.shapes.items() if file_classes in shape}
        draft, fresh = replace_classes(draft, output, classes)
    draft.prune(output)
    if source.input_type in INTEGERS or any(node.op == "embedding" for node in draft.nodes):
        _check_tokens(draft)
    if not draft.parameters:
        raise UnsupportedModelError("the model has no weights to train. Choose another --output.")
    metadata = _metadata(draft, source, softmax, "nhwc" if turned else "nchw")
    metadata |= {"file_classes": file_classes, "replaced": {name: axes[name] for name in sorted(fresh)}}
    model = _finish(draft, output, name, init, seed, fresh, metadata)
    normalised = bool(model.states) or any(node.op == "layer_norm" for node in model.nodes)
    uncalibrated = init == "seeded" and not from_zoo and not normalised
    return calibrate(model, seed) if uncalibrated else model


def _check_tokens(draft: Draft) -> None:
    """An integer input is only looked up in tables; whatever else reads it would take it for float32."""
    others = [n.source for n in draft.nodes if draft.input in n.inputs and n.op != "embedding"]
    if others:
        raise UnsupportedModelError(
            f"{others[0]!r} computes with the integers of input {draft.input!r}. Export the model with a float input."
        )


def _finish(
    draft: Draft,
    output: str,
    name: str,
    init: str,
    seed: int,
    fresh: set[str],
    metadata: dict[str, Any],
) -> Model:
    inits = choose_inits(draft)
    nodes, blocks = compute_blocks(draft.nodes, draft.input, output)
    seeded = set(inits) if init == "seeded" else fresh
    return Model(
        name=name,
        nodes=nodes,
        tensors=_types(draft),
        input=draft.input,
        output=output,
        parameters={k: _value(k, v, inits[k], seed, k in seeded) for k, v in draft.parameters.items()},
        states={k: _value(k, v, inits[k], seed, k in seeded) for k, v in draft.states.items()},
        constants={k: np.ascontiguousarray(v, np.float32) for k, v in draft.constants.items()},
        inits=inits,
        blocks=blocks,
        metadata=metadata,
        origins=dict(draft.origins),
    )


def _types(draft: Draft) -> dict[str, TensorType]:
    types = {tensor: TensorType(tuple(int(d) for d in shape)) for tensor, shape in draft.shapes.items()}
    if any(node.op == "embedding" for node in draft.nodes):
        types[draft.input] = TensorType(types[draft.input].shape, "int32")
    return types


def _value(name: str, array: Array, init: Init, seed: int, seeded: bool) -> Array:
    return initial_value(name, array.shape, init, seed) if seeded else np.ascontiguousarray(array, np.float32)


def _metadata(draft: Draft, source: SourceGraph, softmax: str, input_layout: str) -> dict[str, Any]:
    """Facts for messages, for defaults of training and for export."""
    notes = []
    if softmax:
        notes.append(f"the trailing {softmax} is taken off for training (the loss contains it); export puts it back")
    if input_layout == "nhwc":
        notes.append("the file takes images as height x width x channels; here they are channels x height x width")
    has_norm = any(node.op == "batch_norm" for node in draft.nodes)
    readers = draft.consumers()
    biased = any(
        reader.op == "add" and any(i in draft.parameters for i in reader.inputs)
        for node in draft.nodes
        if node.op == "conv2d"
        for reader in readers.get(node.outputs[0], [])
    )
    if biased and not has_norm:
        notes.append(FOLDED_NOTE)
    return {
        "softmax_removed": bool(softmax),
        "softmax": softmax,
        "weight_layout": dict(draft.layouts),
        "folded_batch_norm": biased and not has_norm,
        "input_layout": input_layout,
        "source_input": source.input,
        "source_output": source.output,
        "opset": source.opset,
        "notes": notes,
    }


def _checked_shape(input_shape: Sequence[int] | None) -> Shape | None:
    if input_shape is None:
        return None
    if not input_shape or any(int(d) != d or d < 1 for d in input_shape):
        raise UsageError(f"input shape {','.join(map(str, input_shape))}: give C,H,W, each 1 or more.")
    return tuple(int(d) for d in input_shape)


def _sample_shape(source: SourceGraph, wanted: Shape | None) -> Shape:
    """Shape of one sample as the file orders it; `wanted` is [C, H, W]."""
    declared = source.input_dims[1:]
    if len(source.input_dims) < 2:
        raise UnsupportedModelError(
            f"input {source.input!r} has {len(source.input_dims)} dimensions; the batch and one more are needed. "
            "Export the model again."
        )
    if wanted is not None and len(declared) == 3 and len(wanted) == 3 and _channels_last(source):
        wanted = (*wanted[1:], wanted[0])
    shape = wanted or tuple(d if d is not None else BATCH for d in declared)
    if BATCH in shape:
        listed = ",".join("?" if d is None else str(d) for d in declared)
        raise FreeShapeError(
            f"input {source.input!r} has free dimensions ({listed}). Give them with --input-shape C,H,W."
        )
    if len(shape) != len(declared):
        raise UsageError(
            f"input {source.input!r} takes {len(declared)} dimensions a sample; --input-shape gives {len(shape)}."
        )
    return shape


def _channels_last(source: SourceGraph) -> bool:
    """Whether the file brings the channels to the front as soon as pixels are scaled."""
    scaled, turned = {source.input}, False
    for node in source.nodes:
        if not scaled.isdisjoint(node.input):
            if node.op_type in _PIXELWISE:
                scaled.add(node.output[0])
            elif [tuple(a.ints) for a in node.attribute if a.name == "perm"] == [TO_CHANNELS_FIRST]:
                turned = True
            else:
                return False
    return turned
