"""Every struct travels and comes back the same; what is no message is an error that says why."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ipc import wire
from runtime.ipc.wire import PIPELINE, WIRE_TYPES, WIRE_VERSION, Wire
from runtime.protocol import io_struct
from runtime.protocol import request_base as base_req
from runtime.protocol.control import VERBS
from runtime.protocol.errors import WireError
from runtime.protocol.io_struct import (
    BaseBatchReq,
    BaseReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    ControlOutput,
    EmbeddingOutput,
    FinishReason,
    HealthReq,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

encode, decode = PIPELINE.encode, PIPELINE.decode

ABSTRACT = {
    BaseReq, base_req.SingleReq, BaseBatchReq, base_req.SpeculativeDecodingMetricsMixin,
    io_struct.BatchOfDeltas,
}  # fmt: skip
ALL = [
    kind
    for kind in vars(io_struct).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
]
TRAVELLING = list(
    dict.fromkeys(
        [
            *(kind for kind in ALL if issubclass(kind, BaseReq | BaseBatchReq) and kind not in ABSTRACT),
            *(verb.request for verb in VERBS.values()),
        ]
    )
)
INNER = [kind for kind in ALL if kind not in TRAVELLING and kind not in ABSTRACT]

TEXT = st.text(max_size=6)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return ANYTHING
    if kind is type(None):
        return st.none()
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    return {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: TEXT,
        bytes: st.binary(max_size=6),
    }[kind]


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    fields = {field.encode_name: values(field.type) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


def test_no_struct_is_left_out() -> None:
    assert set(TRAVELLING) == set(WIRE_TYPES)
    assert len(TRAVELLING) + len(INNER) + len(ABSTRACT) == len(ALL)
    assert len({kind.__struct_config__.tag for kind in WIRE_TYPES}) == len(WIRE_TYPES)


@pytest.mark.parametrize("kind", TRAVELLING, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=tries(25))
@given(data=st.data())
def test_what_travels_comes_back_the_same(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    item = data.draw(structs(kind))
    back = decode(encode(item))
    assert type(back) is kind
    assert back == item


@pytest.mark.parametrize("kind", INNER, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=tries(25))
@given(data=st.data())
def test_what_travels_inside_others_comes_back_the_same(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    item = data.draw(structs(kind))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=kind) == item


@settings(deadline=None, max_examples=tries(40))
@given(data=st.data())
def test_speculative_figures_and_their_newer_names(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 9), max_size=4))
    accepted = [data.draw(st.integers(0, 4 * count)) for count in steps]
    drafted = [count + data.draw(st.integers(0, 9)) for count in accepted]
    histogram = [[count] for count in accepted]
    item = BatchTokenIDOutput(
        outputs=[],
        rids=[str(number) for number in range(len(steps))],
        spec_verify_ct=steps,
        spec_accepted_tokens=accepted,
        spec_drafted_tokens=drafted,
        spec_acceptance_histogram=histogram,
    )
    back = decode(encode(item))
    assert isinstance(back, BatchTokenIDOutput)
    assert back.spec_num_correct_drafts == accepted
    assert back.spec_correct_drafts_histogram == histogram
    for at, count in enumerate(steps):
        length = 1 + accepted[at] / count if count else 0.0
        assert back.spec_accept_length[at] == pytest.approx(length)
        assert back.spec_accept_rate[at] * max(drafted[at], 1) == pytest.approx(accepted[at])


def a_message() -> bytes:
    outputs = [TokenOutput(rid=f"r{number}", new_ids=[number], output_logprobs=[-1.5]) for number in range(9)]
    return encode(BatchTokenIDOutput(rids=[one.rid for one in outputs], outputs=outputs))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 25, 60, len(a_message()) - 1])
def test_a_message_cut_short(length: int) -> None:
    with pytest.raises(WireError, match="truncated"):
        decode(a_message()[:length])


def test_more_than_one_message() -> None:
    with pytest.raises(WireError, match="trailing"):
        decode(a_message() + b"\x00")


def test_another_version_is_named_whatever_its_layout() -> None:
    others: list[tuple[Any, ...]] = [
        (WIRE_VERSION + 1, "HealthReq", {}),
        (WIRE_VERSION + 1, b"quite", 7, "different"),
    ]
    for other in others:
        with pytest.raises(WireError, match=f"version {WIRE_VERSION + 1}.*speaks {WIRE_VERSION}") as caught:
            decode(msgspec.msgpack.encode(other))
        assert caught.value.where == "version"


def test_an_unknown_tag_is_named() -> None:
    with pytest.raises(WireError, match=r"'Exec'.*HealthReq") as caught:
        decode(msgspec.msgpack.encode((WIRE_VERSION, "Exec", {"type": "Exec"})))
    assert caught.value.where == "tag"


def test_a_tag_that_is_not_its_structs() -> None:
    with pytest.raises(WireError, match="FlushCacheReq"):
        decode(msgspec.msgpack.encode((WIRE_VERSION, "HealthReq", {"type": "FlushCacheReq", "rid": "a"})))


def test_a_field_of_the_wrong_type_is_named() -> None:
    for body, where in (({"rid": 7}, "rid"), ({"rid": "a", "timeout_s": "soon"}, "timeout_s")):
        with pytest.raises(WireError, match=where) as caught:
            decode(msgspec.msgpack.encode((WIRE_VERSION, "FlushCacheReq", {"type": "FlushCacheReq", **body})))
        assert caught.value.where == "FlushCacheReq"


def test_too_large_is_said_on_both_sides() -> None:
    large = ControlOutput(ok=True, message="x" * 5000)
    with pytest.raises(WireError, match="at most 4096"):
        Wire(WIRE_TYPES, 4096).encode(large)
    with pytest.raises(WireError, match="at most 4096"):
        Wire(WIRE_TYPES, 4096).decode(encode(large))
    assert Wire(WIRE_TYPES, 8192).decode(encode(large)) == large


@pytest.mark.parametrize(
    "item",
    [
        ControlOutput(ok=True, message="\ud83d"),
        ControlOutput(ok=True, data={"x": object()}),
        ControlOutput(ok=True, data={"x": 2**64}),
        SamplingParams(),
        TokenOutput(rid="r", new_ids=[]),
    ],
)
def test_what_cannot_travel(item: msgspec.Struct) -> None:
    with pytest.raises(WireError, match=r"ControlOutput|does not travel"):
        encode(item)


def test_values_nested_without_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WireError):
        encode(ControlOutput(ok=True, data={"x": endless}))
    deep = b"\x91" * 100_000
    with pytest.raises(WireError):
        decode(b"\x93\x01\xadControlOutput\x82\xa2ok\xc3\xa4data\x81\xa1x" + deep)


@settings(deadline=None, max_examples=tries(300))
@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: a_message()[:40] + tail))
def test_any_bytes_are_a_struct_or_a_wire_error(data: bytes) -> None:
    try:
        item = decode(data)
    except WireError:
        return
    assert type(item) in WIRE_TYPES


def test_every_bit_of_a_message_may_break() -> None:
    good = encode(HealthReq(rid="r"))
    for at in range(len(good)):
        for bit in range(8):
            broken = bytearray(good)
            broken[at] ^= 1 << bit
            try:
                decode(bytes(broken))
            except WireError:
                continue


def test_known_tags_are_those_of_the_table() -> None:
    assert len(a_message()) < wire.MAX_BYTES
    for kind in WIRE_TYPES:
        assert kind.__name__.encode() == str(kind.__struct_config__.tag).encode()


def test_what_items_say_reads_as_parallel_lists() -> None:
    end = FinishReason(type="length")
    news = [
        TokenOutput("a", [1, 2], prompt_tokens=3, completion_tokens=2, cached_tokens=1, text="x"),
        TokenOutput("b", [7], finish=end, prompt_tokens=5, completion_tokens=9, retractions=1, text="y"),
    ]
    for made in (
        BatchTokenIDOutput(rids=["a", "b"], outputs=news),
        BatchStrOutput(rids=["a", "b"], outputs=news),
    ):
        back = decode(encode(made))
        assert isinstance(back, BatchTokenIDOutput | BatchStrOutput)
        assert back.rids == ["a", "b"]
        assert (back.output_ids, back.finished_reasons) == ([[1, 2], [7]], [None, end])
        assert (back.prompt_tokens, back.completion_tokens) == ([3, 5], [2, 9])
        assert (back.cached_tokens, back.retraction_counts) == ([1, 0], [0, 1])
    assert made.output_strs == ["x", "y"]
    vectors = BatchEmbeddingOutput(rids=["a"], outputs=[EmbeddingOutput("a", [0.5], prompt_tokens=2)])
    assert (vectors.embeddings, vectors.prompt_tokens, vectors.finished_reasons) == ([[0.5]], [2], [None])
