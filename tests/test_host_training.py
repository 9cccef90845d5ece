"""`train` through the command line, with a program that stands in for the board's: what is sent, shown, left, resumed."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cross.errors import UsageError
from cross.link import write_weights
from cross.load_model import load_model
from cross.zoo import ZOO
from host_control.cli import main
from host_control.training.view import TrainView
from tests.fake_trainer import write_trainer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """40 gray images of 8x8 in two named classes, 8 to test on."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (48, 8, 8), np.uint8)
    y = np.arange(48) % 2
    file = tmp_path / "data.npz"
    np.savez(file, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:], classes=np.array(["cat", "dog"]))
    return file


@pytest.fixture(autouse=True)
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and boards in the test's own folder, and the fake program in place of a build."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASTE_CACHE", str(tmp_path / "cache"))
    use(tmp_path, monkeypatch)


def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    built = write_trainer(tmp_path / "fake", **settings)
    monkeypatch.setattr("host_control.verbs.train.build_imported", lambda *_: (built, None))


def train(capsys: pytest.CaptureFixture[str], *words: object, lines: bool = True) -> tuple[int, list[Any], str]:
    """Exit code, JSON lines (or lines of text) and stderr."""
    fixed = ["train", "--model", "mlp", "--batch-size", "4", "--effective-batch", "10", "--steps", "20"]
    code = main([*fixed, *map(str, words), *(["--json"] if lines else [])])
    out, err = capsys.readouterr()
    return code, [json.loads(line) if lines else line for line in out.splitlines()], err


def calls(tmp_path: Path) -> list[list[str]]:
    """The command lines of `train` that the program got."""
    found = [json.loads(line) for file in tmp_path.rglob("*.calls") for line in file.read_text().splitlines()]
    return [words for words in found if words[0] == "train"]


def test_a_run_leaves_weights_result_and_records(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code, lines, err = train(capsys, "--data", data, "--out", out)
    assert (code, err) == (0, "")
    kinds = [line["event"] for line in lines]
    assert kinds.count("step") == 20 and kinds.count("eval") == 2 and kinds[-1] == "result"
    plan = next(line for line in lines if line["event"] == "schedule")
    assert plan["micro_batches"] == [4, 4, 2] and plan["planned_bytes"] == 3 << 20
    result = lines[-1]
    expected = {"verb": "train", "test_accuracy": 0.75, "loss": 0.05, "epochs": 2.0, "batch_size": 4}
    assert expected.items() <= result.items() and result["effective_batch"] == 10 and result["classes"] == 2
    assert json.loads((out / "result.json").read_text())["sha256"] == result["sha256"]
    names = {path.name for path in out.iterdir()}
    assert {"weights.safetensors", "metrics.jsonl", "metrics.csv", "curves.png", "options.json"} <= names
    assert not [name for name in names if name.endswith(".part")]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    assert len(table) == 22 and (table[0]["temperature_c"], table[0]["rss_bytes"]) == ("61.5", str(3 << 20))
    options = json.loads((out / "options.json").read_text())
    assert options["data"]["classes"] == ["cat", "dog"] and options["data"]["shape"] == [1, 8, 8]
    assert options["batch_size_from"] == "flag" and options["options"]["lr"] > 0
    (words,) = calls(tmp_path)
    assert "--resume" not in words and "--weights" not in words, "a fresh zoo model is seeded on the board"
    sent = Path(words[words.index("--samples") + 1])
    assert sent.name == "train.safetensors" and sent.is_file()
    assert not list((tmp_path / "build" / "boards" / "local" / "runs").iterdir()), "what was fetched does not stay"


def test_output_for_people(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = train(capsys, "--data", data, "--out", tmp_path / "run", lines=False)
    text = "\n".join(lines)
    assert code == 0
    assert "40 samples of 1x8x8 to train on, 8 to test on; 2 classes (cat, dog)" in text
    assert "effective batch 10 = 2 x 4 + 2 micro-batches" in text and "memory: 3.0 MiB planned" in text
    assert "epoch 0.10 of 5, loss 1.0000, accuracy 50.0%, 50.0 samples/s, 4 s left, lr 0.1, 62 C, 3.0 MiB" in text
    assert "epoch 1: test loss 0.5000, accuracy 75.0% of 4" in text
    assert "test accuracy 75.00%" in text and "export --run" in text


def test_ctrl_c_saves_on_the_board_and_the_same_command_goes_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, pause=0.05)
    out, show = tmp_path / "run", TrainView.show

    def interrupted(self: TrainView, event: Mapping[str, Any]) -> None:
        show(self, event)
        if event.get("step") == 5 and event["event"] == "step":
            monkeypatch.setattr(TrainView, "show", show)
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainView, "show", interrupted)
    code, lines, err = train(capsys, "--data", data, "--out", out)
    assert code == 130 and "has saved where it was" in err and f"--out {out} --resume" in err
    assert [line for line in lines if line["event"] == "checkpoint"]
    assert not (out / "weights.safetensors").exists()
    code, _, err = train(capsys, "--data", data, "--out", out, "--resume", "--batch-size", "11")
    assert code == 2 and "smaller than --batch-size 11" in err
    code, lines, err = train(capsys, "--data", data, "--out", out, "--resume", "--batch-size", "5")
    assert (code, err) == (0, "")
    assert lines[-1]["batch_size"] == 5 and calls(tmp_path)[-1][-1] == "--resume"
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps == list(range(1, 21))
    code, _, err = train(capsys, "--data", data, "--out", out, "--resume")
    assert code == 2 and "is finished" in err


def test_a_program_that_the_board_kills_can_go_on(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = train(capsys, "--data", data, "--lr", "97", "--out", "run")
    assert code == 10 and "exit 137" in err and "same command and --out run --resume" in err and err.count("\n") == 1


def test_the_newest_unfinished_run_of_the_same_flags_goes_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = train(capsys, "--data", data, "--lr", "99")
    assert code == 15 and err == "error: step 2: loss is not finite. Lower the learning rate.\n"
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "train.json").read_text())["complete"] is False
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    code, _, err = train(capsys, "--data", data, "--lr", "99", "--resume")
    assert code == 15 and len(list((tmp_path / "runs").iterdir())) == 1
    # No checkpoint was there: the second attempt began anew, and so does its record.
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    code, _, err = train(capsys, "--data", data, "--lr", "98", "--resume")
    assert code == 2 and "no unfinished run with these flags" in err
    code, _, err = train(capsys, "--data", data, "--lr", "98", "--out", folder)
    assert code == 2 and "was begun with --lr 99.0, now it is --lr 98.0" in err


def test_other_data_than_the_run_began_with_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(capsys, "--data", data, "--lr", "99", "--out", tmp_path / "run")[0] == 15
    with np.load(data) as stored:
        arrays = dict(stored)
    arrays["x_train"][0, 0, 0] ^= 1
    np.savez(data, **arrays)
    code, _, err = train(capsys, "--data", data, "--lr", "99", "--out", tmp_path / "run")
    assert code == 13 and "the data is not what the run was begun with" in err


def test_weights_that_arrive_changed_are_not_kept(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, honest=False)
    code, _, err = train(capsys, "--data", data, "--out", tmp_path / "run")
    assert code == 14 and "the board says 0000000000000000" in err
    assert not [path for path in (tmp_path / "run").iterdir() if "weights" in path.name]


def test_dry_run(data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, lines, _ = train(capsys, "--data", data, "--dry-run")
    assert code == 0 and lines[-1]["updates"] == 20 and not (tmp_path / "runs").exists()
    rows = lines[-1]["schedule"]
    assert [(row["epoch"], row["updates"], row["batch_size"], row["effective_batch"]) for row in rows] == [
        (epoch, 4, 4, 10) for epoch in range(5)
    ]
    code, lines, _ = train(capsys, "--data", data, "--dry-run", "--batch-size", "auto")
    assert code == 0 and lines[-1]["schedule"] == [row | {"batch_size": None} for row in rows]
    code, text, _ = train(capsys, "--data", data, "--dry-run", "--batch-size", "auto", lines=False)
    assert code == 0 and "effective batch 10" in text and not [line for line in text if "micro" in line]
    assert ["0", "10", "auto", "4"] in [line.split()[:4] for line in text]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--classes", "3"), 2, "--classes 3, but .* has 2: cat, dog. Leave --classes out"),
        (("--effective-batch", "3"), 2, "smaller than --batch-size 4"),
        (("--effective-batch", "41"), 2, "more than the 40 training samples"),
        (("--lr", "-1"), 2, "-1 is not above zero"),
        (("--lr", "nan"), 2, "not a finite number"),
        (("--lr", "1e30"), 2, "1e30 is too large"),
        (("--warmup", "1.5"), 2, "not a share from 0 to below 1"),
        (("--batch-size", "many"), 2, "not a whole number"),
        (("--board", "recorded:none.json"), 2, "no recorded table"),
        (("--input-shape", "1,9,9,9"), 2, "the model takes samples of 1x9x9x9, .* is packed as 1x8x8"),
        (("--resume", "--out", "empty"), 2, "holds no run to go on with"),
        (("--model", "nomodel"), 2, "no model 'nomodel'"),
        (("--loss", "mse"), 2, "--loss mse needs targets like the output, and .* has labels"),
        (("--seed", str(2**70)), 2, "is above 2147483647"),
    ],
)
def test_bad_flags_are_one_line(
    words: tuple[str, ...], code: int, message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    got, _, err = train(capsys, "--data", data, *words, lines=False)
    assert got == code and re.search(message, err) and err.count("\n") == 1, err


def test_a_mistake_in_the_flags_leaves_no_run_behind(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("no parameter matches 'nothing'. Correct it.")

    mistakes = (("--batch-size", "16"), ("--effective-batch", "400"), ("--nesterov", "--optimizer", "adam"))
    for words in mistakes:
        assert train(capsys, "--data", data, "--out", "run", *words)[0] == 2
        assert not (tmp_path / "run").exists(), words
    with monkeypatch.context() as patch:
        patch.setattr("host_control.verbs.train.build_imported", refuse)
        assert train(capsys, "--data", data, "--out", "run", "--trainable", "nothing")[0] == 2
    assert train(capsys, "--data", data, "--out", "run")[0] == 0


def test_flags_that_a_packed_folder_cannot_follow_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "pack", "--data", str(data), "--out", "packed"]) == 0
    capsys.readouterr()
    for words in (["--size", "4x4"], ["--mean", "0.5", "--std", "0.5"], ["--bgr"]):
        code, _, err = train(capsys, "--data", "packed", *words)
        assert code == 2 and f"Leave {words[0]}" in err, err
    assert train(capsys, "--data", "packed", "--size", "8x8", "--gray")[0] == 0


def test_fewer_samples_than_are_looked_at_train_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "few.npz", x=np.arange(8 * 64, dtype=np.uint8).reshape(8, 8, 8), y=np.arange(8) % 2)
    code, lines, err = train(capsys, "--data", tmp_path / "few.npz", "--effective-batch", "4", "--out", "run")
    assert (code, err) == (0, "") and lines[-1]["effective_batch"] == 4


def test_a_file_of_two_outputs_asks_which_before_anything_is_packed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = ZOO["mlp"].build((1, 8, 8), 2)
    proto.graph.output.add().name = proto.graph.node[0].output[0]
    (tmp_path / "two.onnx").write_bytes(proto.SerializeToString())
    code, _, err = train(capsys, "--data", data, "--model", "two.onnx")
    assert code == 2 and "Choose one with --output" in err and err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_images_of_other_planes_than_a_file_takes_are_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("colour.onnx").write_bytes(ZOO["resnet8"].build((3, 8, 8), 2).SerializeToString())
    code, _, err = train(capsys, "--model", "colour.onnx", "--data", data)
    assert code == 2 and "takes samples of 3x8x8" in err and "packed as 1x8x8. Save images of 3 planes" in err
    assert err.count("\n") == 1


def test_bad_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = train(capsys, "--data", tmp_path / "empty", lines=False)
    assert code == 23 and "is empty" in err and err.count("\n") == 1
    np.savez(tmp_path / "one.npz", x=np.zeros((5, 8, 8), np.uint8), y=np.zeros(5, int))
    code, _, err = train(capsys, "--data", tmp_path / "one.npz", lines=False)
    assert code == 23 and "one class" in err
    code, _, err = train(capsys, "--data", tmp_path / "none", lines=False)
    assert code == 23 and "is not there" in err


def test_data_larger_than_the_boards_disk_is_said_before_it_is_sent(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_control.deploy._free_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr("host_control.verbs.train.send", lambda *_: None)
    monkeypatch.setattr("host_control.boards.deployed.DeployedBoard.info", lambda *_: {"planned_bytes": 1})
    code, _, err = train(capsys, "--data", data, "--out", tmp_path / "run")
    assert code == 11 and "1.0 MiB free" in err and "train.safetensors needs 1.0 MiB" in err


def finished_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert train(capsys, "--data", data, "--out", tmp_path / "run")[0] == 0
    return tmp_path / "run"


def test_what_eval_predict_and_export_cannot_do_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(data, tmp_path, capsys)
    (tmp_path / "no.jpg").write_bytes(b"\xff\xd8\xff not an image")
    (tmp_path / "bare").mkdir()
    others, own = tmp_path / "others.npz", tmp_path / "own.safetensors"
    write_weights(load_model("mlp"), own)
    rng = np.random.default_rng(1)
    np.savez(others, x=rng.integers(0, 256, (20, 8, 8), np.uint8), y=np.arange(20) % 2, classes=np.array(["a", "b"]))
    for words, code, message in (
        (["eval"], 2, "Give --run DIR, or --model M"),
        (["eval", "--run", run, "--model", "mlp"], 2, "not both"),
        (["eval", "--model", "mlp"], 2, "Give --data"),
        (["eval", "--run", run, "--data", others], 23, "has the classes a, b; the model was trained on cat, dog"),
        (["eval", "--run", run, "--board", f"recorded:{tmp_path}/none.json"], 2, "no recorded table"),
        (["predict", "--run", run, tmp_path / "no.jpg"], 23, "Repair it, or leave it out."),
        (["predict", "--run", run, tmp_path / "none.jpg"], 23, "is not a file"),
        (["predict", "--run", tmp_path / "bare", "x.jpg"], 2, "is no training run"),
        (["export", "--onnx", "x.onnx"], 2, "Give --run DIR, or --weights FILE"),
        (["export", "--weights", run / "weights.safetensors", "--onnx", "x.onnx"], 2, "Give --model M"),
        (["export", "--run", run], 2, "one of the arguments --onnx --safetensors is required"),
        (["export", "--model", "mlp", "--weights", own, "--onnx", run], 2, "is a folder. Name a file"),
        (["export", "--model", "mlp", "--weights", own, "--safetensors", run], 2, "is a folder. Name a file"),
        (["export", "--model", "mlp", "--weights", own, "--safetensors", "/proc/x"], 12, "No such file"),
        (["export", "--model", "mlp", "--weights", own, "--safetensors", "/dev/null"], 2, "not a regular file"),
        (["export", "--run", run, "--onnx", "x.onnx"], 13, "does not fit mlp: missing"),
    ):
        got = main([*map(str, words)])
        out, err = capsys.readouterr()
        assert got == code and message in err and err.count("\n") == 1, (words, err)
    assert not (tmp_path / "x.onnx").exists()
    (run / "weights.safetensors").unlink()
    assert main(["predict", "--run", str(run), "x.jpg"]) == 2
    assert "has no weights yet" in capsys.readouterr().err
    (run / "options.json").write_text("{}")
    (run / "weights.safetensors").write_bytes(b"")
    assert main(["export", "--run", str(run), "--onnx", "x.onnx"]) == 14
    assert "was not written by this version" in capsys.readouterr().err


def test_a_model_file_that_changed_is_not_exported_into(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cross.export_model import set_properties
    from tests.onnx_graphs import Sketch

    def own(seed: int) -> Path:
        s = Sketch(["n", 1, 8, 8], seed=seed)
        x = s.node("Gemm", s.node("Flatten", "x", axis=1), s.weight(2, 64), s.weight(2), transB=1)
        proto = s.model(x)
        set_properties(proto, {"mean": [0.5], "std": [0.25]})
        (tmp_path / "own.onnx").write_bytes(proto.SerializeToString())
        return tmp_path / "own.onnx"

    run = tmp_path / "own-run"
    assert train(capsys, "--model", own(0), "--data", data, "--out", run)[0] == 0
    assert "--weights" in calls(tmp_path)[-1], "a file's own weights are sent"
    assert json.loads((run / "options.json").read_text())["data"]["mean"] == [0.5], "of the file's own metadata"
    own(1)
    assert main(["export", "--run", str(run), "--onnx", "x.onnx"]) == 2
    assert "has changed since it was trained" in capsys.readouterr().err


def test_without_a_study_one_is_run_and_the_next_run_finds_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from host_control.board import Counters, OperatingPoint
    from host_control.boards import DeployedBoard

    measured: list[int] = []
    tainted = True

    def measure(self: DeployedBoard, point: OperatingPoint) -> Counters:
        measured.append(point.batch_size)
        speed = 100.0 - abs(point.batch_size - 4)
        return Counters(point.batch_size, speed, 0.001, 1, 1, 1, 1, 1, 0, False, tainted, "heat" if tainted else None)

    monkeypatch.setattr(DeployedBoard, "measure", measure)
    monkeypatch.setattr("host_control.study_loop.time.sleep", lambda _: None)
    words = ("--data", data, "--batch-size", "auto", "--out")
    code, lines, err = train(capsys, *words, tmp_path / "one")
    assert (code, err) == (0, ""), "a busy board trains, and is measured again next time"
    assert lines[-1]["batch_size"] in (2, 4, 6) and max(measured) == 10
    tainted, first = False, len(measured)
    assert train(capsys, *words, tmp_path / "two")[0] == 0 and len(measured) > first
    second = len(measured)
    code, lines, _ = train(capsys, *words, tmp_path / "three")
    assert code == 0 and len(measured) == second
    options = json.loads((tmp_path / "three" / "options.json").read_text())
    assert (
        options["batch_size_from"].startswith("runs/") and options["options"]["batch_size"] == lines[-1]["batch_size"]
    )
    tight = ("--memory", (1 << 20) + 2 * 1000)
    code, lines, _ = train(capsys, *words, tmp_path / "four", *tight)
    assert code == 0 and lines[-1]["batch_size"] == 2, "no more than fits now"
    grows = ("--batch-schedule", "adabatch", "--effective-batch-start", 5, "--effective-batch-cap", 20, "--interval", 1)
    code = main(["train", "--model", "mlp", "--data", str(data), *map(str, grows), "--steps", "20", "--out", "five"])
    text = capsys.readouterr().out
    assert code == 0 and len(measured) == second and "bs_opt of runs/" in text
    found = json.loads(Path("five/options.json").read_text())["options"]
    assert (found["batch_size"], found["effective_batch"], found["adabatch"]["cap"]) == (
        options["options"]["batch_size"],
        5,
        20,
    )
