"""ImageStore: the pictures that plans may name, by their numbers, and their tokens, made once each. Which are
here is told from outside; it knows no prompts and no content hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.vision.tower import VisionTower
from runtime.plan import Image, MediaSpan, Row


@dataclass(slots=True, eq=False)
class _Held:
    """pixels [height, width, 3] uint8; tokens [rows * columns, out_size], once they were asked for."""

    pixels: Tensor
    rows: int
    columns: int
    tokens: Tensor | None = None


class ImageStore:
    """`made`: pictures whose tokens were computed, each time counted."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._held: dict[int, _Held] = {}
        self.made = 0

    def __contains__(self, number: object) -> bool:
        return number in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def load(self, images: Iterable[Image]) -> None:
        """Plans may name them from now on. Raises ValueError for pixels that are not as many as is said."""
        for image in images:
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
            grid = self._tower.spec.grid(image.height, image.width)
            self._held[image.number] = _Held(pixels.view(image.height, image.width, 3), *grid)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget them: no plan will name them any more. Nothing happens where they are not here."""
        for number in numbers:
            self._held.pop(number, None)

    def use(self, tower: VisionTower) -> None:
        """Another one of the same shape: tokens are made anew."""
        self._tower = tower
        for held in self._held.values():
            held.tokens = None

    def tokens(self, number: int) -> int:
        """How many tokens a picture is."""
        held = self._held[number]
        return held.rows * held.columns

    def positions(self, row: Row) -> Tensor:
        """[3, tokens] int64: time, row and column of each of a row's tokens for the rotary embedding. Text
        goes on with one number for all three behind the largest before it (arXiv 2409.12191, section
        2.1)."""
        first, shift = row.position, row.shift
        places = torch.arange(first, first + len(row.tokens)).expand(3, -1).clone()
        at = 0
        for span in row.media:
            places[:, at : span.first] += shift
            held = self._held[span.item]
            begin = first + span.first - span.offset + shift
            within = torch.arange(span.offset, span.offset + span.length)
            at = span.first + span.length
            places[0, span.first : at] = begin
            places[1, span.first : at] = begin + within // held.columns
            places[2, span.first : at] = begin + within % held.columns
            shift += max(held.rows, held.columns) - held.rows * held.columns
        places[:, at:] += shift
        return places

    def features(self, spans: Sequence[MediaSpan]) -> Tensor:
        """[tokens of all spans, out_size]"""
        return torch.cat([self._of(span.item)[span.offset : span.offset + span.length] for span in spans])

    def _of(self, number: int) -> Tensor:
        held = self._held[number]
        if held.tokens is None:
            held.tokens = self._tower(held.pixels.to(self._tower.device))
            self.made += 1
        return held.tokens
