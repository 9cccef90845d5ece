"""loss and accuracy of a trained model on the test split of a data set"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cross.errors import DataError, UsageError
from host_control.console import Console
from host_control.flags import add_board_flags, add_data_flags, add_model_flags, not_negative, positive
from host_control.preparation import build_imported, choose_target, deployed, opened_board, send
from host_control.run_folder import RunFolder, default_folder
from host_control.training.data import describe, packed_data
from host_control.training.inference import DEFAULT_BATCH_SIZE, Evaluator, evaluator_of_run
from host_control.training.model import model_for
from host_control.training.record import Run, read_run

if TYPE_CHECKING:
    from host_control.data import PackedDataSet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", dest="run_folder", type=Path, metavar="DIR", help="a folder that `train` left")
    add_model_flags(parser, required=False)
    add_data_flags(parser)
    add_board_flags(parser)
    parser.add_argument("--batch-size", type=positive, help="samples at a time (default: the run's, at most 16)")
    parser.add_argument("--threads", type=positive, help="threads (default: one a core)")
    parser.add_argument("--seed", type=not_negative, default=0, help="seed of the held-out split (default: 0)")


def run(args: argparse.Namespace) -> int:
    """The test split, or the training split of data that has no other, through the forward program on the board."""
    console = Console(args.json)
    if (args.run_folder is None) == (args.model is None):
        raise UsageError("nothing to evaluate. Give --run DIR, or --model M with --weights F, not both.")
    trained = read_run(args.run_folder) if args.run_folder is not None else None
    if trained is None and args.data is None:
        raise UsageError("nothing to evaluate on. Give --data.")
    out: Path = args.out or (trained.folder if trained else default_folder(args.model, args.board))
    with RunFolder(out) as folder, opened_board(args) as opened:
        board = deployed(opened)
        if trained is not None:
            data = _data_of_run(args, trained, console)
            evaluator = evaluator_of_run(args, trained, board, console)
        else:
            data = packed_data(args, console)
            model = model_for(args, data, console)
            facts = None if args.target is not None else board.facts()
            built, _ = build_imported(
                model, args, choose_target(args.target, args.board, facts), out / "build", console
            )
            send(board, built, console)
            weights, _ = board.send_file(built.folder / "weights.safetensors")
            evaluator = Evaluator(board, weights, args.batch_size or DEFAULT_BATCH_SIZE, args.threads)
        split = data.test or data.train
        result = evaluator.evaluate(board.send_file(split.path)[0])
        fields: dict[str, Any] = {
            "test_accuracy": result["accuracy"],
            "loss": result["loss"],
            "samples": result["samples"],
            "split": "test" if data.test else "train",
            "data": data.source,
            "board": board.name,
            "emulated": board.facts().emulated,
        }
        folder.write_json("eval.json" if trained else "result.json", {"verb": "eval", **fields})
    console.line(
        f"accuracy {fields['test_accuracy']:.2%}, loss {fields['loss']:.4f} on {fields['samples']} {fields['split']} samples"
    )
    console.result("eval", fields)
    return 0


def _data_of_run(args: argparse.Namespace, run: Run, console: Console) -> PackedDataSet:
    """--data as the run's images were prepared, or the run's own data."""
    from host_control.data import PackOptions, open_packed, packed_for

    known = run.options["data"]
    if args.data is None:
        folder = Path(known["folder"])
        if not folder.is_dir():
            raise UsageError(f"the packed data of the run, {folder}, is not there any more. Give --data.")
        data = open_packed(folder)
    else:
        text = known["kind"] == "text"
        options = PackOptions(
            size=None if text else tuple(known["shape"][1:]),
            resize=known["resize"],
            val_split=args.val_split,
            mean=None if text else tuple(known["mean"]),
            std=None if text else tuple(known["std"]),
            bgr=known["planes"] == "BGR",
            gray=known["planes"] == "gray",
            skip_bad=args.skip_bad,
            seed=args.seed,
            **({"window": known["shape"][0]} if text else {}),
        )
        with console.progress("packing the data") as progress:
            data = packed_for(args.data, options, report=progress).data
    if list(data.classes) != run.classes:
        raise DataError(
            f"{data.source} has the classes {', '.join(data.classes[:8])}; the model was trained on "
            f"{', '.join(run.classes[:8])}. Give data of the same classes."
        )
    console.line(describe(data))
    return data
