"""`data pack`, `data inspect`, `data fetch` on the command line: results, exit codes, one line for each error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from host_control.cli import main
from host_control.data import fetch as fetching
from host_control.verbs import data as verb
from tests import data_files as df

X, Y = df.random_images(20, (3, 8, 8)), np.arange(20) % 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return df.write_files(tmp_path / "my photos", df.class_folders(X, Y))


def _result(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    assert main(["data", *map(str, words), "--json"]) == code
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def test_pack_and_inspect_say_the_same(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--size", "4x6", "--resize", "stretch", "--bgr", "--val-split", "0.3", "--seed", "1"]
    packed = _result(capsys, "pack", "--data", source, "--out", tmp_path / "out", *flags)
    seen = _result(capsys, "inspect", tmp_path / "out")
    assert seen.pop("verified") and (packed.pop("notes"), packed.pop("skipped"))[1] == []
    assert (packed.pop("action"), seen.pop("action")) == ("pack", "inspect") and packed == seen
    assert seen["shape"] == [3, 4, 6] and seen["classes"] == ["ant", "bee"] and seen["planes"] == "BGR"
    assert seen["splits"]["test"]["counts"] == [3, 3] and seen["splits"]["train"]["samples"] == 14
    assert load_file(seen["splits"]["train"]["path"])["x"].shape == (14, 3, 4, 6)


def test_people_get_tables(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "ant" / "000.png").write_bytes(b"broken")
    assert main(["data", "pack", "--data", str(source), "--out", str(tmp_path / "out"), "--skip-bad"]) == 0
    text = capsys.readouterr().out
    assert "1 bad samples are left out" in text and "ant/000.png cannot be decoded" in text
    assert "4 of 20 samples are held out" in text and "SHA-256" in text and "mean" in text
    (source / "ant" / "000.png").write_bytes(df.png(X[0]))
    assert main(["data", "inspect", str(source)]) == 0
    assert "image folder my photos (not packed), first sample of 3x8x8" in capsys.readouterr().out


def test_inspect_of_a_source_that_is_not_packed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _result(capsys, "inspect", source)
    assert found["format"] == "image-folder" and found["first_shape"] == [3, 8, 8]
    assert found["splits"] == {"train": {"samples": 16, "counts": [8, 8]}, "test": {"samples": 4, "counts": [2, 2]}}
    (tmp_path / "a.txt").write_text("to be or not to be " * 99)
    assert _result(capsys, "inspect", tmp_path / "a.txt")["kind"] == "text"
    assert main(["data", "inspect", str(tmp_path / "a.txt")]) == 0
    assert "7 characters: ' benort'" in capsys.readouterr().out


_MISUSE: list[tuple[int, list[str], str]] = [
    (2, ["pack", "--data", "{source}"], "needs --out"),
    (2, ["pack", "--out", "{out}"], "--data"),
    (2, ["pack", "--data", "{source}", "--out", "{source}"], "there already"),
    (2, ["pack", "--data", "{source}", "--out", "{out}", "--size", "0x4"], "from 1x1"),
    (2, ["pack", "--data", "{source}", "--out", "{out}", "--size", "big"], "32x32"),
    (2, ["pack", "--data", "{source}", "--out", "{out}", "--val-split", "1"], "below 1"),
    (2, ["pack", "--data", "{source}", "--out", "{out}", "--bgr", "--gray"], "one of them"),
    (2, ["pack", "--data", "{source}", "--out", "{out}", "--mean", "0.5,0.5,0.5"], "belong together"),
    (2, ["pack", "--data", "{source}", "--out", "{out}", "--mean", "a", "--std", "1"], "list of numbers"),
    (2, ["fetch", "imagenet", "--out", "{out}"], "invalid choice"),
    (2, ["fetch", "cifar10"], "needs --out"),
    (23, ["pack", "--data", "{out}/nothing", "--out", "{out}"], "is not there"),
    (23, ["inspect", "{out}/nothing"], "is not there"),
]


@pytest.mark.parametrize(("code", "words", "message"), _MISUSE)
def test_misuse_is_one_line_and_its_code(
    code: int, words: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [word.format(source=source, out=tmp_path / "out") for word in words]
    assert main(["data", *filled]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_damaged_packed_folder_is_14(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _result(capsys, "pack", "--data", source, "--out", tmp_path / "out")
    file = tmp_path / "out" / "test.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "test.safetensors is damaged" in _result(capsys, "inspect", tmp_path / "out", code=14)["message"]


def test_fetch_tells_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(verb._FETCHED) == set(fetching.ARCHIVES)
    monkeypatch.setattr(fetching, "fetch", lambda archives, out, report: sum(item.bytes for item in archives))
    assert main(["data", "fetch", "cifar10", "--out", str(tmp_path)]) == 0
    assert f"--data {tmp_path}" in capsys.readouterr().out
    assert _result(capsys, "fetch", "fashion-mnist", "--out", tmp_path)["received_bytes"] == 30878645
