"""Pictures in the scheduler: numbers by content, keys of prefixes, what is sent to the model's process."""

from __future__ import annotations

import gc
import hashlib
from array import array
from collections.abc import Sequence

import msgspec
import pytest

from runtime.cache.radix import RadixCache
from runtime.plan import Image, MediaSpan, Row, Run
from runtime.protocol.errors import BadRequest, QueueFull
from runtime.protocol.messages import ImageInput
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.requests import images
from runtime.scheduler.requests.images import KEYS, REMEMBERED, ImageRegistry, Images


class Holder:
    """What a runner would be told."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.loads = 0

    def load_images(self, images: Sequence[Image]) -> None:
        for image in images:
            assert len(image.pixels) == 3 * image.height * image.width
            self.held.add(image.number)
            self.loads += 1

    def drop_images(self, numbers: Sequence[int]) -> None:
        self.held -= set(numbers)


def picture(seed: int, first: int = 1, length: int = 4) -> ImageInput:
    pixels = bytes([seed]) * (3 * 56 * 28 * length // 2)
    digest = hashlib.sha256(pixels).digest()
    return ImageInput(pixels, 56, 14 * length, digest, first, length, max(2, length // 2))


def row(*spans: MediaSpan) -> Row:
    return Row(1, (0,), 0, (Run(0, 1),), SamplingParams(), media=spans)


def test_the_same_content_has_the_same_number_and_is_held_once() -> None:
    registry = ImageRegistry(Holder())
    one, other, again = (registry.numbered([picture(seed)], 9)[0] for seed in (1, 2, 1))
    assert one.number == again.number != other.number
    assert again.pixels is one.pixels
    (bare,) = registry.numbered([msgspec.structs.replace(picture(1), pixels=b"")], 9)
    assert (bare.number, bare.pixels) == (one.number, one.pixels)


def test_pixels_that_nobody_has_any_more_cannot_be_meant() -> None:
    registry = ImageRegistry(Holder())
    number = registry.numbered([picture(1)], 9)[0].number
    gc.collect()
    with pytest.raises(BadRequest, match="gone"):
        registry.numbered([msgspec.structs.replace(picture(1), pixels=b"")], 9)
    assert registry.numbered([picture(1)], 9)[0].number == number  # which its KV is found by


def test_pictures_in_hand_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = ImageRegistry(Holder())
    monkeypatch.setattr(images, "MOST_LIVE", 2 * len(picture(1).pixels))
    live = [registry.numbered([picture(seed)], 9) for seed in (1, 2)]
    with pytest.raises(QueueFull):
        registry.numbered([picture(3)], 9)
    assert registry.numbered([picture(1)], 9)  # it is there already
    live.pop()
    gc.collect()
    assert registry.numbered([picture(3)], 9)


def test_a_number_that_was_forgotten_is_not_given_again() -> None:
    registry = ImageRegistry(Holder())
    first = registry.numbered([picture(1)], 9)[0].number
    seen = {first}
    blank = picture(0)
    for at in range(REMEMBERED + 1):
        digest = hashlib.sha256(str(at).encode()).digest()
        seen.add(registry.numbered([msgspec.structs.replace(blank, digest=digest)], 9)[0].number)
    assert len(seen) == REMEMBERED + 2
    assert registry.numbered([picture(1)], 9)[0].number not in seen


@pytest.mark.parametrize(
    "changes",
    [
        {"first": -1}, {"length": 0}, {"first": 6}, {"extent": 0}, {"extent": 5}, {"digest": b"short"},
        {"pixels": b"few"},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    registry = ImageRegistry(Holder())
    with pytest.raises(BadRequest):
        registry.numbered([msgspec.structs.replace(picture(1), **changes)], 9)
    with pytest.raises(BadRequest):
        registry.numbered([picture(1), picture(2, first=4)], 9)  # one over the other


def test_a_model_of_text_takes_none() -> None:
    with pytest.raises(BadRequest, match="text only"):
        ImageRegistry().numbered([picture(1)], 9)


def test_keys_of_prefixes_differ_in_the_picture_and_nowhere_else() -> None:
    registry, cache = ImageRegistry(Holder()), RadixCache()
    ids = [7, 5, 5, 5, 5, 8, 9]
    keys = []
    for seed in (1, 2, 1):
        mine = Images(registry.numbered([picture(seed)], len(ids)), ids)
        tokens = array("q", ids)
        mine.key(tokens)
        assert mine.plain(tokens) == tuple(ids)
        assert [at for at, token in enumerate(tokens) if token >= KEYS] == [1, 2, 3, 4]
        keys.append(tokens)
    assert keys[0] == keys[2] != keys[1]
    cache.insert(keys[0], [Run(0, len(ids))])
    assert cache.probe(keys[1]) == 1
    assert cache.probe(keys[2]) == len(ids)


def test_spans_and_shifts_of_any_stretch() -> None:
    registry = ImageRegistry(Holder())
    ids = [0, *[5] * 4, 1, *[5] * 6, 2]
    one, other = registry.numbered([picture(1), picture(2, first=6, length=6)], len(ids))
    both = Images((one, other), ids)
    assert both.spans(0, 1) == ((), 0)
    assert both.spans(0, 3) == ((MediaSpan(1, 0, 1, 2),), 0)
    assert both.spans(3, 8) == ((MediaSpan(1, 2, 0, 2), MediaSpan(2, 0, 3, 2)), 0)
    assert both.spans(5, 6) == ((), -2)
    assert both.spans(8, 13) == ((MediaSpan(2, 2, 0, 4),), -2)
    assert both.spans(12, 13) == ((), both.shift)
    assert both.shift == -2 - 3


def test_a_picture_is_sent_when_it_is_needed_and_once() -> None:
    holder = Holder()
    registry = ImageRegistry(holder, kept_tokens=8)
    ids = [0, *[5] * 4, 1]
    owners = [Images(registry.numbered([picture(seed)], 6), ids) for seed in range(4)]
    registry.supply([row()], [owners[0]])
    assert not holder.loads  # all of its prompt was in the cache
    for _ in range(3):
        registry.supply([row(MediaSpan(1, 0, 0, 4)), row()], [owners[0], None])
    assert holder.loads == registry.loaded == 1
    registry.supply([row(MediaSpan(2, 0, 0, 4))], [owners[1]])
    registry.supply([row(MediaSpan(1, 0, 0, 4))], [owners[0]])
    registry.supply([row(MediaSpan(3, 0, 0, 4))], [owners[2]])
    assert holder.held == {1, 3}  # two of them fit; who was used longest ago went
    every = [row(MediaSpan(number, 0, 0, 4)) for number in (1, 2, 3, 4)]
    registry.supply(every, owners)
    assert holder.held == {1, 2, 3, 4}  # those of a step are there whatever may be kept
    registry.supply([row(MediaSpan(4, 0, 0, 4))], [owners[3]])
    assert len(holder.held) == 2
    assert 4 in holder.held
