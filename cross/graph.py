"""The graph that every stage works on: typed tensors, nodes in topological order, blocks.

Shapes. A tensor's shape is a tuple of ints; the batch, where there is one, is the FIRST dimension and is
written `BATCH` (-1). No other dimension is ever symbolic. Layout is canonical (NCHW, OIHW, rows x columns);
blocked layouts appear only below `cross.lower`.

Operators of a `Model` (what an importer may emit; everything else is decomposed into these):

    conv2d(x[N,C,H,W], w[O,C/groups,R,S])      attrs strides (2), pads (top, left, bottom, right), dilations (2), groups
    dense(x[N,...,K], w[M,K])                   -> [N,...,M]        (PyTorch's Linear weight order; no bias)
    matmul(a[N,...,I,K], b[N,...,K,J])          both batched        -> [N,...,I,J]
    embedding(tokens[N,...] int32, w[V,C])      -> [N,...,C]        row `token` of w; tokens are the model's input
    layer_norm(x[N,...,C], gamma[C], beta[C])   attr eps; over the last axis; beta may be absent
    batch_norm(x[N,C,...], gamma[C], beta[C], running_mean[C], running_var[C])   attrs eps, momentum (PyTorch's: new = (1-m)*old + m*batch)
    relu, sigmoid, tanh, exp, erf, neg, sqrt(x); gelu(x) attr approximate ('none' or 'tanh')
    clip(x) attrs min, max (floats, +-inf where open); leaky_relu(x) alpha; silu(x); hard_swish(x); hard_sigmoid(x) alpha, beta
    add, sub, mul, div (a, b)                   numpy broadcasting; a bias of C channels has shape [C,1,1] (or [M] after dense)
    max_pool2d(x), avg_pool2d(x)                attrs kernel (2), strides (2), pads (4), ceil_mode, count_include_pad (avg)
    reduce_mean(x), reduce_sum(x)               attrs axes (positive, batch never among them), keepdims (bool)
    softmax(x), log_softmax(x)                  attr axis (positive)
    causal_mask(x[N,...,T,T])                   MASKED above the diagonal, x elsewhere
    lrn(x)                                      attrs size, alpha, beta, bias
    dropout(x)                                  attr ratio
    pad(x)                                      attrs pads ((before, after), ... one pair a dimension), value
    reshape(x)                                  attr shape (BATCH first); transpose(x) attr perm (perm[0] == 0)
    concat(x0, x1, ...)                         attr axis (positive); slice(x) attrs starts, ends, steps (one a dimension, batch whole)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MASKED = -1e30
"""What a causal mask writes: a softmax gives it nothing, and sums with it stay finite."""

BATCH = -1
"""The symbolic batch dimension; only ever a tensor's first."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorType:
    """Shape (BATCH first if batched) and dtype ('float32', 'int32', 'uint32')."""

    shape: Shape
    dtype: str = "float32"

    @property
    def batched(self) -> bool:
        return bool(self.shape) and self.shape[0] == BATCH

    @property
    def elements(self) -> int:
        """Elements, for one sample where the tensor is batched."""
        return int(np.prod([d for d in self.shape if d != BATCH], dtype=np.int64))

    def numpy_shape(self, batch: int) -> Shape:
        return tuple(batch if d == BATCH else d for d in self.shape)


@dataclass(frozen=True)
class Node:
    """One operator. `source` is the user's own node name, for messages; `block` indexes `Model.blocks`.

    `phase` is 'forward', 'loss' or 'backward' (only in programs; a model's nodes are all 'forward').
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    block: int = 0
    phase: str = "forward"


@dataclass(frozen=True)
class Block:
    """A run of nodes that no edge skips: `output` is the only tensor that later blocks read from it or before it."""

    name: str
    first_node: int
    end_node: int
    input: str
    output: str


@dataclass(frozen=True)
class Init:
    """How a tensor is initialised without a weights file. kind: 'uniform' (in [-scale, scale)) or 'constant' (scale)."""

    kind: str
    scale: float


@dataclass(frozen=True)
class Origin:
    """Where a stored tensor comes from in the user's ONNX file: what export needs to write it back.

    `tensor`: the file's initializer, or the folded result that is read in its place. `readers`: the nodes that read it,
    (first output of the node, index of the input). `steps`: how the file's array became ours, in order:
    ('reshape', shape before) or ('transpose', order); the first `folded` of them are nodes of the file. `others`: further
    readers of a tensor that is used twice, which the file turns another way.
    """

    tensor: str
    readers: tuple[tuple[str, int], ...] = ()
    steps: tuple[tuple[str, Shape], ...] = ()
    folded: int = 0
    others: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class Model:
    """A forward graph with one input (float32, or int32 tokens) and one output (logits), ready for `build_training_graph`.

    `parameters` are trainable, `states` are running statistics, `constants` are neither. All are float32 (or int32)
    arrays in canonical layout, keyed by tensor name; names are the user's own (ONNX initializer names).
    `inits` gives each parameter's and state's seeded initialisation.
    `origins` says where parameters and states come from in the user's file.
    `metadata`: JSON-able facts for messages and for export, among them 'softmax_removed' (bool),
    'weight_layout' ({parameter: 'oihw'|'kn' (stored transposed, ONNX MatMul order)|...}), 'notes' (list of one-line strings).
    """

    name: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorType]
    input: str
    output: str
    parameters: Mapping[str, np.ndarray]
    states: Mapping[str, np.ndarray]
    constants: Mapping[str, np.ndarray]
    inits: Mapping[str, Init]
    blocks: tuple[Block, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def input_shape(self) -> Shape:
        """Shape of one sample."""
        return self.tensors[self.input].shape[1:]

    @property
    def input_values(self) -> int:
        """Values that a token of an int32 input may have: the rows of the smallest table it chooses from; else 0."""
        tables = [node.inputs[1] for node in self.nodes if node.op == "embedding"]
        return min((self.tensors[table].shape[0] for table in tables), default=0)

    @property
    def classes(self) -> int:
        return self.tensors[self.output].shape[-1]
