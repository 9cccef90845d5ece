"""Learns from samples as they come, in Python on the board: python learn_on_the_board.py LIBTASTE.SO DATA.safetensors

LIBTASTE.SO lies in what `build` and `deploy --python` leave; DATA is a split that `data pack` wrote. Prints accuracy on what the
buffer holds after every 200 samples. A camera or a sensor would take the place of the loop.
"""

import json
import struct
import sys

import numpy as np

from device_runtime import Learner, Trainer, load_library


def read_packed(path):
    """x uint8 [N, C, H, W], y int32 [N], mean and std of a packed file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    found = {}
    for name, dtype in (("x", np.uint8), ("y", np.int32)):
        first, end = header[name]["data_offsets"]
        found[name] = np.frombuffer(data[first:end], dtype).reshape(header[name]["shape"])
    return found["x"], found["y"], *(json.loads(header["__metadata__"][name]) for name in ("mean", "std"))


def main(library, data):
    x, y, mean, std = read_packed(data)
    stream = np.argsort(y, kind="stable")  # one class after the other: what makes networks forget
    with Trainer(load_library(library), batch_size=20) as trainer:
        learner = Learner(trainer, mean=mean, std=std, buffer=200, batch_size=20, lr=0.1, gradient_clip=1.0)
        for number, row in enumerate(stream, 1):
            learner.observe(x[row], y[row])
            if number % 200 == 0:
                remembered = learner.evaluate()
                mean_accuracy = sum(remembered.values()) / len(remembered)
                print(f"{number} samples, {learner.updates} updates: {len(remembered)} classes, {mean_accuracy:.0%}")
        learner.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
