"""Pictures → an image tower's pixels: bit for bit open_clip's on ordinary photographs, a person's view on awkward ones.

Ordinary photographs (RGB, grey, CMYK) take exactly the steps of open_clip's transform: Pillow resizes in the
picture's own mode, crops, converts to RGB; numpy normalises in float32. Where that pipeline gives what nobody expects,
the picture is made ordinary first: orientation applied, transparency put on white, 16 bits scaled to 8, palettes turned
into colours. Damaged, hostile or undecodable files are refused, before memory is spent on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from clip_deploy.errors import ConfigError, InputError
from clip_deploy.inputs.opening import LIMITS, ImageLimits, ImageSource, name, opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from clip_deploy.spec import Preprocess

__all__ = [
    "DECODES",
    "FAST_MARGIN",
    "FAST_TOLERANCE",
    "LIMITS",
    "ImageLimits",
    "ImageSource",
    "load",
    "normalised",
    "to_pixels",
]

# What needs several copies of the pixels is done in strips of about so many.
_STRIP_PIXELS = 2**20

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

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
        picture = opened(source, limits)
        if least is not None and picture.format == "JPEG" and picture is not source:
            scale = max(least / min(picture.size), 1 / 8)
            picture.draft(None, (round(picture.width * scale), round(picture.height * scale)))
        picture.load()
        return _ordinary(_upright(picture))
    except InputError:
        raise
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error …
        raise InputError(
            f"{name(source)} is damaged: {str(error) or type(error).__name__}",
            remedy="send the whole, undamaged file",
        ) from error


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
        return _on_white(picture)
    if picture.mode in ("RGB", "L", "CMYK"):
        return picture
    if picture.mode == "F" or picture.mode.startswith("I"):
        return _eight_bits(picture)
    return picture.convert("RGB")


def _strips(size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The first row and the one after the last of each strip."""
    width, height = size
    rows = max(1, _STRIP_PIXELS // width)
    return ((top, min(top + rows, height)) for top in range(0, height, rows))


def _on_white(picture: Image.Image) -> Image.Image:
    page = Image.new("RGB", picture.size)
    for top, bottom in _strips(picture.size):
        strip = picture.crop((0, top, picture.width, bottom)).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        page.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return page


def _eight_bits(picture: Image.Image) -> Image.Image:
    """16-bit and floating-point grey → mode L. The full range of the type counts as white; nothing is stretched."""
    values = np.asarray(picture)
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
    grey = np.empty(values.shape, np.uint8)
    for top, bottom in _strips(picture.size):
        grey[top:bottom] = np.round(values[top:bottom].astype(np.float64) * (255.0 / white))
    return Image.fromarray(grey)


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
