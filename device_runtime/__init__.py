"""Training on the board from Python: a thin layer over libtaste.so, with numpy arrays in canonical layout.

    from device_runtime import Trainer, load_library

    library = load_library("libtaste.so")
    with Trainer(library, batch_size=10, weights="weights.safetensors") as trainer:
        for x, y in batches:                       # x float32 [n, C, H, W], y int32 [n], n <= 10
            step = trainer.step(x, y, learning_rate=0.05, momentum=0.9)
        logits = trainer.predict(x)                # float32 [n, classes]
        trainer.save_weights("trained.safetensors")

or one sample at a time, new classes among them, with replay of old ones:

    learner = Learner(trainer, mean=[0.5], std=[0.25], buffer=500)
    learner.observe(image, label)                  # uint8 [C, H, W]; trains when there are enough for a step
    learner.predict(image), learner.evaluate()

Needs Python 3.9, numpy 1.24 and cffi 1.15 or newer, nothing else: no network, no compiler, no file but the library.
"""

from device_runtime.errors import DeviceError
from device_runtime.learner import Learner
from device_runtime.library import Block, Library, Program, Tensor, load_library
from device_runtime.replay import ReplayBuffer
from device_runtime.trainer import BACKWARD, FORWARD, LOSS, Step, Trainer

__all__ = [
    "BACKWARD",
    "FORWARD",
    "LOSS",
    "Block",
    "DeviceError",
    "Learner",
    "Library",
    "Program",
    "ReplayBuffer",
    "Step",
    "Tensor",
    "Trainer",
    "load_library",
]
