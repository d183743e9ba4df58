"""Pictures → an image tower's pixels: bit for bit open_clip's on ordinary photographs, a person's view on awkward ones.

Ordinary photographs (RGB, grey, CMYK) take exactly the steps of open_clip's transform: Pillow resizes in the
picture's own mode, crops, converts to RGB; numpy normalises in float32. Where that pipeline gives what nobody expects,
the picture is made ordinary first: orientation applied, transparency put on white, 16 bits scaled to 8, palettes turned
into colours. Damaged, hostile or undecodable files are refused, before memory is spent on them.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Union

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from clip_deploy.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from clip_deploy.spec import Preprocess

# Photographs as people send them. Without a list Pillow also tries formats that start other programs (EPS) or that
# nobody uploads. MPO is not named because Pillow opens it through JPEG, and naming it breaks JPEG afterwards.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "HEIF")

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

ImageSource = Union[str, "os.PathLike[str]", bytes, IO[bytes], Image.Image, "NDArray[np.uint8]"]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a picture may cost. Checked on the file's header, before decoding and before resizing.

    ``max_pixels`` is Pillow's own line between a photograph and a decompression bomb. A strip of ratio 100 becomes
    22,400 pixels long before its centre is cropped; beyond that the crop shows nothing of the picture.
    """

    max_bytes: int = 64 * 1024 * 1024
    max_pixels: int = 89_478_485
    max_aspect_ratio: float = 100.0


LIMITS = ImageLimits()

DECODES = ("exact", "fast")
# A JPEG file holds frequencies, and can be decoded at a half, a quarter or an eighth of its size without the highest.
# Fast decoding leaves so many times the model's own size, at least, on the shorter side: what resizing would average
# away. On photographs that are sharp to the pixel no value then moves by more than FAST_TOLERANCE of 255.
FAST_MARGIN = 2
FAST_TOLERANCE = 12


def to_pixels(
    images: Iterable[ImageSource],
    preprocess: Preprocess,
    limits: ImageLimits = LIMITS,
    decode: str = "exact",
) -> NDArray[Any]:
    """What the model reads, ``[n, 3, height, width]``: normalised float32, or uint8 where the graph normalises.

    Args:
        decode: ``exact``, or ``fast``: large JPEG files are decoded at a fraction of their size; see ``FAST_MARGIN``.

    Raises:
        InputError: a picture is damaged, too large, too long, or not a picture; nothing is returned for the others.
    """
    if decode not in DECODES:
        raise ConfigError(f"decode {decode!r} is unknown", remedy=f"use {' or '.join(DECODES)}")
    least = FAST_MARGIN * max(preprocess.size) if decode == "fast" else None
    rows = [_pixels(_framed(load(image, limits, least), preprocess)) for image in images]
    if not rows:
        return np.empty((0, 3, *preprocess.size), preprocess.pixels)
    if preprocess.pixels == "uint8":
        return np.stack(rows)
    return np.stack([normalised(row, preprocess) for row in rows])


def load(
    source: ImageSource, limits: ImageLimits = LIMITS, least: int | None = None
) -> Image.Image:
    """Decode a picture and make it ordinary: upright, in mode RGB, L or CMYK, with no transparency.

    Args:
        source: a path, the bytes of a file, an open binary file, a Pillow image, or uint8 ``[height, width(, 3)]``.
        limits: what it may cost.
        least: of a JPEG file, so many pixels of its shorter side are enough; None decodes it whole.

    Raises:
        InputError: the picture is damaged, too large, too long, or not a picture.
    """
    try:
        picture = _opened(source, limits)
        _check_size(picture.size, limits)
        if least is not None and picture.format == "JPEG":
            scale = max(least / min(picture.size), 1 / 8)
            picture.draft(None, (round(picture.width * scale), round(picture.height * scale)))
        picture.load()
        return _ordinary(_upright(picture))
    except InputError:
        raise
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error …
        raise InputError(
            f"{_name(source)} is damaged: {str(error) or type(error).__name__}",
            remedy="send the whole, undamaged file",
        ) from error


def _opened(source: ImageSource, limits: ImageLimits) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source)
    data = _bytes(source, limits)
    Image.init()  # AVIF, and HEIF where pillow-heif registered it, are known only afterwards
    try:
        return Image.open(
            io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN]
        )
    except Image.DecompressionBombError as error:
        raise InputError(
            f"{_name(source)} has too many pixels: {error}", remedy=_smaller(limits)
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(
            f"{_name(source)} is not a picture that can be read{_kind(data)}",
            remedy="send a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file",
        ) from error


def _bytes(source: str | os.PathLike[str] | bytes | IO[bytes], limits: ImageLimits) -> bytes:
    """At most one byte more than allowed is read, whatever the file claims to be."""
    if isinstance(source, (str, os.PathLike)):
        try:
            with Path(source).open("rb") as file:
                data = file.read(limits.max_bytes + 1)
        except OSError as error:
            raise InputError(
                f"{_name(source)} cannot be read: {error.strerror}", remedy="check the path"
            ) from error
    elif isinstance(source, bytes):
        data = source
    elif hasattr(source, "read"):
        data = source.read(limits.max_bytes + 1)
    else:
        raise InputError(
            f"an image cannot be a {type(source).__name__}",
            remedy="pass a path, bytes, an open file, a Pillow image or a uint8 array",
        )
    if len(data) > limits.max_bytes:
        raise InputError(
            f"{_name(source)} is larger than {limits.max_bytes // 2**20} MB",
            remedy="send a smaller file",
        )
    return data


def _from_array(array: NDArray[Any]) -> Image.Image:
    grey, colour = array.ndim == 2, array.ndim == 3 and array.shape[2] == 3
    if array.dtype != np.uint8 or not (grey or colour) or 0 in array.shape:
        raise InputError(
            f"an array of {array.dtype} {list(array.shape)} is not a picture",
            remedy="pass uint8 of shape [height, width] or [height, width, 3] in RGB order",
        )
    return Image.fromarray(array)


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if min(size) < 1:
        raise InputError(
            f"a picture of {width} × {height} pixels has nothing in it",
            remedy="send another picture",
        )
    if width * height > limits.max_pixels:
        raise InputError(
            f"a picture of {width} × {height} pixels is too large", remedy=_smaller(limits)
        )
    if max(size) > limits.max_aspect_ratio * min(size):
        raise InputError(
            f"a strip of {width} × {height} pixels: the square that the model sees shows almost nothing of it",
            remedy=f"crop it to a ratio of at most {limits.max_aspect_ratio:g} to 1",
        )


def _upright(picture: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except (
        Exception
    ):  # broken metadata (struct.error, SyntaxError, KeyError …) does not make the pixels wrong
        return picture


def _ordinary(picture: Image.Image) -> Image.Image:
    """The picture in mode RGB, L or CMYK. Those three stay as they are: open_clip resizes them in that mode."""
    if picture.has_transparency_data:
        coloured = picture.convert("RGBA")
        page = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(page, coloured).convert("RGB")
    if picture.mode in ("RGB", "L", "CMYK"):
        return picture
    if picture.mode == "F" or picture.mode.startswith("I"):
        return _eight_bits(picture)
    return picture.convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """16-bit and floating-point grey → mode L. The full range of the type counts as white; nothing is stretched."""
    values = np.asarray(picture).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    is_float = picture.mode == "F"
    white = (
        1.0
        if is_float and high <= 1
        else 255.0
        if high <= 255 and picture.mode in ("I", "F")
        else 65535.0
    )
    if not (low >= 0 and high <= white):  # NaN fails too
        raise InputError(
            f"grey values from {low:g} to {high:g} have no agreed white",
            remedy="convert the picture to 8 or 16 bits per channel",
        )
    return Image.fromarray(np.round(values * (255.0 / white)).astype(np.uint8))


def _framed(picture: Image.Image, preprocess: Preprocess) -> Image.Image:
    """Resized, and cropped or padded, to the model's size: torchvision's and open_clip's arithmetic and rounding."""
    height, width = preprocess.size
    resampling = _RESAMPLING[preprocess.interpolation]
    if preprocess.resize_mode == "squash":
        return _resized(picture, (width, height), resampling)
    if preprocess.resize_mode == "longest":
        ratio = max(picture.height / height, picture.width / width)
        picture = _resized(
            picture, (round(picture.width / ratio), round(picture.height / ratio)), resampling
        )
    elif height == width:
        short, long = sorted(picture.size)
        scaled = int(height * long / short)
        wide = picture.width >= picture.height
        picture = _resized(picture, (scaled, height) if wide else (width, scaled), resampling)
    else:  # open_clip scales a shortest side to a frame that is not square bicubically, whatever the config says
        ratio = min(picture.height / height, picture.width / width)
        size = (round(picture.width / ratio), round(picture.height / ratio))
        picture = _resized(picture, size, Image.Resampling.BICUBIC)
    return _centred(
        picture,
        (width, height),
        preprocess.fill_color if preprocess.resize_mode == "longest" else 0,
    )


def _resized(
    picture: Image.Image, size: tuple[int, int], resampling: Image.Resampling
) -> Image.Image:
    size = (max(size[0], 1), max(size[1], 1))
    return picture if picture.size == size else picture.resize(size, resampling)


def _centred(picture: Image.Image, size: tuple[int, int], fill: int) -> Image.Image:
    """Padded where too small, then the centre cropped; offsets round half to even, as torchvision's do."""
    width, height = size
    across, down = max(width - picture.width, 0), max(height - picture.height, 0)
    if across or down:
        border = (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2)
        picture = ImageOps.expand(
            picture, border, fill=fill if picture.mode == "L" else (fill,) * len(picture.getbands())
        )
    left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
    return picture.crop((left, top, left + width, top + height))


def _pixels(picture: Image.Image) -> NDArray[np.uint8]:
    """uint8 ``[3, height, width]``."""
    return np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))


def normalised(pixels: NDArray[np.uint8], preprocess: Preprocess) -> NDArray[np.float32]:
    """uint8 ``[3, height, width]`` → float32 of the same shape: scaled to 0..1, mean taken off, divided by std."""
    values = pixels.astype(np.float32) / np.float32(255)
    mean, std = (
        np.asarray(v, np.float32).reshape(3, 1, 1) for v in (preprocess.mean, preprocess.std)
    )
    return np.asarray((values - mean) / std)


def _name(source: object) -> str:
    return str(source) if isinstance(source, (str, os.PathLike)) else "the image"


def _smaller(limits: ImageLimits) -> str:
    return f"send at most {limits.max_pixels // 1_000_000} megapixels: the model sees a small square of it anyway"


def _kind(data: bytes) -> str:
    """What a file that is no picture seems to be, for the message."""
    if not data:
        return ": it is empty"
    head = data[:64].lstrip().lower()
    signs = {
        b"%pdf": "a PDF",
        b"<!doc": "an HTML page",
        b"<html": "an HTML page",
        b"<svg": "an SVG drawing",
        b"<?xml": "XML",
    }
    if b"ftyphei" in head or b"ftypmif" in head:
        return ": it is HEIC, which needs pillow-heif (pip install pillow-heif, then register_heif_opener())"
    return next((f": it is {kind}" for sign, kind in signs.items() if head.startswith(sign)), "")
