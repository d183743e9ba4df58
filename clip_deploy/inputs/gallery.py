"""What a collection of pictures needs of Pillow: pictures told from other files, and small copies of them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from PIL import Image

from clip_deploy.inputs.opening import FORMATS

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

THUMBNAIL_PIXELS = 320
HEAD_BYTES = 64
# Names under which a person expects a picture, and are told when there is none inside.
SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".avif", ".jp2", ".heic", ".heif"),
    )
)
_QUALITY = 85
# Profiles of cameras and screens take a few hundred bytes; those of printing presses half a megabyte.
_MAX_PROFILE_BYTES = 8192


def begins_like_a_picture(head: bytes) -> bool:
    """Whether a file that begins with ``head`` (``HEAD_BYTES`` of it) is of a format that ``inputs.images`` reads."""
    Image.init()
    tests = (Image.OPEN[name][1] for name in FORMATS if name in Image.OPEN)
    return any(test is not None and test(head) is True for test in tests)


def thumbnail(picture: Picture) -> bytes:
    """A JPEG file of a picture that ``inputs.images.load`` gave: upright, longest side at most ``THUMBNAIL_PIXELS``.

    Nothing that the file said about its maker goes along: no place, no comment. A small colour profile does.
    """
    profile = picture.info.get("icc_profile", b"") if picture.mode == "RGB" else b""
    size = (THUMBNAIL_PIXELS, THUMBNAIL_PIXELS)
    small = picture.copy()
    small.thumbnail(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
    if small.mode == "CMYK":
        small = small.convert("RGB")
    small.info.clear()
    file = io.BytesIO()
    small.save(
        file,
        "JPEG",
        quality=_QUALITY,
        icc_profile=profile if len(profile) <= _MAX_PROFILE_BYTES else None,
    )
    return file.getvalue()
