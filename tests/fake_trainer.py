"""A Python script that stands in for taste-train's info and train: events, a checkpoint, weights, exit codes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from host_control.preparation import Built
from tests.host import host_target

SCRIPT = r"""#!{python}
import hashlib, json, os, signal, struct, sys, time
def say(**event):
    print(json.dumps(event), flush=True)
verb, words = sys.argv[1], sys.argv[2:]
flags = dict(zip(words, words[1:] + [""]))
with open(os.path.realpath(__file__) + ".calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")
if verb == "info":
    programs = {{name: {{"fixed_bytes": 1 << 20, "per_sample_bytes": 1000}} for name in ("train", "eval")}}
    planned = {{"planned_bytes": 3 << 20}} if "--batch-size" in flags else {{}}
    say(event="info", model="fake", target="x86-64-avx2", programs=programs, **planned)
    sys.exit(0)
ended = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: ended.append(1))
if flags["--lr"] == "99.0" or flags["--effective-batch"] == "39":
    say(event="step", step=1, epoch=0.1, loss=None, accuracy=0.0, lr=99.0, samples_per_s=1.0)
    print("error: step 2: loss is not finite. Lower the learning rate.", file=sys.stderr)
    sys.exit(15)
if flags["--lr"] == "97.0":
    os.kill(os.getpid(), signal.SIGKILL)
place = os.path.join(flags["--checkpoint"], "step")
first = int(open(place).read()) if "--resume" in flags and os.path.exists(place) else 0
if first:
    say(event="resume", path=place, step=first, epoch=first / 10)
total = int(flags["--steps"])
say(event="plan", batch_size=int(flags["--batch-size"]), planned_bytes=123456)
for step in range(first + 1, total + 1):
    say(event="step", step=step, epoch=step / 10, loss=1 / step, accuracy=0.5, lr=0.1, samples_per_s=50.0,
        temperature_c=61.5, rss_bytes=3 << 20)
    if step % 10 == 0:
        say(event="eval", epoch=step / 10, seconds=(step - first) / 50, loss=0.5, accuracy=0.75, samples=4)
    time.sleep({pause})
    if ended:
        os.makedirs(flags["--checkpoint"], exist_ok=True)
        open(place, "w").write(str(step - 1))
        say(event="checkpoint", path=flags["--checkpoint"], step=step - 1)
        print("error: interrupted after step. Run it again.", file=sys.stderr)
        sys.exit(130)
data = struct.pack("<f", 7.0)
header = json.dumps({{"w": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}).encode()
with open(flags["--save"], "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header + data)
sha = hashlib.sha256(data).hexdigest() if {honest} else "0" * 64
say(event="result", verb="train", epochs=total / 10, steps=total, loss=1 / total, accuracy=0.5, test_loss=0.5,
    test_accuracy=0.75, samples_per_s=50.0, sha256=sha)
"""


def write_trainer(folder: Path, *, pause: float = 0.0, honest: bool = True) -> Built:
    """A build folder around the script; `honest` false: it prints a hash that is not its weights'."""
    folder.mkdir(parents=True, exist_ok=True)
    program = SCRIPT.format(python=sys.executable, pause=pause, honest=honest).encode()
    (folder / "taste-train").write_bytes(program)
    (folder / "taste-train").chmod(0o755)
    (folder / "weights.safetensors").write_bytes(b"weights of the build")
    files = {"taste-train": {"sha256": hashlib.sha256(program).hexdigest(), "bytes": len(program)}}
    manifest: dict[str, Any] = {
        "model": "mlp",
        "target": host_target(),
        "version": "1",
        "build_id": "b",
        "minimum_batch": 1,
    }
    manifest |= {"files": files, "features": [], "vector_bits": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Built(folder, manifest)
