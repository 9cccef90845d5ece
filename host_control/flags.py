"""Flags that several verbs share, declared once: the same word means the same thing everywhere (docs/interface.md)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host_control.data import PackOptions


_LARGEST_WHOLE = 2**31 - 1
"""Of counts and seeds: the program on the board keeps them in 32 bits."""


def positive(text: str) -> int:
    """A whole number from 1 up."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0 up."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def seconds(text: str) -> float:
    """A time above zero: '90', '90s', '20m', '1.5h'."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        value = float(number) * units[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 20m or 1.5h") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a time above zero")
    return value


def byte_count(text: str) -> int:
    """Bytes: '536870912', '512M', '1.5G' (powers of 1024; a trailing B or iB is allowed)."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = word[-1:] if word[-1:] in "KMG" else ""
    try:
        value = int(float(word.removesuffix(unit) if unit else word) * units[unit])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 536870912, 512M or 1.5G") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size above zero")
    return value


def input_shape(text: str) -> tuple[int, ...]:
    """C,H,W of one sample, or C,H or C."""
    try:
        shape = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 3,32,32") from None
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape of sizes from 1 up")
    return shape


def image_size(text: str) -> tuple[int, int]:
    """(H, W): '224x224', or '224' for both."""
    try:
        height, _, width = text.lower().partition("x")
        size = (int(height), int(width or height))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 32x32") from None
    if not all(1 <= side <= 4096 for side in size):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 1x1 to 4096x4096")
    return size


def share(text: str) -> float:
    """A fraction from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 0.2") from None
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to below 1")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.5,0.5,0.5") from None


def megahertz(text: str) -> int:
    """MHz, as kHz."""
    try:
        khz = round(float(text) * 1000)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a frequency in MHz such as 1500") from None
    if not 0 < khz < 10**8:
        raise argparse.ArgumentTypeError(f"{text} is not a frequency in MHz such as 1500")
    return khz


def core_list(text: str) -> tuple[int, ...]:
    """CPU numbers: '0,1' or '0-3'."""
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of cores such as 0,1 or 0-3") from None
    if not cores or len(set(cores)) != len(cores):
        raise argparse.ArgumentTypeError(f"{text!r} names no core, or one twice")
    return tuple(cores)


def batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes separated by commas, each from 1 up."""
    return tuple(positive(word) for word in text.split(","))


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value > _LARGEST_WHOLE:
        raise argparse.ArgumentTypeError(f"{text} is above {_LARGEST_WHOLE}")
    return value


def add_model_flags(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """What to build: the model and everything that changes its binary."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", required=required, help="ONNX file, or a zoo name such as resnet18")
    group.add_argument(
        "--weights",
        type=Path,
        help="weights to start from: safetensors, npz or a PyTorch state dict (default: the model's own)",
    )
    group.add_argument("--classes", type=positive, help="outputs (default: the model's, 10 for a zoo model)")
    group.add_argument("--input-shape", type=input_shape, metavar="C,H,W", help="shape of one sample")
    group.add_argument("--input", metavar="NAME", help="which input to feed, where an ONNX file has several")
    group.add_argument("--output", metavar="NAME", help="which output to train on, where an ONNX file has several")
    group.add_argument(
        "--init", choices=("file", "seeded"), default="file", help="keep the file's weights, or seed new ones"
    )
    group.add_argument(
        "--loss",
        choices=("cross_entropy", "mse"),
        default="cross_entropy",
        help="softmax cross-entropy on class labels, or mean squared error on targets like the output",
    )
    group.add_argument(
        "--trainable",
        metavar="WHAT",
        default="all",
        help="what to train: all, head, last:K (blocks), norms, or a regular expression over names; "
        "the rest is frozen (default: all)",
    )
    group.add_argument(
        "--bn-policy",
        choices=("per-micro-batch", "frozen"),
        default="per-micro-batch",
        help="statistics of batch norms in training: of each micro-batch, or the running ones",
    )
    group.add_argument(
        "--lean", action="store_true", help="kernels that take the least memory, and the fastest of those"
    )
    group.add_argument(
        "--recompute",
        choices=("none", "cheap", "blocks"),
        default="cheap",
        help="what backward makes again instead of keeping: nothing; what is cheap (default); outputs of blocks too",
    )
    group.add_argument(
        "--unfold-bn",
        action=argparse.BooleanOptionalAction,
        help="put batch norms back where an exporter folded them (default: train does, other verbs do not)",
    )
    group.add_argument("--target", metavar="NAME", help="CPU to build for (default: probed from the board)")


def add_built_flags(parser: argparse.ArgumentParser) -> None:
    """A model to build, or what was built before."""
    add_model_flags(parser, required=False)
    parser.add_argument("--build", type=Path, metavar="DIR", help="a folder that `build` left, instead of --model")


def add_board_flags(parser: argparse.ArgumentParser) -> None:
    """Where to run, and how to get there."""
    group = parser.add_argument_group("board")
    group.add_argument(
        "--board",
        default="local",
        help="local, an SSH host or alias, an emulated board that is up, emulated:TARGET, or recorded:FILE.json "
        "(default: local)",
    )
    group.add_argument("--remote-dir", metavar="DIR", help="folder on the board (default: ~/.local/share/taste-edge)")
    group.add_argument("--accept-new", action="store_true", help="record the host key of a host that is not known yet")


def add_board_run_flags(parser: argparse.ArgumentParser) -> None:
    """Which run, on which board."""
    parser.add_argument(
        "name", nargs="?", metavar="RUN", help="a run that `status` lists (default: the one that is under way)"
    )
    add_board_flags(parser)


def add_data_flags(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """The data set and how its images are prepared; `pack_options` reads them."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=required,
        metavar="SOURCE",
        help="folder, zip or file of a data set, packed or not, or fashion-mnist",
    )
    group.add_argument("--size", type=image_size, metavar="HxW", help="size of all images (default: as they are)")
    group.add_argument(
        "--resize",
        choices=("crop", "pad", "stretch"),
        default="crop",
        help="how: fill and cut, fit and pad, or ignore proportions",
    )
    group.add_argument(
        "--val-split",
        type=share,
        metavar="SHARE",
        help="held out for testing where the source has no such split (default: 0.2; of text 0.1, from its end)",
    )
    group.add_argument("--mean", type=numbers, metavar="M,M,M", help="of x/255, a plane each (default: training split)")
    group.add_argument("--std", type=numbers, metavar="S,S,S", help="of x/255, a plane each (default: training split)")
    group.add_argument("--bgr", action="store_true", help="planes in the order blue, green, red")
    group.add_argument("--gray", action="store_true", help="one plane")
    group.add_argument(
        "--skip-bad", action="store_true", help="leave out images that cannot be decoded, and count them"
    )
    group.add_argument(
        "--domain", metavar="REGEX", help="its one group is the domain in a sample's name: '_([a-z]+)_' (CSV: a column)"
    )
    group.add_argument(
        "--window", type=positive, default=64, metavar="T", help="characters of one sample of a text (default: 64)"
    )


def pack_options(args: argparse.Namespace) -> PackOptions:
    """What the flags of `add_data_flags` and --seed ask for."""
    from host_control.data import PackOptions

    names = "size resize val_split mean std bgr gray skip_bad seed window domain".split()
    return PackOptions(**{name: getattr(args, name) for name in names})


def add_running_flags(
    parser: argparse.ArgumentParser, measuring: bool = True, seconds_default: float = 2.0, frequency: bool = False
) -> None:
    """How a step runs on the board; `measuring` adds what only a measurement needs, `frequency` the CPU's."""
    group = parser.add_argument_group("running")
    group.add_argument("--threads", type=positive, help="threads (default: one a core)")
    group.add_argument("--cores", type=core_list, help="cores to run on, such as 0,1 or 0-3 (default: all)")
    if frequency:
        group.add_argument(
            "--frequency", type=megahertz, metavar="MHZ", help="of the CPU, put back at the end (default: unchanged)"
        )
    group.add_argument("--memory", type=byte_count, metavar="BYTES", help="most the program may use, such as 512M")
    group.add_argument("--seed", type=not_negative, default=0, help="seed of weights, data and search (default: 0)")
    if measuring:
        group.add_argument(
            "--seconds",
            type=seconds,
            default=seconds_default,
            help=f"shortest measurement of one size (default: {seconds_default:g})",
        )


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every verb."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the run (default: runs/<time>-<model>-<board>)"
    )
    group.add_argument("--json", action="store_true", help="JSON Lines on stdout, the result last")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
