"""Trains in Python on the board: PYTHONPATH=FOLDER python3 train_on_the_board.py FOLDER DATA.safetensors OUT.safetensors

FOLDER is what `deploy --python` left on the board (`current` in its folder there); DATA is a split that `data pack` wrote, its rows
taken as they come. Prints the loss of every step, with the bits of taste-train's, and writes the trained weights to OUT.
"""

import sys

import numpy as np
from learn_on_the_board import read_packed

from device_runtime import Trainer, load_library

BATCH_SIZE, EPOCHS = 8, 2


def main(folder, data, out):
    x, y, mean, std = read_packed(data)
    # u8 -> float as the board's own program does it: one product and one sum, their factors rounded once.
    scale = np.array([1 / (255 * s) for s in std]).astype(np.float32).reshape(-1, 1, 1)
    shift = np.array([-m / s for m, s in zip(mean, std)]).astype(np.float32).reshape(-1, 1, 1)
    with Trainer(load_library(f"{folder}/libtaste.so"), BATCH_SIZE, weights=f"{folder}/weights.safetensors") as trainer:
        starts = [start for _ in range(EPOCHS) for start in range(0, len(x), BATCH_SIZE)]
        for number, start in enumerate(starts, 1):
            rows = slice(start, start + BATCH_SIZE)
            step = trainer.step(x[rows].astype(np.float32) * scale + shift, y[rows], learning_rate=0.01, momentum=0.9)
            print(f"step {number}: loss {step.loss:.9g}")
        trainer.save_weights(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
