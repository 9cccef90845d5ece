"""Learning new classes on the board as their samples come, one by one, with experience replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from device_runtime.errors import DeviceError
from device_runtime.replay import ReplayBuffer
from device_runtime.trainer import Step, Trainer

REFERENCE_BATCH = 20
"""Rows of a step that the learning rate is given for."""

Array = np.ndarray[Any, Any]


class Learner:
    """Trains `trainer` on a stream of images uint8 [C, H, W] with labels below `trainer.library.classes`.

    mean, std: of x / 255, a plane each, as the model was trained with.
    buffer, policy: samples kept for replay (0: none), and which stay.
    batch_size: rows of a step, a share of `replay_ratio` of them drawn from the buffer; fewer until it holds enough.
    lr: at 20 rows; other sizes learn at lr * batch_size / 20, at most lr_cap. hyper: as in `Trainer.step`;
        the verb `learn` has gradient_clip=1.
    groups: a number for each class; a sample is told apart only from classes of its own number (task-incremental).

    A step is one mean over both halves, then the stream's half is offered to the buffer: what `taste-train learn` does. It
    also brings the running statistics of batch norms up to date before it evaluates; here they stay those of the steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        buffer: int = 1000,
        policy: str = "reservoir",
        batch_size: int = REFERENCE_BATCH,
        replay_ratio: float = 0.5,
        lr: float = 0.1,
        lr_cap: float = 0.4,
        groups: Sequence[int] | None = None,
        seed: int = 0,
        **hyper: Any,
    ) -> None:
        if not 0 <= replay_ratio < 1:
            raise DeviceError(f"replay ratio {replay_ratio} leaves no rows for the stream. Use one below 1.", 2)
        if not 1 <= batch_size <= trainer.batch_size:
            raise DeviceError(f"batch size {batch_size}, the trainer takes 1 to {trainer.batch_size}. Change one.", 2)
        self.trainer, self.classes = trainer, trainer.library.classes
        self.updates = 0
        self._shape = tuple(trainer.library.input_shape)
        planes = (1, -1, 1, 1)
        if len(self._shape) != 3 or not len(mean) == len(std) == self._shape[0] or min(std) <= 0:
            raise DeviceError(f"mean {mean} and std {std} do not fit images {list(self._shape)}. One a plane each.", 2)
        self._scale = np.array([1 / (255 * s) for s in std]).astype(np.float32).reshape(planes)
        self._shift = np.array([-m / s for m, s in zip(mean, std)]).astype(np.float32).reshape(planes)
        self._replayed = int(batch_size * replay_ratio + 1e-9) if buffer > 0 else 0
        self._streamed = batch_size - self._replayed
        self._hyper = {"learning_rate": min(lr * batch_size / REFERENCE_BATCH, lr_cap), **hyper}
        self._pending: list[tuple[Array, int]] = []
        self.buffer: ReplayBuffer | None = None
        if self._replayed:
            self.buffer = ReplayBuffer(
                trainer.library, self._shape, capacity=buffer, classes=self.classes, policy=policy, seed=seed
            )
        self._groups = None if groups is None else np.asarray(groups, np.uint16)
        trainer.set_class_groups(self._groups)

    def observe(self, x: Array, y: int) -> Step | None:
        """One sample of the stream. Trains as soon as there are enough for a step, and returns it."""
        array = np.array(x)
        if array.dtype != np.uint8 or array.shape != self._shape:
            raise DeviceError(f"a sample is {array.dtype} {list(array.shape)}, not uint8 {list(self._shape)}.", 2)
        if not 0 <= int(y) < self.classes:
            raise DeviceError(
                f"label {y}, the model has room for {self.classes} classes. Build it with --max-classes {int(y) + 1}.",
                2,
            )
        self._pending.append((array, int(y)))
        return self._update() if len(self._pending) == self._streamed else None

    def flush(self) -> Step | None:
        """Trains on what was observed since the last step, however little; None where that is nothing."""
        return self._update() if self._pending else None

    def predict(self, x: Array) -> Array:
        """Logits float32 [n, classes] of images uint8 [n, C, H, W], or [classes] of one."""
        images = np.asarray(x)
        if images.shape == self._shape:
            return np.asarray(self.predict(images[None])[0])
        size = self.trainer.batch_size
        parts = [self.trainer.predict(self._floats(images[i : i + size])) for i in range(0, len(images), size)]
        return np.concatenate(parts) if parts else np.empty((0, self.classes), np.float32)

    def evaluate(self, x: Array | None = None, y: Array | None = None) -> dict[int, float]:
        """Accuracy of each class on images uint8 [n, C, H, W] with labels [n], within the label's group.

        Without images: on the buffer, whose samples were trained on, so that it shows what is forgotten, not how well
        new samples do.
        """
        if x is None or y is None:
            if self.buffer is None:
                raise DeviceError("no buffer to evaluate on. Give x and y.", 2)
            x, y = self.buffer.content()
        labels = np.asarray(y)
        logits = self.predict(x)
        if self._groups is not None:
            logits = np.where(self._groups[None, :] == self._groups[labels][:, None], logits, -np.inf)
        right = logits.argmax(axis=1) == labels
        return {int(label): float(right[labels == label].mean()) for label in np.unique(labels)}

    def _update(self) -> Step:
        x = np.stack([sample for sample, _ in self._pending])
        y = np.array([label for _, label in self._pending], np.int32)
        if self.buffer is not None:
            drawn, labels = self.buffer.draw(self._replayed)
            x, y = np.concatenate([x, drawn]), np.concatenate([y, labels])
        target = self.trainer.library.find_tensor(self.trainer.library.programs["train"].target or "", "train")
        step = self.trainer.step(self._floats(x), y.reshape(target.shape_at(len(y))), **self._hyper)
        self.updates += 1
        if self.buffer is not None:
            for sample, label in self._pending:
                self.buffer.add(sample, label)
        self._pending.clear()
        return step

    def _floats(self, images: Array) -> Array:
        return np.asarray(images.astype(np.float32) * self._scale + self._shift)
