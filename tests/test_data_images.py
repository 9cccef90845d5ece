"""Image files as cameras, scanners and drawing programs leave them become planes of one size; hostile ones do not."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from cross.errors import DataError, UsageError
from host_control.data import PackOptions, decode_images
from host_control.data.data_set import BadSampleError
from host_control.data.images import prepare
from tests import data_files as df

_PLAIN = PackOptions()
_RGB = df.random_images(1, (3, 8, 12))[0]


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _image(planes: df.Pixels = _RGB) -> Image.Image:
    return Image.fromarray(planes.transpose(1, 2, 0).copy())


def test_gray_is_three_equal_planes_and_with_gray_one() -> None:
    gray = df.random_images(1, (1, 5, 7))[0]
    np.testing.assert_array_equal(prepare(df.png(gray), _PLAIN, "a"), np.repeat(gray, 3, axis=0))
    np.testing.assert_array_equal(prepare(df.png(gray), PackOptions(gray=True), "a"), gray)


def test_gray_of_colour_is_its_luma() -> None:
    found = prepare(df.png(_RGB), PackOptions(gray=True), "a")
    wanted = np.tensordot([0.299, 0.587, 0.114], _RGB.astype(float), 1)
    assert found.shape == (1, 8, 12) and np.abs(found[0] - wanted).max() <= 0.5 + 1e-2


def test_bgr_turns_the_planes_of_files_and_arrays_alike() -> None:
    options = PackOptions(bgr=True)
    for sample in (df.png(_RGB), _RGB):
        np.testing.assert_array_equal(prepare(sample, options, "a"), _RGB[::-1])
    with pytest.raises(UsageError, match="has 1"):
        prepare(_RGB[:1], options, "a")


def test_transparent_pixels_lie_over_white() -> None:
    alpha = np.zeros((8, 12), np.uint8)
    alpha[:, 6:] = 255
    sample = _encoded(Image.fromarray(np.dstack([_RGB.transpose(1, 2, 0), alpha])))
    found = prepare(sample, _PLAIN, "a")
    np.testing.assert_array_equal(found[:, :, 6:], _RGB[:, :, 6:])
    assert (found[:, :, :6] == 255).all()


def test_palette_with_a_transparent_colour() -> None:
    image = Image.new("P", (4, 2), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((3, 1), 1)
    found = prepare(_encoded(image, transparency=0), _PLAIN, "a")
    assert found[:, 1, 3].tolist() == [200, 100, 50] and found[:, 0, 0].tolist() == [255, 255, 255]


def test_sixteen_bits_keep_the_upper_byte() -> None:
    deep = np.arange(0, 65536, 321, np.uint16)[:200].reshape(10, 20)
    found = prepare(_encoded(Image.fromarray(deep)), _PLAIN, "a")
    np.testing.assert_array_equal(found, np.repeat((deep >> 8).astype(np.uint8)[None], 3, axis=0))


@pytest.mark.parametrize("inks", [(0, 0, 0, 0), (0, 255, 255, 0), (0, 0, 0, 255)])
def test_cmyk_as_printers_write_it(inks: tuple[int, ...]) -> None:
    found = prepare(_encoded(Image.new("CMYK", (16, 16), inks), "JPEG", quality=95), _PLAIN, "a")
    wanted = [(255 - ink) * (255 - inks[3]) / 255 for ink in inks[:3]]
    assert np.abs(found.reshape(3, -1).mean(axis=1) - wanted).max() < 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_stand_upright(orientation: int) -> None:
    """The eight orientations of EXIF 2.32, tag 274, as numpy turns them."""
    upright = np.zeros((3, 16, 24), np.uint8)
    upright[0, :8, :8] = 255
    upright[1, 8:, :8] = 255
    # What the camera stores, so that its orientation makes it upright.
    stored = {
        1: upright,
        2: upright[:, :, ::-1],
        3: upright[:, ::-1, ::-1],
        4: upright[:, ::-1],
        5: upright.transpose(0, 2, 1),
        6: np.rot90(upright, 1, (1, 2)),
        7: np.rot90(upright.transpose(0, 2, 1), 2, (1, 2)),
        8: np.rot90(upright, -1, (1, 2)),
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    found = prepare(_encoded(_image(stored), exif=exif), _PLAIN, "a")
    np.testing.assert_array_equal(found, upright)


def test_crop_pad_and_stretch() -> None:
    wide = np.zeros((3, 20, 60), np.uint8)
    wide[0, :, 20:40] = 200
    crop = prepare(wide, PackOptions(size=(10, 10)), "a")
    assert crop.shape == (3, 10, 10) and (crop[0] == 200).mean() >= 0.8 and crop[1:].max() == 0
    pad = prepare(wide + np.uint8(5), PackOptions(size=(30, 30), resize="pad"), "a")
    assert (pad[:, :10] == 0).all() and (pad[:, 20:] == 0).all() and (pad[1:, 10:20] == 5).all()
    stretch = prepare(wide, PackOptions(size=(20, 20), resize="stretch"), "a")
    assert np.abs(stretch[0].mean() - wide[0].mean()) < 1 and (stretch[0, :, 8:12] == 200).all()


def test_a_large_jpeg_decoded_at_an_eighth_is_the_same_picture() -> None:
    image = Image.new("RGB", (1600, 1200), (30, 60, 90))
    ImageDraw.Draw(image).ellipse((400, 200, 1200, 1000), fill=(250, 120, 10))
    found = prepare(_encoded(image, "JPEG", quality=95), PackOptions(size=(48, 64)), "a")
    whole = np.asarray(image.resize((64, 48), Image.Resampling.BOX)).transpose(2, 0, 1)
    # Bilinear's wider support and JPEG differ along the edge only.
    assert np.abs(found.astype(int) - whole).mean() < 4


def test_stored_form_is_not_touched() -> None:
    assert prepare(_RGB, PackOptions(size=(8, 12)), "a") is _RGB


def test_decode_images_for_a_prediction(tmp_path: Path) -> None:
    x = df.random_images(3)
    df.write_files(tmp_path, {f"{i}.png": df.png(image) for i, image in enumerate(x)} | {"wide.png": df.png(_RGB)})
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    np.testing.assert_array_equal(decode_images(paths, _PLAIN), x)
    assert decode_images([*paths, tmp_path / "wide.png"], PackOptions(size=(4, 6))).shape == (4, 3, 4, 6)
    with pytest.raises(DataError, match=r"wide.png is 8x12, the images before it are 32x32.*--size"):
        decode_images([*paths, tmp_path / "wide.png"], _PLAIN)
    with pytest.raises(DataError, match="is not a file"):
        decode_images([tmp_path], _PLAIN)


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


_JPEG = _encoded(_image(), "JPEG")
_HOSTILE = {
    "empty": b"",
    "text": b"GIF89a is no picture",
    "JPEG cut": _JPEG[: len(_JPEG) // 2],
    "PNG with a wrong checksum": df.png(_RGB)[:40] + b"\0\0\0" + df.png(_RGB)[43:],
    "bomb of 10^9 pixels": _png_header(40000, 30000),
    "bomb of 10^8 pixels": _png_header(10000, 10000),
    "huge side": _png_header(65000, 1),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
    "float TIFF": _encoded(Image.new("F", (3, 3)), "TIFF"),
}


@pytest.mark.parametrize("case", _HOSTILE)
def test_what_cannot_be_decoded_is_one_bad_sample_with_its_name(case: str) -> None:
    with pytest.raises(BadSampleError, match=r"photo.jpg cannot be decoded: .+--skip-bad") as caught:
        prepare(_HOSTILE[case], _PLAIN, "photo.jpg")
    assert caught.value.exit_code == 23 and "\n" not in str(caught.value)


def test_every_prefix_of_a_file_is_an_image_or_a_bad_sample() -> None:
    for data in (_JPEG, df.png(_RGB), _encoded(_image(), "GIF"), _encoded(_image(), "WEBP", lossless=True)):
        for end in range(0, len(data), max(len(data) // 60, 1)):
            try:
                assert prepare(data[:end], _PLAIN, "a").shape == (3, 8, 12)
            except BadSampleError:
                pass
