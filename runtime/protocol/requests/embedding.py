"""EmbeddingReqInput: a user's request for vectors. Knows no tokenizer and no model."""

from __future__ import annotations

from typing import Any, Self

from runtime.protocol import request_base
from runtime.protocol.errors import BadRequest
from runtime.protocol.request_base import ManyReq, Spread
from runtime.protocol.sampling import SamplingParams


class EmbeddingReqInput(ManyReq, forbid_unknown_fields=True):
    """Text or input_ids, not both; a list is a batch. After normalising, nothing is generated: every
    sampling_params has max_new_tokens 0.

    is_cross_encoder_request: texts are pairs [query, document], or a list of such pairs, each scored as one;
        the text of a single item is a list with its pair.
    dimensions: keep so many leading numbers of each vector, scaled to length 1 again.
    """

    text: str | list[str | list[str]] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    sampling_params: Any = None
    is_cross_encoder_request: bool = False
    dimensions: int | None = None
    lora_path: str | list[str | None] | None = None
    lora_id: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    priority: int = 0
    timeout_s: float | None = None
    log_metrics: bool = True
    no_logs: bool = False
    custom_labels: dict[str, str] | None = None

    def normalize_batch_and_arguments(self) -> None:
        """Check the fields and fill in defaults. A second call changes nothing. Raises BadRequest."""
        if self.is_normalized:
            return
        media = (self.image_data, self.video_data, self.audio_data)
        if self.text is None and self.input_ids is None and all(one is None for one in media):
            raise BadRequest("At least one of text, input_ids, or image should be provided.", where="text")
        if self.text is not None and self.input_ids is not None:
            raise BadRequest("text and input_ids cannot be provided at the same time.", where="text")
        spread = self._count()
        self.rid = request_base.rids(self.rid, spread)
        request_base.check_unique(self.rid)
        self.sampling_params = request_base.params_of(self.sampling_params, spread, _nothing_new)
        if spread.single:
            self.extra_key = request_base.extra_key(self.extra_key)
            self.cache_salt = request_base.cache_salt(self.cache_salt)
        else:
            self.extra_key = spread.each("extra_key", self.extra_key, request_base.extra_key)
            self.cache_salt = spread.each("cache_salt", self.cache_salt, request_base.cache_salt)
            for name in ("image_data", "video_data", "audio_data", "lora_path", "lora_id"):
                setattr(self, name, spread.each(name, getattr(self, name)))
        self.set_size(spread)

    def _count(self) -> Spread:
        if self.is_cross_encoder_request:
            return self._count_pairs()
        if self.text is None and self.input_ids is None:
            media = (self.image_data, self.video_data, self.audio_data)
            first = next(one for one in media if one is not None)
            many = isinstance(first, list) and len(first) > 0
            return Spread(len(first) if many else 1, 1, not many)
        count, single = request_base.count_prompts(self.text, self.input_ids, None)
        if isinstance(self.text, list) and not all(isinstance(one, str) for one in self.text):
            raise BadRequest(
                "text should be a string or a list of strings; pairs are for cross-encoders.", where="text"
            )
        return Spread(count, 1, single)

    def _count_pairs(self) -> Spread:
        if not isinstance(self.text, list) or not self.text:
            raise BadRequest(
                "a cross-encoder takes text: a pair [query, document], or a list of such pairs.", where="text"
            )
        if _is_pair(self.text):
            return Spread(1, 1, True)
        for index, pair in enumerate(self.text):
            if not _is_pair(pair):
                raise BadRequest("should be a pair of strings [query, document]", where=f"text[{index}]")
        return Spread(len(self.text), 1, False)

    def _item(self, index: int) -> Self:
        item = super()._item(index)
        if item.is_cross_encoder_request:
            item.text = [item.text]  # type: ignore[list-item]  # the pair
        return item

    @property
    def pair(self) -> tuple[str, str] | None:
        text = self.text
        if not self.is_cross_encoder_request or not isinstance(text, list):
            return None
        pair = text[0] if isinstance(text[0], list) else text
        return (str(pair[0]), str(pair[1]))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)


def _nothing_new(params: Any) -> Any:
    if isinstance(params, SamplingParams):
        return {"max_new_tokens": 0}
    if not isinstance(params, dict):
        raise BadRequest(f"must be a dict, got {type(params).__name__}", where="sampling_params")
    return {**params, "max_new_tokens": 0}
