"""GenerateReqInput: what its five steps make of what a user gives."""

from __future__ import annotations

import copy
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.requests.generate import SALT, SingleGenerateReq, copy_request, resolve, typed_items
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

UUID = re.compile(r"[0-9a-f]{32}")


def normal(**fields: Any) -> GenerateReqInput:
    request = GenerateReqInput(**fields)
    request.normalize_batch_and_arguments()
    return request


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        (
            {"text": "a", "input_ids": [1], "input_embeds": [[0.5]]},
            "Either text, input_ids or input_embeds should be provided.",
        ),
        ({"input_ids": []}, "input_ids cannot be empty."),
        (
            {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
            "The parallel_sample_num should be the same for all samples in sample params.",
        ),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n: must be at least 1, got 0"),
        ({"text": "a", "sampling_params": {"n": "2"}}, "must be at least 1, got '2'"),
        ({"text": ["a", "b"], "rid": ["x"]}, "The specified rids length mismatch"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request IDs detected within the request: ['x']"),
        ({"text": ["a", "b"], "rid": 5}, "rid should be a string or a list of strings"),
        ({"text": "a", "rid": ["x"]}, "rid should be a string for a single request"),
        ({"text": ["a", "b"], "return_hidden_states": [True]},
         "return_hidden_states should be equal to the batch size"),
        ({"text": "a", "return_hidden_states": "first"}, "must be a boolean or the string literal 'last'"),
        ({"text": ["a"], "return_hidden_states": ["all"]}, "must be a boolean or the string literal 'last'"),
        ({"text": ["a", "b"], "extra_key": ["k"]}, "batch size"),
        ({"text": "a", "extra_key": ["k"]}, "single request"),
        ({"text": "a", "extra_key": 5}, "should be a string"),
        ({"text": ["a", "b"], "cache_salt": ["k"]}, "batch size"),
        ({"text": "a", "cache_salt": ["k"]}, "single request"),
        ({"text": ["a"], "cache_salt": [5]}, "should be a string"),
        ({"text": "a", "session_id": "s", "session_params": {"id": "s"}}, "cannot both be set"),
        (
            {"text": "a", "custom_logit_processor": ["p"], "sampling_params": {"n": 2}},
            "custom_logit_processor cannot be used with n > 1",
        ),
        ({"text": ["a", "b"], "image_data": ["x"]},
         "The length of image_data should be equal to the batch size"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params should be equal to the batch size"),
        ({"text": "a", "sampling_params": [{}]}, "for a single request"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob should be equal to the batch size"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]},
         "token_ids_logprob should be equal to the batch size"),
        ({"text": []}, "text cannot be empty."),
        ({"text": 5}, "text should be a string or a list of strings"),
        ({"text": "a", "choices": ["b"], "sampling_params": {"n": 2}}, "n must be 1"),
        ({"text": ["a"] * 700, "sampling_params": {"n": 100}}, "at most 65536"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_value_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        normal(**fields)
    assert isinstance(caught.value, BadRequest)
    assert caught.value.status == 400


def test_quoted_texts_stand_alone() -> None:
    with pytest.raises(ValueError) as caught:
        normal()
    assert str(caught.value) == "Either text, input_ids or input_embeds should be provided."
    with pytest.raises(ValueError) as caught:
        normal(input_ids=[])
    assert str(caught.value) == "input_ids cannot be empty."


@pytest.mark.parametrize(
    ("fields", "single", "size"),
    [
        ({"text": "a"}, True, 1),
        ({"text": ""}, True, 1),
        ({"text": ["a"]}, False, 1),
        ({"text": ["a", "b"]}, False, 2),
        ({"input_ids": [1, 2, 3]}, True, 1),
        ({"input_ids": [[1, 2], [3]]}, False, 2),
        ({"input_embeds": [[0.1, 0.2], [0.3, 0.4]]}, True, 1),
        ({"input_embeds": [[[0.1]], [[0.2]], [[0.3]]]}, False, 3),
        ({"messages": [Message("user", "hi")]}, True, 1),
    ],
)
def test_size(fields: dict[str, Any], single: bool, size: int) -> None:
    request = normal(**fields)
    assert (request.is_single, request.batch_size, request.parallel_sample_num) == (single, size, 1)
    assert len(request) == size


def test_defaults_of_a_single_request() -> None:
    assert GenerateReqInput(text="a").rid is None
    request = normal(text="a", image_data=["x", "y"], token_ids_logprob=[])
    assert isinstance(request.rid, str)
    assert UUID.fullmatch(request.rid)
    assert request.return_logprob is False
    assert (request.logprob_start_len, request.top_logprobs_num) == (-1, 0)
    assert request.token_ids_logprob is None
    assert request.sampling_params == {}
    assert request.image_data == ["x", "y"]
    assert request.modalities is None
    assert request[0] is request


def test_what_is_not_normalised_says_so() -> None:
    for ask in (lambda r: r.is_single, lambda r: r.batch_size, lambda r: r[0], len):
        with pytest.raises(AttributeError, match="normalize_batch_and_arguments"):
            ask(GenerateReqInput(text="a"))


def test_samples_of_two_prompts_come_in_rounds() -> None:
    request = normal(
        text=["p1", "p2"], rid="batch", sampling_params=[{"n": 2, "top_p": 0.5}, {"n": 2}],
        image_data=["i1", "i2"], lora_path=["l1", "l2"], extra_key=["e1", "e2"], cache_salt=["s1", ""],
        return_hidden_states=[True, "last"], audio_data="a", video_data=["v1", "v2"],
        return_logprob=[True, False], constraint=[Constraint("regex", "a"), None],
    )  # fmt: skip
    assert (request.is_single, request.batch_size, request.parallel_sample_num) == (False, 2, 2)
    assert request.text == ["p1", "p2", "p1", "p2"]
    assert request.rid == ["batch_0", "batch_1", "batch_2", "batch_3"]
    assert request.sampling_params == [{"n": 2, "top_p": 0.5}, {"n": 2}] * 2
    assert request.image_data == [["i1"], ["i2"]] * 2
    assert request.modalities == ["image"] * 4
    assert request.video_data == ["v1", "v2"] * 2
    assert request.audio_data == ["a"] * 4
    assert request.lora_path == ["l1", "l2"] * 2
    assert request.extra_key == ["e1", "e2"] * 2
    assert request.cache_salt == ["s1", None] * 2
    assert request.return_hidden_states == [True, "last"] * 2
    assert request.return_logprob == [True, False] * 2
    assert request[2].constraint == Constraint("regex", "a")
    assert request[3].constraint is None


def test_samples_of_one_prompt_make_a_batch() -> None:
    request = normal(text="p", sampling_params={"n": 3}, rid="r", bootstrap_room=7)
    assert not request.is_single
    assert request.batch_size == 1
    assert request.text == ["p"] * 3
    assert request.rid == ["r_0", "r_1", "r_2"]
    assert request.bootstrap_room == [7, 8, 9]
    ids = normal(input_ids=[4, 5], sampling_params=SamplingParams(n=2))
    assert ids.input_ids == [[4, 5], [4, 5]]
    media = normal(text="p", sampling_params={"n": 2}, image_data=["x", "y"])
    assert media.image_data == [["x", "y"]] * 2


@pytest.mark.parametrize(
    ("given", "data", "modalities"),
    [
        (None, [None, None], None),
        ("x", [["x"], ["x"]], ["image", "image"]),
        (["x", "y"], [["x"], ["y"]], ["image", "image"]),
        ([["x"], ["y", "z"]], [["x"], ["y", "z"]], ["image", "multi-images"]),
        ([["x"], [None]], [["x"], [None]], ["image", None]),
        ([["x"], None], [["x"], None], ["image", None]),
        ([], [None, None], None),
    ],
)
def test_images_of_a_batch(given: Any, data: list[Any], modalities: list[str | None] | None) -> None:
    request = normal(text=["a", "b"], image_data=given)
    assert request.image_data == data
    assert request.modalities == modalities
    assert request[1].image_data == data[1]
    assert request[1].modalities == (modalities[1] if modalities else None)


def test_scalars_are_for_all_and_lists_are_kept() -> None:
    request = normal(
        text=["a", "b"], return_logprob=True, logprob_start_len=[0, 3], top_logprobs_num=2,
        token_ids_logprob=[5, 6], custom_logit_processor="p", bootstrap_host="h", bootstrap_port=[1, 2],
        session_params={"id": "s"},
    )  # fmt: skip
    assert request.return_logprob == [True, True]
    assert request.logprob_start_len == [0, 3]
    assert request.top_logprobs_num == [2, 2]
    assert request.token_ids_logprob == [[5, 6], [5, 6]]
    assert request.custom_logit_processor == ["p", "p"]
    assert request.bootstrap_host == ["h", "h"]
    assert request.bootstrap_port == [1, 2]
    assert request.session_params == {"id": "s"}
    assert request[1].session_params == {"id": "s"}
    assert normal(text=["a", "b"], token_ids_logprob=[[1], None]).token_ids_logprob == [[1], None]
    assert normal(text=["a", "b"], token_ids_logprob=5).token_ids_logprob == [[5], [5]]
    sessions = [{"id": "s"}, {"id": "t"}]
    assert normal(text=["a", "b"], session_params=sessions)[1].session_params == {"id": "t"}


def test_the_older_name_of_the_rank() -> None:
    request = normal(text=["a", "b"], data_parallel_rank=3)
    assert (request.routed_dp_rank, request.data_parallel_rank) == (3, None)
    assert request[0].routed_dp_rank == 3
    assert normal(text="a", data_parallel_rank=3, routed_dp_rank=1).routed_dp_rank == 1


def test_items_are_kept_and_carry_what_is_the_whole_requests() -> None:
    request = normal(
        text=["a", "b"], stream=True, log_metrics=False, return_prompt_token_ids=True, background=True,
        priority=4, no_logs=True, custom_labels={"team": "x"}, timeout_s=3.0, require_reasoning=True,
    )  # fmt: skip
    item = request[1]
    assert item is request[1]
    assert item is request[-1]
    assert item.is_single
    assert item[0] is item
    assert (item.text, item.rid, item.priority) == ("b", (request.rid or "")[1], 4)
    assert item.stream
    assert item.background
    assert item.return_prompt_token_ids
    assert item.require_reasoning
    assert not item.log_metrics
    assert item.no_logs
    assert (item.custom_labels, item.timeout_s) == ({"team": "x"}, 3.0)
    assert [one.text for one in request] == ["a", "b"]
    with pytest.raises(IndexError):
        request[2]


def test_normalising_twice_changes_nothing_and_copies_keep_it() -> None:
    request = normal(text=["a", "b"], sampling_params={"n": 2})
    before = copy.deepcopy(request)
    request.normalize_batch_and_arguments()
    assert request == before
    later = copy_request(request, timeout_s=2.0)
    assert (len(later), later.batch_size, later[3].timeout_s) == (4, 2, 2.0)


def test_ids_can_be_made_anew() -> None:
    request = normal(text="a", rid="x")
    made = request.regenerate_rid()
    assert request.rid == made != "x"
    batch = normal(text=["a", "b"], rid="x")
    first = batch[0]
    rids = batch.regenerate_rid()
    assert batch.rid == rids
    assert len(set(rids)) == 2
    assert batch[0] is first
    assert [item.rid for item in batch] == rids, "items that were taken out too"
    assert normal(text=["a", "b"]).regenerate_rid() != rids


@settings(deadline=None, max_examples=tries(100))
@given(
    texts=st.lists(st.text(max_size=3), min_size=1, max_size=4),
    n=st.integers(1, 3),
    as_list=st.booleans(),
    rid=st.none() | st.text("abc", min_size=1, max_size=3),
    flags=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_item_i_is_prompt_i_modulo_prompts(
    texts: list[str], n: int, as_list: bool, rid: str | None, flags: list[bool]
) -> None:
    count = len(texts)
    params = [{"n": n, "seed": at} for at in range(count)] if as_list else {"n": n}
    request = normal(
        text=texts, sampling_params=params, rid=rid, return_logprob=flags[:count],
        extra_key=[str(at) for at in range(count)], input_ids=None,
    )  # fmt: skip
    assert len(request) == count * n
    rids = [one.rid for one in request]
    assert len(set(rids)) == len(rids)
    for index, item in enumerate(request):
        assert item.text == texts[index % count]
        assert item.extra_key == str(index % count)
        assert item.return_logprob == flags[index % count]
        assert item.sampling_params == (params[index % count] if isinstance(params, list) else params)
        single = resolve(item)
        assert (single.text, single.rid, single.sampling_params.n) == (texts[index % count], item.rid, 1)


# -- one prompt, every field of one type ---------------------------------------------------------------------


def test_resolving_leaves_the_request_as_it_is() -> None:
    request = GenerateReqInput(text="a", sampling_params={"stop": "x", "regex": "a+"}, cache_salt="s")
    before = copy.deepcopy(request)
    made = resolve(request)
    assert request == before
    assert not request.is_normalized
    assert made.sampling_params == SamplingParams(stop=("x",))
    assert made.constraint == Constraint("regex", "a+")
    assert UUID.fullmatch(made.rid)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"logprob_start_len": 0, "return_text_in_logprobs": True}, False),
        ({"top_logprobs_num": 2}, True),
        ({"token_ids_logprob": [5]}, True),
        ({"token_ids_logprob": [], "top_logprobs_num": 0}, False),
        ({"token_ids_logprob": [5], "return_logprob": False}, True),
    ],
)
def test_to_ask_for_some_log_probabilities_is_to_ask_for_log_probabilities(
    fields: dict[str, Any], wanted: bool
) -> None:
    request = normal(text=["a", "b"], **fields)
    assert request.return_logprob == [False, False]
    assert [resolve(one).return_logprob for one in request] == [wanted, wanted]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "a", "image_data": 5}, "image_data"),
        ({"text": "a", "video_data": ["x"]}, "video_data"),
        ({"text": "a", "audio_data": "x"}, "audio_data"),
        ({"text": "a", "lora_path": ""}, "lora_path"),
        ({"text": "a", "lora_id": "x"}, "lora_id"),
        ({"text": "a", "bootstrap_host": "x"}, "bootstrap_host"),
        ({"text": "a", "bootstrap_port": 1}, "bootstrap_port"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_room": 1, "bootstrap_port": 0}, "bootstrap_port"),
        ({"text": "a", "bootstrap_host": "", "bootstrap_room": 1}, "bootstrap_host"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_room": -1}, "bootstrap_room"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_room": 2**63}, "bootstrap_room"),
        ({"text": "a", "bootstrap_pair_key": "k"}, "bootstrap_pair_key"),
        ({"text": "a", "bootstrap_room": 0}, "bootstrap_room"),
        ({"text": "a", "routed_dp_rank": 1}, "routed_dp_rank"),
        ({"text": "a", "return_bytes": True}, "return_bytes"),
        ({"text": "a", "return_entropy": True}, "return_entropy"),
        ({"text": "a", "background": True}, "background"),
        ({"text": "a", "max_thinking_tokens": "many"}, "max_thinking_tokens"),
        ({"text": "a", "require_reasoning": "yes"}, "require_reasoning"),
        ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
        ({"text": "a", "top_logprobs_num": [1]}, "top_logprobs_num"),
        ({"text": "a", "priority": "high"}, "priority"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "\ud800"}, "rid"),
        ({"text": "a", "extra_key": "a\0b"}, "extra_key"),
        ({"text": "a", "cache_salt": "\0"}, "cache_salt"),
        ({"text": "a", "custom_logit_processor": 5}, "custom_logit_processor"),
        ({"text": "a", "sampling_params": {"regex": "a"}, "constraint": Constraint("regex", "b")},
         "constraint"),
        ({"text": ["a", "b"]}, "prompt"),
        ({"text": "a", "sampling_params": {"n": 2}}, "prompt"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "session_params": {"id": "s"}, "stream": "no"}, "stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        resolve(GenerateReqInput(**fields))
    assert caught.value.where == where


def test_a_wrong_constraint_is_a_constraints_error() -> None:
    with pytest.raises(BadConstraint) as caught:
        resolve(GenerateReqInput(text="a", constraint=Constraint("yaml", "x")))  # type: ignore[arg-type]
    assert caught.value.where == "constraint.kind"


KEYS = st.none() | st.text("ab:s\x01", max_size=3)


@settings(deadline=None, max_examples=tries(200))
@given(st.tuples(KEYS, KEYS), st.tuples(KEYS, KEYS))
def test_different_keys_and_salts_never_share_a_cache(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    def key(pair: tuple[str | None, str | None]) -> str | None:
        return resolve(GenerateReqInput(text="a", extra_key=pair[0], cache_salt=pair[1])).extra_key

    same = one[0] == other[0] and (one[1] or None) == (other[1] or None)
    assert (key(one) == key(other)) is same
    assert one[1] or key(one) == one[0]
    assert not one[1] or str(key(one)).startswith(SALT)


def test_session_and_processor_find_their_place() -> None:
    made = resolve(GenerateReqInput(text="a", session_id="s", custom_logit_processor="p"))
    assert made.session_params == {"id": "s"}
    assert made.sampling_params.custom_logit_processor == "p"
    with pytest.raises(BadRequest, match="a different one"):
        resolve(
            GenerateReqInput(
                text="a", custom_logit_processor="p", sampling_params={"custom_logit_processor": "q"}
            )
        )


def test_json_becomes_a_request_and_unknown_fields_are_named() -> None:
    body = b'{"text": ["a", "b"], "sampling_params": {"n": 2, "json_schema": {"type": "object"}}, "rid": "r"}'
    request = msgspec.json.decode(body, type=GenerateReqInput)
    request.normalize_batch_and_arguments()
    assert resolve(request[3]).constraint == Constraint("json_schema", '{"type":"object"}')
    with pytest.raises(msgspec.ValidationError, match="temperatur"):
        msgspec.json.decode(b'{"text": "a", "temperatur": 1}', type=GenerateReqInput)


def test_what_items_share_is_read_once_and_held_once() -> None:
    params = {"n": 3, "logit_bias": {"1": 2.0}, "json_schema": {"type": "object"}}
    request = GenerateReqInput(
        messages=[Message("user", "a")], tools=[{"a": {}}], sampling_params=params, custom_labels={"a": "b"}
    )
    request.normalize_batch_and_arguments()
    items = [one for one in typed_items(request) if isinstance(one, SingleGenerateReq)]
    for name in ("messages", "tools", "sampling_params", "custom_labels"):
        assert len({id(getattr(one, name)) for one in items}) == 1, name
        assert getattr(items[2], name) == getattr(resolve(request[2]), name)
    assert len({one.rid for one in items}) == 3


def test_parameters_for_all_items_have_a_size() -> None:
    params = {"n": 1024, "json_schema": "x" * (1 << 17)}
    with pytest.raises(BadRequest, match="1024 prompts and samples; at most"):
        GenerateReqInput(text="a", sampling_params=params).normalize_batch_and_arguments()
    GenerateReqInput(text="a", sampling_params={**params, "n": 1}).normalize_batch_and_arguments()
    many = GenerateReqInput(text=["a", "b"], sampling_params={"n": 2}, token_ids_logprob=[1, 2])
    many.normalize_batch_and_arguments()
    assert many.token_ids_logprob == [[1, 2]] * 4
