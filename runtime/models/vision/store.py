"""ImageStore: the images that plans may refer to by number, and their tokens, computed once each. Its
contents are set from outside; it knows no prompts and no content hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.vision.tower import VisionTower
from runtime.plan import Image, MediaSpan, Row


@dataclass(slots=True, eq=False)
class _Held:
    """pixels [height, width, 3] uint8; tokens [rows * columns, out_size], set on first use."""

    pixels: Tensor
    rows: int
    columns: int
    tokens: Tensor | None = None


class ImageStore:
    """`computed`: how many times an image's tokens were computed."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._held: dict[int, _Held] = {}
        self.computed = 0

    def __contains__(self, number: object) -> bool:
        return number in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def load(self, images: Iterable[Image]) -> None:
        """Add images; plans may refer to them from now on. Raises ValueError if the number of pixels does not
        match height and width."""
        for image in images:
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
            grid = self._tower.spec.grid(image.height, image.width)
            self._held[image.number] = _Held(pixels.view(image.height, image.width, 3), *grid)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget the images: no plan will refer to them. Unknown numbers are ignored."""
        for number in numbers:
            self._held.pop(number, None)

    def use(self, tower: VisionTower) -> None:
        """Use another tower of the same shape: tokens are computed again."""
        self._tower = tower
        for held in self._held.values():
            held.tokens = None

    def tokens(self, number: int) -> int:
        """The number of tokens of an image."""
        held = self._held[number]
        return held.rows * held.columns

    def positions(self, row: Row) -> Tensor:
        """[3, tokens] int64: time, row and column of each token of a row, for the rotary embedding. Text
        continues with one number for all three, after the largest before it (arXiv 2409.12191, section
        2.1)."""
        first, shift = row.position, row.shift
        positions = torch.arange(first, first + len(row.tokens)).expand(3, -1).clone()
        at = 0
        for span in row.media:
            positions[:, at : span.first] += shift
            held = self._held[span.item]
            begin = first + span.first - span.offset + shift
            within = torch.arange(span.offset, span.offset + span.length)
            at = span.first + span.length
            positions[0, span.first : at] = begin
            positions[1, span.first : at] = begin + within // held.columns
            positions[2, span.first : at] = begin + within % held.columns
            shift += max(held.rows, held.columns) - held.rows * held.columns
        positions[:, at:] += shift
        return positions

    def features(self, spans: Sequence[MediaSpan]) -> Tensor:
        """[tokens of all spans, out_size]"""
        return torch.cat([self._of(span.item)[span.offset : span.offset + span.length] for span in spans])

    def _of(self, number: int) -> Tensor:
        held = self._held[number]
        if held.tokens is None:
            held.tokens = self._tower(held.pixels.to(self._tower.device))
            self.computed += 1
        return held.tokens
