"""A picture's bytes -> pixels of the size that the model's vision tower takes, and a hash of them. The pixels
are those of transformers' image processor (Pillow's).
"""

from __future__ import annotations

import hashlib
import io
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageOps

from runtime.config.parts.vision import ImageOptions, VisionSpec
from runtime.processes.frontend.images.sources import Sources
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import DETAILS, ImageData, ImageInput

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LOW_PIXELS = 512 * 512
"""The most pixels with detail "low"."""
STRETCHED = 200
"""The largest ratio of a picture's sides."""
DECODED_AT_ONCE = 2
KEPT_BYTES = 64 << 20
"""Pixels of recent pictures that are cached: conversations send theirs again with each turn."""


@dataclass(frozen=True, slots=True)
class Picture:
    """pixels: uint8 [height, width, 3]. rows, columns: of its tokens."""

    pixels: bytes
    height: int
    width: int
    rows: int
    columns: int
    digest: bytes

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class PictureReader:
    """Thread safe; it blocks. `decoded`: pictures that were decoded, each time counted."""

    def __init__(self, spec: VisionSpec, options: ImageOptions) -> None:
        self.spec, self._options, self._sources = spec, options, Sources(options)
        self._turn = threading.BoundedSemaphore(DECODED_AT_ONCE)  # decoding takes memory
        self._recent = _Recent(KEPT_BYTES)
        self.decoded = 0

    def read(self, images: Sequence[ImageData], most_tokens: int) -> list[Picture]:
        """Decode the images, in order. Raises BadRequest: one is wrong, or all exceed `most_tokens`."""
        if len(images) > self._options.max_images:
            raise BadRequest(
                f"the request has {len(images)} images; at most {self._options.max_images} are allowed",
                where="images",
                hint="start the engine with a larger max_images",
            )
        pictures: list[Picture] = []
        left = most_tokens
        for index, one in enumerate(images):
            field = f"images[{index}]"
            if one.detail not in DETAILS:
                raise BadRequest(
                    f"detail must be one of {', '.join(DETAILS)}, got {one.detail!r:.40}", where=field
                )
            if one.max_dynamic_patch is not None:
                raise BadRequest(
                    "this model does not split images into tiles: leave out max_dynamic_patch", where=field
                )
            pictures.append(self._read(one, field))
            left -= pictures[-1].tokens
            if left < 0:
                raise BadRequest(
                    f"the images up to this one exceed the available tokens by {-left}",
                    where=field,
                    hint='send smaller images, or use detail "low"',
                )
        return pictures

    def _read(self, one: ImageData, field: str) -> Picture:
        data = self._sources.read(one.url, field)
        key = hashlib.sha256(data).digest(), one.detail == "low"
        known = self._recent.get(key)
        if known is not None:
            return known
        with self._turn:
            self.decoded += 1
            picture = self._decode(data, low=one.detail == "low", field=field)
        self._recent.add(key, picture)
        return picture

    def _decode(self, data: bytes, *, low: bool, field: str) -> Picture:
        spec = self.spec
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                self._check_size(opened.width, opened.height, field)
                upright = ImageOps.exif_transpose(opened)
                if "transparency" in upright.info:
                    upright = upright.convert("RGBA")
                rgb = upright.convert("RGB")
            most = min(spec.max_pixels, LOW_PIXELS) if low else spec.max_pixels
            most = max(most, spec.min_pixels)
            height, width = smart_size(rgb.height, rgb.width, spec.step, spec.min_pixels, most)
            pixels = rgb.resize((width, height), Image.Resampling(spec.resample)).tobytes()
        except BadRequest:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise self._too_many_pixels(field) from None
        except Exception as error:
            raise BadRequest(
                f"is not an image that can be read ({', '.join(FORMATS)}): {type(error).__name__}",
                where=field,
            ) from error
        digest = hashlib.sha256(f"{height} {width} ".encode() + pixels).digest()
        return Picture(pixels, height, width, *spec.grid(height, width), digest)

    def _check_size(self, width: int, height: int, field: str) -> None:
        if width * height > self._options.max_image_pixels:
            raise self._too_many_pixels(field)
        if max(width, height) > STRETCHED * min(width, height):
            raise BadRequest(
                f"the image has {width} x {height} pixels: too long and narrow (at most {STRETCHED}:1)",
                where=field,
            )

    def _too_many_pixels(self, field: str) -> BadRequest:
        return BadRequest(
            f"the image has more than {self._options.max_image_pixels} pixels",
            where=field,
            hint="make it smaller, or start the engine with a larger max_image_pixels",
        )


def smart_size(height: int, width: int, step: int, least: int, most: int) -> tuple[int, int]:
    """The nearest size in multiples of `step`, with `least` to `most` pixels (the rule of Qwen2-VL)."""
    high, wide = (round(side / step) * step for side in (height, width))
    if high * wide > most:
        factor = math.sqrt(height * width / most)
        high, wide = (max(step, math.floor(side / factor / step) * step) for side in (height, width))
    elif high * wide < least:
        factor = math.sqrt(least / (height * width))
        high, wide = (math.ceil(side * factor / step) * step for side in (height, width))
    return high, wide


class _Recent:
    """The last used pictures by the hash of their data, at most so many bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._held: OrderedDict[tuple[bytes, bool], Picture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[bytes, bool]) -> Picture | None:
        with self._lock:
            picture = self._held.get(key)
            if picture is not None:
                self._held.move_to_end(key)
            return picture

    def add(self, key: tuple[bytes, bool], one: Picture) -> None:
        with self._lock:
            if key in self._held:
                return
            self._held[key] = one
            self._bytes += len(one.pixels)
            while self._bytes > self._most and self._held:
                self._bytes -= len(self._held.popitem(last=False)[1].pixels)


def check_placeholders(ids: Sequence[int], image_id: int, count: int) -> None:
    """Raise BadRequest unless the prompt has as many placeholders as pictures."""
    placeholders = sum([token == image_id for token in ids])
    if placeholders != count:
        raise BadRequest(
            f"the prompt has {placeholders} image placeholders, but {count} images were sent",
            where="images",
            hint="each image needs one placeholder; a chat template writes it for each image part",
        )


def expand(ids: Sequence[int], image_id: int, images: Sequence[ImageInput]) -> list[int]:
    """The ids with placeholders for pictures that put_pictures() has measured."""
    coming = iter(images)
    return [one for token in ids for one in [token] * (next(coming).length if token == image_id else 1)]


def put_pictures(
    ids: Sequence[int], image_id: int, pictures: Sequence[Picture]
) -> tuple[list[int], list[ImageInput]]:
    """The longer ids, and the pictures with their positions in them. There are as many as placeholders."""
    longer: list[int] = []
    images: list[ImageInput] = []
    coming = iter(pictures)
    for token in ids:
        if token != image_id:
            longer.append(token)
            continue
        one = next(coming)
        extent = max(one.rows, one.columns)
        images.append(
            ImageInput(one.pixels, one.height, one.width, one.digest, len(longer), one.tokens, extent)
        )
        longer += [image_id] * one.tokens
    return longer, images
