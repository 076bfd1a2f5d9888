"""Faults in a client's own words, and tokens as OpenAI's clients read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol.errors import BadRequest, PromptTooLong, QueueFull
from runtime.protocol.io_struct import OutputDelta
from runtime.protocol.vocabulary import Vocabulary
from runtime.server.http.errors import mapped, mapped_errors
from runtime.server.openai.logprobs import UNKNOWN, spelled, token_entries

WORDS = {"max_new_tokens": "max_tokens", "stop": "stop_sequences", "text": "prompt"}
BYTES = Vocabulary((*(bytes([value]) for value in range(256)), "한".encode(), b""))


@pytest.mark.parametrize(
    ("where", "message", "told"),
    [
        ("sampling_params.max_new_tokens", "max_new_tokens must be 1", "max_tokens must be 1"),
        ("sampling_params[3].stop", "stop must be short", "stop_sequences must be short"),
        ("sampling_params.temperature", "is odd", "temperature: is odd"),
        ("text[2]", "is empty", "prompt[2]: is empty"),
        ("messages[1].role", "text of it", "messages[1].role: text of it"),
        (None, "10 of max_new_tokens", "10 of max_tokens"),
    ],
)
def test_names_are_the_clients(where: str | None, message: str, told: str) -> None:
    fault = mapped(BadRequest(message, where=where, hint="lower max_new_tokens"), WORDS)
    assert type(fault) is BadRequest
    assert str(fault) == f"{told} (lower max_tokens)"


def test_a_prompt_that_is_too_long_is_what_clients_look_for() -> None:
    with pytest.raises(PromptTooLong) as caught, mapped_errors(WORDS, 2048):
        raise PromptTooLong("the prompt has 3000 tokens", where="prompt")
    assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
    assert str(caught.value).startswith("This model's maximum context length is 2048 tokens: the prompt has")
    with pytest.raises(QueueFull, match=r"^busy$"), mapped_errors(WORDS, 2048):
        raise QueueFull("busy")
    with pytest.raises(ZeroDivisionError), mapped_errors(WORDS):
        _ = 1 / 0


def test_parts_of_characters_have_names_of_their_own() -> None:
    assert spelled(BYTES, ord("a"), "a") == ("a", b"a")
    assert spelled(BYTES, 256, "한") == ("한", "한".encode())
    assert spelled(BYTES, 0xED, "\ufffd") == ("bytes:\\xed", b"\xed")
    assert spelled(BYTES, 257, "<end>") == ("<end>", b"<end>")
    assert spelled(BYTES, 9999, None) == ("token_id:9999", b"token_id:9999")


@given(text=st.text(max_size=12), first=st.integers(0, 4))
def test_the_bytes_of_all_tokens_are_those_of_the_text(text: str, first: int) -> None:
    ids = list(text.encode("utf-8", "replace"))
    tokens = [[-float(at), one, None] for at, one in enumerate(ids)]
    meta = {"output_token_logprobs": tokens, "output_top_logprobs": []}
    entries = token_entries(OutputDelta(text, ids, meta, replaced=first), BYTES)
    assert [one["logprob"] for one in entries] == [-float(at) for at in range(first, len(ids))]
    assert [byte for one in entries for byte in one["bytes"]] == ids[first:]


def test_no_probability_is_a_number_all_the_same() -> None:
    output = OutputDelta("a", [97], {"output_token_logprobs": [[None, 97, "a"]]})
    assert token_entries(output, BYTES)[0]["logprob"] == UNKNOWN
