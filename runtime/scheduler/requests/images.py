"""Images as the scheduler knows them: a content hash, a number, a stretch of a prompt. Which ones the runner
holds, and what stands for them in the key of a prefix.

An image has one number as long as that is remembered, and a number is used once. So KV that was computed with
one image is never used for another one; an image that was forgotten is computed once more.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgspec

from runtime.plan import Image, MediaSpan, Row, Runner
from runtime.protocol.errors import BadRequest, QueueFull
from runtime.protocol.messages import ImageInput

KEYS = 1 << 40
"""In the key of a prefix the tokens of an image are this plus its number: no token id of any vocabulary."""
REMEMBERED = 1 << 16
"""Numbers of images that are remembered, at most."""
MOST_LIVE = 4 << 30
"""Bytes of the images of all live requests, at most."""
_DIGEST = 32


class Images:
    """The images of one request, and their positions among the prompt's ids."""

    __slots__ = ("_all", "_stand_in")

    def __init__(self, images: Sequence[ImageInput], ids: Sequence[int]) -> None:
        self._all = tuple(images)
        self._stand_in = ids[images[0].first]

    def key(self, tokens: array[int]) -> None:
        """Replace their placeholder ids by their numbers."""
        for one in self._all:
            tokens[one.first : one.first + one.length] = array("q", [KEYS + one.number]) * one.length

    @property
    def shift(self) -> int:
        """What is added to positions behind all of them."""
        return sum([one.extent - one.length for one in self._all])

    def plain(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Ids of the vocabulary for a stretch of the request's tokens."""
        return tuple([token if token < KEYS else self._stand_in for token in tokens])

    def spans(self, start: int, end: int) -> tuple[tuple[MediaSpan, ...], int]:
        """Of the tokens from `start` to `end`: see Row.media and Row.shift."""
        spans: list[MediaSpan] = []
        shift = 0
        for one in self._all:
            last = one.first + one.length
            if last <= start:
                shift += one.extent - one.length
            elif one.first < end:
                first = max(one.first, start)
                spans.append(MediaSpan(one.number, first - one.first, first - start, min(last, end) - first))
        return tuple(spans), shift

    def find(self, number: int) -> ImageInput:
        return next(one for one in self._all if one.number == number)


class ImageRegistry:
    """holder: None if the model takes no images. kept_tokens: of images that the holder keeps for later
    steps, at most; it holds those of a step in any case. active: whether there is a holder."""

    def __init__(self, holder: Runner | None = None, *, kept_tokens: int = 0) -> None:
        self._holder, self._kept = holder, kept_tokens
        self.active = holder is not None
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._count = itertools.count(1)
        self._live: WeakValueDictionary[bytes, ImageInput] = WeakValueDictionary()
        self._held: OrderedDict[int, int] = OrderedDict()  # number -> its tokens; the last used stands last
        self._tokens = 0
        self.loaded = 0

    def numbered(self, images: Sequence[ImageInput], prompt: int) -> tuple[ImageInput, ...]:
        """The same with their numbers, and with pixels. `prompt`: its number of ids. Raises BadRequest:
        images are not supported, or the description of one is inconsistent; QueueFull."""
        if self._holder is None:
            raise BadRequest("this model takes text only", where="image_data")
        behind = 0
        images_with_numbers: list[ImageInput] = []
        for one in images:
            size = 3 * one.height * one.width
            if (
                not one.length > 0 <= one.first - behind
                or one.first + one.length > prompt
                or not 0 < one.extent <= one.length
                or len(one.digest) != _DIGEST
                or len(one.pixels) not in (0, size)
            ):
                raise BadRequest("what is said of a picture does not fit it", where="image_data")
            behind = one.first + one.length
            images_with_numbers.append(self._numbered(one))
        return tuple(images_with_numbers)

    def _numbered(self, one: ImageInput) -> ImageInput:
        known = self._live.get(one.digest)
        if known is None and not one.pixels:
            raise BadRequest("the picture of an earlier request is gone", where="image_data")
        live_bytes = sum(len(live.pixels) for live in self._live.values())
        if known is None and live_bytes > MOST_LIVE - len(one.pixels):
            raise QueueFull("pictures of the requests in hand take too much memory", hint="try again later")
        number = self._numbers.pop(one.digest, 0) or next(self._count)
        self._numbers[one.digest] = number
        if len(self._numbers) > REMEMBERED:
            self._numbers.popitem(last=False)
        pixels = one.pixels if known is None else known.pixels  # held once for all requests
        numbered = msgspec.structs.replace(one, number=number, pixels=pixels)
        if known is None:
            self._live[one.digest] = numbered
        return numbered

    def supply(self, rows: Sequence[Row], images: Sequence[Images | None]) -> None:
        """Load the images that these rows refer to, before the step. images: of the rows' requests."""
        if self._holder is None:
            return
        needed = {span.item: owner for row, owner in zip(rows, images) if owner for span in row.media}
        if not needed:
            return
        for one in [owner.find(number) for number, owner in needed.items() if number not in self._held]:
            self._holder.load_images([Image(one.number, one.height, one.width, one.pixels)])
            self._held[one.number] = one.length
            self._tokens += one.length
            self.loaded += 1
        for number in needed:
            self._held.move_to_end(number)
        dropped: list[int] = []
        while self._tokens > self._kept and next(iter(self._held)) not in needed:
            number, length = self._held.popitem(last=False)
            self._tokens -= length
            dropped.append(number)
        if dropped:
            self._holder.drop_images(dropped)
