"""Image files and arrays as people have them -> planes of one size, uint8 [C,H,W].

Colour: gray, palette, CMYK and 16-bit files become RGB (one plane with `gray`); transparent pixels are laid over white.
A photo's EXIF orientation is applied. Size: `crop` scales until the frame is covered and takes the middle, `pad` scales
until the image fits and fills up with black, `stretch` ignores the proportions. Bilinear with antialiasing, in
Pillow's integer arithmetic: the same bytes on every machine.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cross.errors import DataError, UsageError
from host_control.data.data_set import BadSampleError, Bytes, PackOptions
from host_control.data.packed import PackedDataSet

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What Pillow may try: decoders that start other programs (EPS) are not among them."""

MAX_SIDE = 16384


def is_image(name: str) -> bool:
    """By its suffix."""
    return Path(name).suffix.lower() in SUFFIXES


def prepare(sample: bytes | Bytes, options: PackOptions, name: str) -> Bytes:
    """One sample as it is stored, uint8 [C,H,W], tokens as they are. BadSampleError where it cannot be decoded."""
    if isinstance(sample, bytes):
        image = _decoded(sample, options, name)
    else:
        if sample.ndim == 1 or _is_stored_form(sample, options):
            return sample
        image = Image.fromarray(sample[0] if len(sample) == 1 else np.ascontiguousarray(sample.transpose(1, 2, 0)))
    image = image.convert("L") if options.gray else image
    if options.size is not None:
        image = resized(image, options.size, options.resize)
    pixels = np.asarray(image)
    planes = pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    if options.bgr:
        if len(planes) != 3:
            raise UsageError(f"--bgr orders three planes, and {name} has {len(planes)}. Leave it out.")
        planes = planes[::-1]
    return np.ascontiguousarray(planes)


def decode_images(paths: Sequence[Path], form: PackOptions | PackedDataSet) -> Bytes:
    """Image files -> uint8 [N,C,H,W], prepared as `form` says, or as the samples of a packed data set were.

    DataError names a file that cannot be decoded, or the first of another size where `form` gives none.
    """
    options = form.options if isinstance(form, PackedDataSet) else form
    images: list[Bytes] = []
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is not a file. Give image files.")
        try:
            images.append(prepare(path.read_bytes(), options, str(path)))
        except BadSampleError as error:
            # Its remedy is that of a data set; here every image was asked for by name.
            raise DataError(f"{str(error).partition('. Repair')[0]}. Repair it, or leave it out.") from error
        require_same_shape(images[-1], images[0].shape, str(path))
    if not images:
        raise DataError("no image was given. Name at least one file.")
    return np.stack(images)


def require_same_shape(planes: Bytes, shape: tuple[int, ...], name: str) -> None:
    """DataError where a sample is of another shape (C,H,W) than those before it."""
    if planes.shape != shape:
        raise DataError(
            f"{name} is {_shape(planes.shape)}, the images before it are {_shape(shape)}. "
            "Give one size for all, such as --size 32x32."
        )


def resized(image: Image.Image, size: tuple[int, int], how: str) -> Image.Image:
    """The image at (H, W) `size`; `how` is crop, pad or stretch."""
    height, width = size
    if image.size == (width, height):
        return image
    if how == "stretch":
        return image.resize((width, height), Image.Resampling.BILINEAR)
    fit = ImageOps.fit if how == "crop" else ImageOps.pad
    return fit(image, (width, height), Image.Resampling.BILINEAR)


def _shape(shape: tuple[int, ...]) -> str:
    planes, height, width = shape
    return f"{height}x{width}" + (" gray" if planes == 1 else "")


def _is_stored_form(planes: Bytes, options: PackOptions) -> bool:
    same_size = options.size is None or options.size == planes.shape[1:]
    return same_size and not options.bgr and not (options.gray and len(planes) == 3)


def _decoded(data: bytes, options: PackOptions, name: str) -> Image.Image:
    """An image file as an RGB image, upright."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of images so large that they may be bombs; other warnings are about metadata only.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                if max(image.size) > MAX_SIDE:
                    raise ValueError(f"{image.width} x {image.height} pixels; sides may have {MAX_SIDE}")
                if options.size is not None:
                    # A JPEG decodes at a half, quarter or eighth many times faster; twice the wanted size loses nothing.
                    image.draft("RGB", (2 * max(options.size), 2 * max(options.size)))
                image.load()
                return as_rgb(ImageOps.exif_transpose(image))
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001  decoders raise whatever a broken file leads them to
        reason = "no image format that is known" if isinstance(error, UnidentifiedImageError) else error
        raise BadSampleError(
            f"{name} cannot be decoded: {reason}. Repair or remove it, or use --skip-bad to leave such images out."
        ) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB: 16-bit samples keep their upper byte, transparent pixels are laid over white."""
    if image.mode.startswith("I"):
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 65535:
            raise ValueError("its samples are not of 16 bits")
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("its samples are floating point")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
