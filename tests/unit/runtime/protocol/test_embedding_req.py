"""EmbeddingReqInput: what normalising makes of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runtime.protocol.errors import BadRequest
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.sampling import SamplingParams


def normal(**fields: Any) -> EmbeddingReqInput:
    request = EmbeddingReqInput(**fields)
    request.normalize_batch_and_arguments()
    return request


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "At least one of text, input_ids"),
        ({"text": "a", "input_ids": [1]}, "text and input_ids cannot"),
        ({"text": []}, "text cannot be empty"),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"text": ["a", "b"], "rid": ["x"]}, "The specified rids length mismatch"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request IDs detected within the request: ['x']"),
        ({"text": [["a", "b"]]}, "cross-encoder"),
        ({"text": "a", "is_cross_encoder_request": True}, "pair"),
        ({"video_data": [[None]], "is_cross_encoder_request": True}, "pair"),
        ({"image_data": "a.png", "is_cross_encoder_request": True}, "pair"),
        ({"text": [["a", "b"], ["c"]], "is_cross_encoder_request": True}, "text[1]"),
        ({"text": ["a", "b"], "lora_path": ["l"]}, "batch size"),
    ],
)
def test_what_is_wrong_is_a_value_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        normal(**fields)
    assert isinstance(caught.value, BadRequest)


def test_a_single_text() -> None:
    request = normal(text="a", sampling_params={"temperature": 0.5})
    assert request.is_single
    assert isinstance(request.rid, str)
    assert request.sampling_params == {"temperature": 0.5, "max_new_tokens": 0}
    assert request[0] is request
    assert normal(text="a", sampling_params=SamplingParams()).sampling_params == {"max_new_tokens": 0}


def test_a_batch_and_its_items() -> None:
    request = normal(
        text=["a", "b"], rid="r", priority=3, lora_path=["l1", "l2"], dimensions=8, image_data=["x", "y"]
    )
    assert (request.is_single, request.batch_size, len(request)) == (False, 2, 2)
    assert request.rid == ["r_0", "r_1"]
    assert all(params == {"max_new_tokens": 0} for params in request.sampling_params)
    item = request[1]
    assert item is request[1]
    assert (item.text, item.rid, item.priority, item.lora_path) == ("b", "r_1", 3, "l2")
    assert (item.dimensions, item.image_data, item.is_single) == (8, "y", True)
    ids = normal(input_ids=[[1, 2], [3]])
    assert [one.input_ids for one in ids] == [[1, 2], [3]]
    request.normalize_batch_and_arguments()
    assert request.batch_size == 2


def test_ids_can_be_made_anew() -> None:
    request = normal(text=["a", "b"], rid="r")
    assert request[1].rid == "r_1"
    made = request.regenerate_rid()
    assert [item.rid for item in request] == made == request.rid


def test_pairs_of_a_cross_encoder() -> None:
    request = normal(text=[["q", "d1"], ["q", "d2"]], is_cross_encoder_request=True)
    assert (request.is_single, request.batch_size) == (False, 2)
    assert request[1].pair == ("q", "d2")
    assert request[1].is_cross_encoder_request
    one = normal(text=["q", "d"], is_cross_encoder_request=True)
    assert one.is_single
    assert one.pair == ("q", "d")
    assert normal(text="a").pair is None


def test_an_image_alone_is_something() -> None:
    assert normal(image_data="x").is_single
    assert normal(image_data=["x", "y"]).batch_size == 2
