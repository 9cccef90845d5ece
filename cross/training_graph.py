"""Stage 2: a model's forward graph becomes its programs: `train` (forward, loss, backward) and `eval` (forward).

What is saved for backward is explicit: it is whatever forward tensors the backward nodes read.
"""

from __future__ import annotations

from cross import expression as ex
from cross.errors import UsageError
from cross.expression import arg
from cross.fuse import fuse
from cross.fuse_statistics import fuse_statistics
from cross.graph import Model, Node, TensorType
from cross.program_graph import Builder, ProgramGraph, TrainingGraph
from cross.recompute import LEVELS, recompute
from cross.rules import rule_of
from cross.rules.context import LOSS_SCALE, TARGET, Context, gradient_name
from cross.rules.loss import cross_entropy, mean_squared_error, target_type
from cross.trainable import batch_norms, choose_trainable, frozen_norms

LOSSES = ("cross_entropy", "mse")
BN_POLICIES = ("per-micro-batch", "frozen")


def build_training_graph(
    model: Model,
    loss: str = "cross_entropy",
    fusion: bool = True,
    trainable: str = "all",
    bn_policy: str = "per-micro-batch",
    recomputation: str = "cheap",
) -> TrainingGraph:
    """The train and eval programs of a model.

    trainable: what is trained, as in `cross.trainable`; the rest has no gradient, and batch norms of blocks that train
    nothing use their running statistics; with bn_policy 'frozen' all do, so that micro-batches of any sizes accumulate to
    the exact gradient of the effective batch (at those statistics).

    recomputation: what is made again in backward instead of kept, as in `cross.recompute`.

    loss 'cross_entropy': logits [N, classes], target int32 [N]. 'mse': target float32 like the output; mean over
    elements. The loss tensor holds one value a row; gradients are those of loss_scale times the sum of the rows, so
    loss_scale = 1 / batch gives the mean. Raises UnsupportedModelError for an operator without a rule.
    """
    if loss not in LOSSES:
        raise UsageError(f"unknown loss {loss!r}. Known: {', '.join(LOSSES)}.")
    if bn_policy not in BN_POLICIES:
        raise UsageError(f"unknown batch norm policy {bn_policy!r}. Known: {', '.join(BN_POLICIES)}.")
    if recomputation not in LEVELS:
        raise UsageError(f"unknown recomputation {recomputation!r}. Known: {', '.join(LEVELS)}.")
    trained = choose_trainable(model, trainable)
    frozen = batch_norms(model) if bn_policy == "frozen" else frozen_norms(model, trained)
    train, gradients = _train_program(model, loss, trained, frozen)
    programs: tuple[ProgramGraph, ...] = (train, _eval_program(model))
    if fusion:
        programs = tuple(fuse_statistics(fuse(program)) for program in programs)
    programs = tuple(recompute(program, recomputation) for program in programs)
    return TrainingGraph(model, programs, gradients, trainable)


def _forward(model: Model, context: Context) -> None:
    for node in model.nodes:
        context.build.block, context.build.source = node.block, node.source
        rule_of(node).forward(context, node)


def _boundaries(model: Model) -> set[str]:
    return {block.output for block in model.blocks}


def _eval_program(model: Model) -> ProgramGraph:
    context = Context(Builder(dict(model.tensors), training=False))
    _forward(model, context)
    build = context.build
    protected = frozenset(_boundaries(model) | {model.output})
    return ProgramGraph("eval", tuple(build.nodes), build.tensors, model.input, model.output, protected=protected)


def _train_program(
    model: Model, loss: str, trained: frozenset[str], frozen: frozenset[str]
) -> tuple[ProgramGraph, dict[str, str]]:
    builder = Builder(dict(model.tensors), training=True)
    context = Context(builder, _wanted(model, trained), frozen)
    build = context.build
    _forward(model, context)
    build.phase, build.block, build.source = "loss", max(len(model.blocks) - 1, 0), "loss"
    target, rows, seed = _loss(model, context, loss)
    build.phase = "backward"
    boundaries = _boundaries(model)
    found = _backward(model, context, seed, boundaries)
    gradients = {name: found[name] for name in model.parameters if name in found}
    protected = boundaries | set(gradients.values()) | {model.output, rows}
    protected |= {gradient_name(b) for b in boundaries if gradient_name(b) in build.tensors}
    protected |= {name for node in build.nodes for name in node.attrs.get("updates", ())}
    nodes = _without_dead(_in_block_order(build.nodes), protected)
    program = ProgramGraph("train", nodes, build.tensors, model.input, model.output, target, rows, frozenset(protected))
    return program, gradients


def _wanted(model: Model, trained: frozenset[str]) -> set[str]:
    """Trained parameters, and the tensors that depend on one: what backward computes gradients of."""
    wanted = set(trained)
    for node in model.nodes:
        if any(name in wanted for name in node.inputs):
            wanted.update(node.outputs)
    return wanted


def _loss(model: Model, context: Context, loss: str) -> tuple[str, str, str]:
    """Emit the loss: (target tensor, loss rows, gradient of the output)."""
    build, kind = context.build, context.type(model.output)
    build.tensors[LOSS_SCALE] = TensorType((1,))
    build.tensors[TARGET] = target_type(kind, loss)
    rows, slope = (cross_entropy if loss == "cross_entropy" else mean_squared_error)(context, model.output)
    return TARGET, rows, slope


def _backward(model: Model, context: Context, seed: str, boundaries: set[str]) -> dict[str, str]:
    """Reverse sweep; returns the gradient tensor of every wanted tensor that was reached."""
    build = context.build
    contributions: dict[str, list[tuple[str, int]]] = {model.output: [(seed, max(len(model.blocks) - 1, 0))]}
    done: dict[str, str] = {}
    for node in reversed(model.nodes):
        output = node.outputs[0]
        if output not in contributions or output not in context.wanted:
            continue
        done[output] = _settle(context, output, contributions.pop(output), output in boundaries)
        build.block, build.source = node.block, node.source
        for name, gradient in rule_of(node).gradient(context, node, done[output]).items():
            if name in context.wanted:
                contributions.setdefault(name, []).append((gradient, node.block))
    for name in model.parameters:
        if name in contributions:
            done[name] = _settle(context, name, contributions.pop(name), True)
    return done


def _settle(context: Context, tensor: str, parts: list[tuple[str, int]], named: bool) -> str:
    """Sum a tensor's contributions; give the result the name grad:TENSOR where others look for it."""
    build, kind, wanted = context.build, context.type(tensor), gradient_name(tensor)
    build.block, build.source = max(block for _, block in parts), f"gradient of {tensor}"
    if len(parts) == 1:
        only = parts[0][0]
        if not named or only == wanted:
            return only
        if only.startswith("grad:") or build.producers[only].block != build.block:
            return build.map(arg(0), [only], kind, wanted)
        build.rename(only, wanted)
        return wanted
    expr = arg(0)
    for i in range(1, len(parts)):
        expr = ex.add(expr, arg(i))
    return build.map(expr, [name for name, _ in parts], kind, wanted)


def _in_block_order(nodes: list[Node]) -> tuple[Node, ...]:
    """Backward nodes by descending block, so that a block's are contiguous (a shared parameter's sum comes late)."""
    ahead = [n for n in nodes if n.phase != "backward"]
    return (*ahead, *sorted((n for n in nodes if n.phase == "backward"), key=lambda n: -n.block))


def _without_dead(nodes: tuple[Node, ...], needed: set[str]) -> tuple[Node, ...]:
    """Drop nodes whose outputs nobody reads. A node that updates states counts as read."""
    alive, kept = set(needed), []
    for node in reversed(nodes):
        if alive.intersection(node.outputs) or node.attrs.get("updates"):
            alive.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))
