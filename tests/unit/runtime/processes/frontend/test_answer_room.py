"""The room that an answer has for what it tells besides text."""

from __future__ import annotations

import pytest

from runtime.processes.frontend.request_state import ENTRY_BYTES, NUMBER_BYTES, AnswerBudget, size_of
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import TokenOutput


def test_what_an_output_takes() -> None:
    assert size_of(TokenOutput(rid="a", new_ids=[1, 2])) == 0
    told = TokenOutput(
        rid="a",
        new_ids=[1, 2],
        output_logprobs=[-1.0, -2.0],
        output_top_logprobs=[[(1, -1.0), (2, -2.0)], [(1, -1.0), (2, -2.0)]],
        output_token_ids_logprobs=[[(7, -1.0)], [(7, -1.0)]],
        input_logprobs=[None, -1.0],
        input_top_logprobs=[[], [(1, -1.0), (2, -2.0)]],
        hidden_states=[[0.5] * 8, [0.5] * 8],
    )
    assert size_of(told) == ENTRY_BYTES * (2 + 4 + 2 + 2 + 2) + NUMBER_BYTES * 16


def test_the_room_is_shared() -> None:
    room = AnswerBudget(100)
    room.take(60)
    room.take(40)
    with pytest.raises(BadRequest, match="max_answer_bytes"):
        room.take(1)
    AnswerBudget(None).take(1 << 40)
