"""ChatTemplate and the table of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.chat.registry import CHAT_TEMPLATES, get_chat_template
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.registry import UnknownName

TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}
    ),
    max_size=6,
)


def test_chatml_writes_the_familys_marks() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert get_chat_template("chatml").get_prompt(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    )


def test_llama_3_writes_headers() -> None:
    assert get_chat_template("llama-3-instruct").get_prompt([{"role": "user", "content": "U"}]) == (
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    )


def test_system_without_content_takes_the_default_or_goes() -> None:
    prefixes = {"system": ("<s>", "</s>")}
    messages: list[dict[str, Any]] = [{"role": "system", "content": None}]
    assert ChatTemplate("with", "Be kind.", prefixes).get_prompt(messages) == "<s>Be kind.</s>"
    assert ChatTemplate("without", None, prefixes).get_prompt(messages) == ""


@pytest.mark.parametrize("name", CHAT_TEMPLATES.names())
@given(turns=TURNS, extra=TURNS)
def test_a_longer_conversation_extends_the_shorter_ones_text(
    name: str, turns: list[dict[str, Any]], extra: list[dict[str, Any]]
) -> None:
    template = get_chat_template(name)
    assert template.get_prompt(turns + extra).startswith(template.get_prompt(turns))


@pytest.mark.parametrize("name", CHAT_TEMPLATES.names())
def test_every_line_of_the_table_holds_a_template_of_that_name(name: str) -> None:
    assert CHAT_TEMPLATES.load(name).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"chatml.*llama-3-instruct"):
        get_chat_template("no-such-family")
