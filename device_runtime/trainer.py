"""A parameter set, a thread pool and a session of libtaste, driven with numpy arrays."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from device_runtime.errors import DeviceError
from device_runtime.library import Library, text
from device_runtime.weights import read_weights, write_weights

FORWARD, LOSS, BACKWARD = 1, 2, 4
"""Phases of `Trainer.run`, to be added up."""

OPTIMIZERS = ("sgd", "adam", "adamw")
"""In the order of taste_optimizer."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Step:
    """What a step did: mean loss of the rows, rows classified right, gradient norm before clipping, seconds."""

    loss: float
    correct: int
    gradient_norm: float
    forward_s: float
    backward_s: float
    update_s: float


class Trainer:
    """Trains the library's model with batches of at most `batch_size` rows.

    weights: safetensors file to start from; None: seeded initial weights (`seed`, default the model's own).
    threads, cores: default all cores that this process may use; the calling thread is pinned only while a call lasts.
    slots: floats of optimizer state a parameter (SGD 0, with momentum 1, Adam 2).
    accumulate: room for accumulated gradients (`gradients` several times, then one `update`).
    programs: those that will be run. All memory is taken here: nothing grows later. With "train_fused" in place of "train",
    `step` updates each parameter within backward: the same bits, no gradients in memory, no clipping, no `gradients`.

    Calls from several Python threads take turns. Raises DeviceError, whose text says what to do.
    """

    def __init__(
        self,
        library: Library,
        batch_size: int,
        *,
        weights: str | Path | None = None,
        seed: int | None = None,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        slots: int = 1,
        accumulate: bool = False,
        programs: Sequence[str] = ("train", "eval"),
    ) -> None:
        self.library = library
        self.batch_size = batch_size
        self._ffi, self._c = library.ffi, library.functions
        self._lock = threading.Lock()
        self._error = self._ffi.new("taste_error *")
        self._step = self._ffi.new("taste_step *")
        self._pool = self._ffi.NULL
        count = threads or (len(cores) if cores else self._c.taste_pool_available_cores())
        if cores is not None and len(cores) < count:
            raise DeviceError(f"{count} threads on {len(cores)} cores. Name as many cores as threads.", 2)
        self._open_parameters(seed)
        if weights is not None:
            self.load_weights(weights)
        self._open_pool(count, cores)
        self._steps = "train" if "train" in programs or "train_fused" not in programs else "train_fused"
        self._open_session(programs, slots, accumulate)

    def _open_parameters(self, seed: int | None) -> None:
        out = self._ffi.new("taste_parameters **")
        size = self._c.taste_parameters_bytes(self.library.model)
        self._parameters_block = self._block(size)
        self._check(self._c.taste_parameters_init(self.library.model, self._parameters_block, size, out, self._error))
        self._parameters = out[0]
        chosen = self.library.seed if seed is None else seed
        self._check(self._c.taste_parameters_seed(self._parameters, chosen, self._ffi.NULL))

    def _open_pool(self, count: int, cores: Sequence[int] | None) -> None:
        out = self._ffi.new("taste_pool **")
        size = self._c.taste_pool_bytes(count)
        self._pool_block = self._block(max(size, 64))
        named = self._ffi.new("uint32_t[]", list(cores)) if cores else self._ffi.NULL
        self._check(self._c.taste_pool_start(count, named, self._pool_block, size, out, self._error))
        self._pool = out[0]

    def _open_session(self, programs: Sequence[str], slots: int, accumulate: bool) -> None:
        model = self.library.model
        uses = self._ffi.new("taste_use[]", [(self.library.find_program(p).index, self.batch_size) for p in programs])
        options = self._ffi.new("taste_session_options *", (slots, int(accumulate)))
        size, out = self._ffi.new("size_t *"), self._ffi.new("taste_session **")
        try:
            self._check(self._c.taste_session_bytes(model, uses, len(uses), options, size, self._error))
            self._session_block = self._block(size[0])
            arguments = (model, uses, len(uses), options, self._pool, self._session_block, size[0], out, self._error)
            self._check(self._c.taste_session_init(*arguments))
        except DeviceError:
            self.close()
            raise
        self._session = out[0]

    def _block(self, size: int) -> Any:
        """Page-aligned memory that lives as long as what is opened in it."""
        try:
            return self._ffi.from_buffer(mmap.mmap(-1, size), require_writable=True)
        except (OSError, ValueError, OverflowError):
            raise DeviceError(f"{size} bytes could not be mapped. Use a smaller batch size.", 10) from None

    def close(self) -> None:
        """Ends the threads. The trainer cannot be used afterwards."""
        if self._pool != self._ffi.NULL:
            self._c.taste_pool_stop(self._pool)
            self._pool = self._ffi.NULL

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self.close()

    # Steps

    def step(self, x: Array, y: Array, *, learning_rate: float, **hyper: Any) -> Step:
        """One optimizer step on x float32 or int32 [n, *input_shape] and y int32 [n, ...] or float32 [n, ...].

        hyper, all with PyTorch's meaning and defaults: optimizer "sgd" (default), "adam" or "adamw"; momentum, nesterov;
        betas, epsilon; weight_decay, no_decay_norm (none for biases and norms); gradient_clip (L2 norm, 0: none).
        DeviceError 15: the loss or a gradient is NaN or Inf.
        """
        rows, x, y = self._batch(x, y)
        scalars = self._hyper(learning_rate, **hyper)
        arguments = (self._index(self._steps), rows, self._address(x), self._address(y), scalars, self._step)
        return self._stepped(self._c.taste_session_step, *arguments)

    def gradients(self, x: Array, y: Array, *, effective_batch: int | None = None) -> Step:
        """Gradients of sum(row losses) / effective_batch (default: the rows given), added up if it accumulates."""
        rows, x, y = self._batch(x, y)
        samples = effective_batch or rows
        arguments = (self._index("train"), rows, samples, self._address(x), self._address(y), self._step)
        return self._stepped(self._c.taste_session_gradients, *arguments)

    def update(self, *, learning_rate: float, **hyper: Any) -> Step:
        """One optimizer step from the gradients (`hyper` as in `step`); accumulated ones start anew."""
        scalars = self._hyper(learning_rate, **hyper)
        return self._stepped(self._c.taste_session_update, self._index("train"), scalars, self._step)

    def set_step(self, step: int, *, seed: int | None = None) -> None:
        """Optimizer steps done so far, for Adam's bias correction and the dropout masks; a new trainer is at 0."""
        self._c.taste_session_set_step(self._session, self.library.seed if seed is None else seed, step)

    def set_label_smoothing(self, smoothing: float) -> None:
        """Share of the target spread over all classes. DeviceError 2: the model's loss has none."""
        with self._lock:
            self._check_session(self._c.taste_session_set_label_smoothing(self._session, smoothing))

    def set_class_groups(self, groups: Array | None) -> None:
        """Rows are classified among the classes with their label's number in `groups` uint16 [classes]; None: all.

        DeviceError 2: not one number a class, or a loss without labels.
        """
        if groups is not None:
            groups = np.ascontiguousarray(groups, np.uint16).copy()
            if groups.shape != (self.library.classes,):
                raise DeviceError(f"{groups.size} groups for {self.library.classes} classes. Give one a class.", 2)
        pointer = self._ffi.NULL if groups is None else self._ffi.from_buffer("uint16_t[]", groups)
        with self._lock:
            self._check_session(self._c.taste_session_set_class_groups(self._session, pointer))
            self._groups = groups  # the session looks at it in every step

    def predict(self, x: Array) -> Array:
        """Outputs float32 [n, classes] of x float32 [n, *input_shape] by the program `eval`."""
        rows, x, _ = self._batch(x, None)
        output = self.library.find_tensor(self.library.find_program("eval").output, "eval")
        logits = np.empty(output.shape_at(rows), np.float32)
        arguments = (self._index("eval"), rows, self._address(x), self._ffi.from_buffer("float[]", logits))
        with self._lock:
            self._check_session(self._c.taste_session_predict(self._session, self._parameters, *arguments))
        return logits

    def load(self, x: Array, y: Array | None = None, *, program: str = "train") -> None:
        """Copies a batch into a program's input and target, for `run`."""
        rows, x, y = self._batch(x, y)
        target = self._ffi.NULL if y is None else self._address(y)
        with self._lock:
            status = self._c.taste_session_load(self._session, self._index(program), rows, self._address(x), target)
            self._check_session(status)

    def run(
        self,
        phases: int,
        *,
        batch_size: int,
        first_block: int = 0,
        end_block: int | None = None,
        program: str = "train",
    ) -> None:
        """Runs phases (FORWARD, LOSS, BACKWARD added up) of blocks [first_block, end_block) of a program.

        The boundary tensors that the range reads must be there: from `load`, an earlier run, or `write_tensor`. In a build with
        `--recompute blocks` backward runs over all blocks only.
        """
        known = self.library.find_program(program)
        end = len(known.blocks) if end_block is None else end_block
        arguments = (self._session, self._parameters, known.index, phases, first_block, end, batch_size)
        with self._lock:
            self._check_session(self._c.taste_session_run(*arguments))

    # Tensors, all in canonical layout

    def read_parameter(self, name: str) -> Array:
        """A parameter, state or constant."""
        tensor = self.library.find_tensor(name)
        values = np.empty(tensor.shape, tensor.dtype)
        with self._lock:
            arguments = (self._parameters, name.encode(), values.size, self._address(values), self._error)
            self._check(self._c.taste_parameters_read(*arguments))
        return values

    def write_parameter(self, name: str, values: Array) -> None:
        """Replaces a parameter, state or constant; the shape must be its own."""
        tensor = self.library.find_tensor(name)
        array = self._fitting(name, values, tensor.shape, tensor.dtype)
        with self._lock:
            arguments = (self._parameters, name.encode(), self._address(array), array.size, self._error)
            self._check(self._c.taste_parameters_write(*arguments))

    def parameters(self) -> dict[str, Array]:
        """Every parameter and state by name, in the order of the tables."""
        return {t.name: self.read_parameter(t.name) for t in self.library.tensors if t.kind in ("parameter", "state")}

    def read_tensor(self, name: str, *, batch_size: int, program: str = "train") -> Array:
        """A tensor of the arena: a boundary, its gradient, an input or output, as the last run left it."""
        tensor = self.library.find_tensor(name, program)
        values = np.empty(tensor.shape_at(batch_size), tensor.dtype)
        arguments = (self._index(program), batch_size, name.encode(), values.size, self._address(values))
        with self._lock:
            self._check_session(self._c.taste_tensor_read(self._session, *arguments))
        return values

    def write_tensor(self, name: str, values: Array, *, program: str = "train") -> None:
        """Writes a boundary tensor or its gradient; the first dimension is the batch size."""
        tensor = self.library.find_tensor(name, program)
        rows = int(np.shape(values)[0]) if np.ndim(values) else 1
        array = self._fitting(name, values, tensor.shape_at(rows), tensor.dtype)
        arguments = (self._index(program), rows, name.encode(), self._address(array), array.size)
        with self._lock:
            self._check_session(self._c.taste_tensor_write(self._session, *arguments))

    def gradient(self, name: str) -> Array:
        """The gradient of the parameter called `name` (the accumulated one while the trainer accumulates)."""
        values = np.empty(self.library.find_tensor(name).shape, np.float32)
        with self._lock:
            out = self._ffi.from_buffer("float[]", values)
            self._check_session(self._c.taste_gradient_read(self._session, name.encode(), values.size, out))
        return values

    def slot(self, name: str, slot: int = 0) -> Array:
        """Optimizer state of the parameter called `name`: slot 0 momentum or Adam's m, slot 1 Adam's v."""
        tensor = self.library.find_tensor(name)
        values = np.empty(tensor.shape, np.float32)
        index, out = self.library.tensors.index(tensor), self._ffi.from_buffer("float[]", values)
        with self._lock:
            if self._c.taste_slot_read(self._session, slot, index, 0, values.size, out) != 0:
                raise DeviceError(f"this session has no slot {slot} of {name!r}. Open it with more slots.", 2)
        return values

    # Files

    def load_weights(self, path: str | Path) -> None:
        """Reads every parameter and state from a safetensors file.

        DeviceError 13: one is missing or has another shape; 14: the file is damaged. Then nothing was changed.
        """
        read = read_weights(self.library, Path(path))
        for tensor in self.library.tensors:
            if tensor.kind not in ("parameter", "state"):
                continue
            if tensor.name not in read:
                raise DeviceError(f"{path} has no tensor {tensor.name!r}. Use weights of this model.", 13)
            found = read[tensor.name]
            if found.shape != tensor.shape or found.dtype != np.dtype(tensor.dtype):
                theirs, ours = f"{found.dtype}{list(found.shape)}", f"{tensor.dtype}{list(tensor.shape)}"
                message = f"{path} has {tensor.name!r} as {theirs}, the model as {ours}. Use weights of this model."
                raise DeviceError(message, 13)
        stored = {t.name for t in self.library.tensors if t.kind in ("parameter", "state", "constant")}
        for name, values in read.items():
            if name in stored:
                self.write_parameter(name, values)

    def save_weights(self, path: str | Path) -> None:
        """Writes parameters and states as safetensors: whole or not at all (temporary file, fsync, rename)."""
        write_weights(self.library, Path(path), self.parameters())

    # Between numpy and C

    def _index(self, program: str) -> int:
        return self.library.find_program(program).index

    def _batch(self, x: Array, y: Array | None) -> tuple[int, Array, Any]:
        """Contiguous arrays of the right type, checked against the model's shapes."""
        x = np.ascontiguousarray(x, self.library.find_tensor(self.library.programs["train"].input, "train").dtype)
        if x.shape[1:] != self.library.input_shape:
            expected = ", ".join(map(str, self.library.input_shape))
            raise DeviceError(f"x has shape {list(x.shape)}, the model takes [n, {expected}]. Reshape it.", 2)
        if y is None:
            return len(x), x, None
        target = self.library.find_tensor(self.library.programs["train"].target or "", "train")
        return len(x), x, self._fitting("y", y, target.shape_at(len(x)), target.dtype)

    def _fitting(self, name: str, values: Array, shape: tuple[int, ...], dtype: str) -> Array:
        array = np.asarray(values)
        if array.shape != shape:
            raise DeviceError(f"{name!r} is given with shape {list(array.shape)}, not {list(shape)}. Reshape it.", 2)
        if dtype != "float32" and array.dtype.kind not in "iu":
            raise DeviceError(f"{name!r} is given as {array.dtype}, not {dtype}. Convert it.", 2)
        return np.ascontiguousarray(array, dtype)

    def _address(self, array: Array) -> Any:
        return self._ffi.cast("void *", array.ctypes.data)

    def _hyper(
        self,
        learning_rate: float,
        *,
        optimizer: str = "sgd",
        momentum: float = 0.0,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        no_decay_norm: bool = False,
        gradient_clip: float = 0.0,
    ) -> Any:
        if optimizer not in OPTIMIZERS:
            raise DeviceError(f"unknown optimizer {optimizer!r}. Use one of {', '.join(OPTIMIZERS)}.", 2)
        rule = OPTIMIZERS.index(optimizer)
        sgd = (learning_rate, momentum, weight_decay, gradient_clip, int(nesterov))
        return self._ffi.new("taste_hyper *", (*sgd, rule, *betas, epsilon, int(no_decay_norm)))

    def _stepped(self, function: Any, *arguments: Any) -> Step:
        with self._lock:
            self._check_session(function(self._session, self._parameters, *arguments))
            done = self._step
            return Step(
                loss=done.loss,
                correct=done.correct,
                gradient_norm=done.gradient_norm,
                forward_s=done.forward_ns * 1e-9,
                backward_s=done.backward_ns * 1e-9,
                update_s=done.update_ns * 1e-9,
            )

    def _check(self, status: int) -> None:
        if status != 0:
            raise DeviceError(text(self._ffi, self._error.text), int(status))

    def _check_session(self, status: int) -> None:
        if status != 0:
            raise DeviceError(text(self._ffi, self._c.taste_session_error(self._session)), int(status))
