"""Earlier reasoning in a chat request's messages reaches the conversation."""

from __future__ import annotations

import pytest

from runtime.protocol.errors import BadRequest
from runtime.server.openai.messages import messages_of


def test_an_assistants_reasoning_is_passed() -> None:
    reply = {"role": "assistant", "content": "A", "reasoning_content": "because"}
    (made,) = messages_of([reply])
    assert (made.content, made.reasoning_content) == ("A", "because")
    (plain,) = messages_of([{**reply, "reasoning_content": None}])
    assert plain.reasoning_content is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "U", "reasoning_content": "because"},
        {"role": "assistant", "content": "A", "reasoning_content": ["because"]},
    ],
)
def test_reasoning_elsewhere_or_of_another_type_is_an_error(message: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as caught:
        messages_of([message])
    assert caught.value.where == "messages[0].reasoning_content"
