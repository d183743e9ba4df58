"""A file, bytes, an array → a Pillow image whose size is known and allowed, before anything is decoded."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Union

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from clip_deploy.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Photographs as people send them. Without a list Pillow also tries formats that start other programs (EPS) or that
# nobody uploads, or that it decodes before anybody could look at the size (ICO). MPO is not named because Pillow opens
# it through JPEG, and naming it breaks JPEG afterwards.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "HEIF")

# A file whose header is a million tiny pieces costs Pillow seconds and a gigabyte before the first pixel: so many reads
# are allowed, and one more for every so many bytes. PNG files cut into pieces of 1 kB stay below.
_READS, _BYTES_PER_READ = 10_000, 256
# A progressive JPEG shows ten scans as a rule; each walks over the whole picture again.
_MOST_SCANS = 200
# Some decoders of Pillow are written in Python (text PPM, run-length BMP): two seconds for so many bytes.
_MOST_SLOW_BYTES = 8 * 2**20
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


def opened(source: ImageSource, limits: ImageLimits) -> Image.Image:
    if isinstance(source, Image.Image):
        _check_size(source.size, limits)
        _check_unread(source, limits)
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source, limits)
    data = _bytes(source, limits)
    pieces = _Pieces(data)
    Image.init()  # AVIF, and HEIF where pillow-heif registered it, are known only afterwards
    try:
        picture = Image.open(pieces, formats=[kind for kind in FORMATS if kind in Image.OPEN])
    except Image.DecompressionBombError as error:
        raise InputError(
            f"{name(source)} has too many pixels: {error}", remedy=_smaller(limits)
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(
            f"{name(source)} is not a picture that can be read{_kind(data)}",
            remedy="send a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file",
        ) from error
    _check_size(picture.size, limits)
    _check_decoding(picture, pieces)
    return picture


def _bytes(source: str | os.PathLike[str] | bytes | IO[bytes], limits: ImageLimits) -> bytes:
    """At most one byte more than allowed is read, whatever the file claims to be."""
    if isinstance(source, (str, os.PathLike)):
        try:
            with Path(source).open("rb") as file:
                data = file.read(limits.max_bytes + 1)
        except OSError as error:
            raise InputError(
                f"{name(source)} cannot be read: {error.strerror}", remedy="check the path"
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
        raise _too_many_bytes(name(source), limits)
    return data


class _Pieces(io.BytesIO):
    """The bytes of a file, which may be read in a bounded number of pieces."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _READS + len(data) // _BYTES_PER_READ

    def allow(self, reads: int) -> None:
        """So many reads more."""
        self._left += reads

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise InputError(
                "the image is made of too many tiny pieces", remedy="save it again as JPEG or PNG"
            )
        return super().read(size)


def _check_decoding(picture: Image.Image, pieces: _Pieces) -> None:
    """Refuse what would take long to decode for its size."""
    size = len(pieces.getbuffer())
    if picture.format in ("JPEG", "MPO"):
        scans = pieces.getvalue().count(b"\xff\xda")  # cannot stand in compressed data
        if scans > _MOST_SCANS:
            raise InputError(f"a JPEG of {scans:,} scans", remedy="save it again as JPEG or PNG")
    if any(tile[0] in Image.DECODERS for tile in getattr(picture, "tile", ())):  # in Python
        if size > _MOST_SLOW_BYTES:
            raise InputError(
                f"a {picture.format} file of this kind may have {_MOST_SLOW_BYTES // 2**20} MB",
                remedy="save it again as JPEG or PNG",
            )
        pieces.allow(size)  # it reads byte by byte


def _check_unread(picture: Image.Image, limits: ImageLimits) -> None:
    """A Pillow image whose file was opened, but not read so far, is held to what files are held to."""
    if not isinstance(picture, ImageFile.ImageFile) or not picture.tile:
        return
    if picture.format not in (*FORMATS, "MPO"):
        raise InputError(
            f"an opened file of the format {picture.format} is not read here: it may start other programs",
            remedy="call its load() first, if you trust it",
        )
    if picture.fp is not None and picture.fp.seekable():
        position = picture.fp.tell()
        size = picture.fp.seek(0, os.SEEK_END)
        picture.fp.seek(position)
        if size > limits.max_bytes:
            raise _too_many_bytes("the image", limits)


def _too_many_bytes(name: str, limits: ImageLimits) -> InputError:
    return InputError(
        f"{name} is larger than {limits.max_bytes // 2**20} MB", remedy="send a smaller file"
    )


def _from_array(array: NDArray[Any], limits: ImageLimits) -> Image.Image:
    grey, colour = array.ndim == 2, array.ndim == 3 and array.shape[2] == 3
    if array.dtype != np.uint8 or not (grey or colour) or 0 in array.shape:
        raise InputError(
            f"an array of {array.dtype} {list(array.shape)} is not a picture",
            remedy="pass uint8 of shape [height, width] or [height, width, 3] in RGB order",
        )
    _check_size((array.shape[1], array.shape[0]), limits)  # before it is copied
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


def name(source: object) -> str:
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
