"""`learn` from start to end on other data: split CIFAR-10, split Tiny-ImageNet, speakers of the Free Spoken Digit Dataset."""

from __future__ import annotations

import io
import json
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from host_control.cli import main
from host_control.preparation import read_build
from tests import data_files as df
from tests.host import host_target

Learn = Callable[..., dict[str, Any]]


@pytest.fixture
def learn(
    built: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Learn:
    """learn(model, shape, classes, *flags): the `tasks` and the `result`; with `refused`, that it ends so, with 23."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))

    def run(
        model: str, shape: tuple[int, ...], classes: int, *flags: object, refused: str | None = None
    ) -> dict[str, Any]:
        folder = built(model, host_target(), input_shape=shape, classes=classes)
        monkeypatch.setattr("host_control.verbs.learn.build_imported", lambda *_: (read_build(folder), None))
        code = main(["learn", "--model", model, "--seeds", "1", "--json", *map(str, flags)])
        out, err = capsys.readouterr()
        if refused is not None:
            assert code == 23 and err.startswith(f"error: {refused}"), err
            return {}
        assert (code, err) == (0, "")
        events = [json.loads(line) for line in out.splitlines()]
        return {"tasks": [e for e in events if e["event"] == "task"], "result": events[-1]}

    return run


def accuracies(result: dict[str, Any]) -> dict[str, float]:
    return {s["name"]: s["final_average_accuracy"]["mean"] for s in result["settings"]}


def spoken(root: Path, speakers: tuple[str, ...]) -> Path:
    """Images 28x28 of one class a folder, named as the Free Spoken Digit Dataset names its recordings."""
    draw, files = np.random.default_rng(2), {}
    patterns = draw.integers(0, 120, (3, 28, 28))
    for index in range(3 * 24):
        digit, speaker = index % 3, index // 3 % len(speakers)
        image = patterns[digit] + 40 * speaker + draw.integers(0, 40, (28, 28))
        files[f"{df.CLASSES[digit]}/{digit}_{speakers[speaker]}_{index}.png"] = df.png(image.astype(np.uint8)[None])
    return df.write_files(root, files)


@pytest.mark.needs("zig")
def test_speakers_come_one_after_the_other(learn: Learn, tmp_path: Path) -> None:
    data = spoken(tmp_path / "digits", ("jackson", "nicolas", "theo"))
    flags = ("--data", data, "--gray", "--scenario", "domain", "--domain", "_([a-z]+)_", "--tasks", 3)
    found = learn("mlp", (1, 28, 28), 10, *flags, "--max-classes", 10, "--buffer", 20, "--batch-size", 4, "--lr", 0.2)
    assert sorted(sum((e["domains"] for e in found["tasks"]), [])) == [0, 1, 2]
    assert accuracies(found["result"])["4"] > 0.7
    learn("mlp", (1, 28, 28), 10, *flags[:-1], 4, refused="4 tasks of 3 domains: task 3 has none")
    learn("mlp", (1, 28, 28), 10, *flags[:5], refused="--scenario domain, but the data names no domains")


@pytest.mark.needs("data", "zig")
def test_split_cifar_10(learn: Learn, data: Path) -> None:
    flags = ("--data", data / "cifar-10-batches-bin", "--samples-per-class", 250, "--buffer", 200)
    found = learn("mlp", (3, 32, 32), 10, *flags, "--compare", "none,20")
    assert [len(e["classes"]) for e in found["tasks"]] == [2] * 10
    without, replayed = found["result"]["settings"]
    counts = [e["samples"] for e in found["tasks"][:5]]
    assert without["updates"] == sum(-(-count // 20) for count in counts)
    assert replayed["updates"] == sum(-(-count // 10) for count in counts)
    final = accuracies(found["result"])
    assert final["20"] - final["none"] >= 0.04
    assert replayed["forgetting"]["mean"] < without["forgetting"]["mean"]


@pytest.mark.acceptance
@pytest.mark.needs("data", "zig")
def test_split_cifar_10_with_a_convolutional_network(learn: Learn, data: Path) -> None:
    flags = ("--data", data / "cifar-10-batches-bin", "--compare", "none,20", "--buffer", 300)
    final = accuracies(learn("resnet8", (3, 32, 32), 10, *flags)["result"])
    assert final["20"] - final["none"] >= 0.05


@pytest.mark.acceptance
@pytest.mark.needs("data", "zig")
def test_split_tiny_imagenet_20(learn: Learn, data: Path) -> None:
    """Ten tasks of two classes, JPEGs at 32x32."""
    flags = ("--data", data / "tinyimagenet20.zip", "--size", "32x32", "--tasks", 10, "--samples-per-class", 250)
    found = learn("resnet8", (3, 32, 32), 20, *flags, "--compare", "none,20", "--buffer", 400)
    assert [len(e["classes"]) for e in found["tasks"]] == [2] * 20
    final = accuracies(found["result"])
    assert final["none"] <= 0.12 and final["20"] >= final["none"] + 0.05


def spectrogram(recording: bytes) -> bytes:
    """PNG 28x28: time across, 0 to 4 kHz upwards, over 80 dB."""
    with wave.open(io.BytesIO(recording)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(sound, 128), 256)[::64]
    levels = 20 * np.log10(np.abs(np.fft.rfft(frames * np.hanning(256), axis=1)).T[::-1] + 1)
    picture = np.clip((levels - levels.max() + 80) * (255 / 80), 0, 255).astype(np.uint8)
    png = io.BytesIO()
    Image.fromarray(picture).resize((28, 28), Image.Resampling.BILINEAR).save(png, "PNG")
    return png.getvalue()


@pytest.mark.acceptance
@pytest.mark.needs("data", "zig")
def test_spoken_digits_of_six_speakers(learn: Learn, data: Path, tmp_path: Path) -> None:
    """Each speaker's recordings as spectrograms; recordings 0 to 4 of each digit are tested on."""
    with zipfile.ZipFile(data / "fsdd.zip") as archive:
        for name in (n for n in archive.namelist() if n.endswith(".wav")):
            digit, speaker, index = Path(name).stem.split("_")
            split = "test" if int(index) < 5 else "train"
            path = tmp_path / f"digits/{split}/{digit}/{digit}_{speaker}_{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(spectrogram(archive.read(name)))
    flags = ("--data", tmp_path / "digits", "--gray", "--scenario", "domain", "--domain", "_([a-z]+)_", "--tasks", 6)
    final = accuracies(learn("resnet8", (1, 28, 28), 10, *flags, "--compare", "none,20", "--buffer", 300)["result"])
    assert final["20"] - final["none"] >= 0.1 and final["20"] >= 0.6
