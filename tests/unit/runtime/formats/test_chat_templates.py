"""ChatTemplate, its styles, and the table of registered ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime.formats.chat as chat
from runtime.formats.chat import (
    ChatTemplate,
    ChatTemplateStyle,
    chat_template_registry,
    get_chat_template,
    register_chat_template,
)
from runtime.formats.chat.registry import BUILT_IN, CHAT_TEMPLATES
from runtime.protocol.registry import UnknownName
from tests.exploring import tries

DATA: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "chat_templates.json").read_text(encoding="utf-8")
)
CHATML_PAIR = {role: [f"<|im_start|>{role}\n", "<|im_end|>\n"] for role in ("system", "user", "assistant")}
# Where a registered template differs from the data file on purpose: name -> (field, what it is here).
INTENDED_DIFFERENCES: dict[str, tuple[str, Any]] = {
    # The data has the key "User", so that user turns got no prefix.
    "janus-pro": (
        "role_prefix_and_suffix",
        {**{k: v for k, v in DATA["janus-pro"]["role_prefix_and_suffix"].items() if k != "User"},
         "user": ["<｜User｜>", ""]},
    ),
    # The data opens the reply in the user's suffix, so that two user turns in a row, or a user turn at the
    # end, left an open reply behind.
    "yi-1.5": ("role_prefix_and_suffix", {**CHATML_PAIR, "system": ["", ""]}),
}  # fmt: skip
LLAMA2 = get_chat_template("llama-2-chat")

TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8)}
    ),
    max_size=6,
)


def said(*turns: tuple[str, str | None]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def as_data(template: ChatTemplate) -> dict[str, Any]:
    return {
        "default_system_prompt": template.default_system_prompt,
        "role_prefix_and_suffix": {k: list(v) for k, v in template.role_prefix_and_suffix.items()},
        "stop_str": list(template.stop_str),
        "image_token": template.image_token,
        "audio_token": template.audio_token,
        "style": template.style.name,
    }


@pytest.mark.parametrize("name", DATA)
def test_every_template_of_the_data_file(name: str) -> None:
    field, value = INTENDED_DIFFERENCES.get(name, ("", None))
    expected = {**DATA[name], field: value} if field else DATA[name]
    assert expected != DATA[name] or not field
    assert as_data(get_chat_template(name)) == expected


def test_the_data_file_has_all_27() -> None:
    assert len(DATA) == 27


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_line_of_the_table_holds_a_template_of_that_name(name: str) -> None:
    assert CHAT_TEMPLATES.load(name).name == name
    assert chat_template_registry[name] is CHAT_TEMPLATES.load(name)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@settings(max_examples=tries(25))
@given(turns=TURNS, extra=TURNS)
def test_a_longer_conversation_extends_the_shorter_ones_text(
    name: str, turns: list[dict[str, Any]], extra: list[dict[str, Any]]
) -> None:
    template = get_chat_template(name)
    assert template.get_prompt(turns + extra).startswith(template.get_prompt(turns))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_family_tells_the_speakers_apart(name: str) -> None:
    """Swapping who said what, or how often somebody spoke, must not leave the text as it is."""
    template = get_chat_template(name)
    mine, yours = said(("user", "x"), ("assistant", "y")), said(("assistant", "x"), ("user", "y"))
    assert template.get_prompt(mine) != template.get_prompt(yours)
    assert template.get_prompt(said(("user", "x"), ("user", "y"))) != template.get_prompt(
        said(("user", "xy"))
    )


def test_llama_2_goldens() -> None:
    whole = said(("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2"))
    assert LLAMA2.get_prompt(whole) == "[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST]A1 </s><s>[INST] U2 [/INST]"
    rest = "[INST] U1 [/INST]A1 </s><s>[INST] U2 [/INST]"
    assert LLAMA2.get_prompt(whole[1:]) == rest
    assert LLAMA2.get_prompt([{"role": "system", "content": None}, *whole[1:]]) == rest


def test_llama_2_prefixes() -> None:
    assert LLAMA2.get_prefix_and_suffix("system", []) == ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n")
    assert LLAMA2.get_prefix_and_suffix("user", said(("system", "S"))) == ("", " [/INST]")
    assert LLAMA2.get_prefix_and_suffix("user", said(("system", None))) == ("[INST] ", " [/INST]")
    assert LLAMA2.get_prefix_and_suffix("assistant", said(("system", "S"))) == ("", " </s><s>")


def test_two_user_turns_without_a_system_message_both_have_their_prefix() -> None:
    assert LLAMA2.get_prompt(said(("user", "a"), ("user", "b"))) == "[INST] a [/INST][INST] b [/INST]"


def test_llama_2_style_with_a_default_system_prompt() -> None:
    template = ChatTemplate(
        "t", "D", {"system": ("<", ">"), "user": ("[", "]")}, style=ChatTemplateStyle.LLAMA2
    )
    assert template.get_prompt(said(("system", None), ("user", "U"), ("user", "V"))) == "[<D>U][V]"


def test_system_without_content_takes_the_default_or_goes() -> None:
    prefixes = {"system": ("<s>", "</s>")}
    messages = said(("system", None))
    assert ChatTemplate("with", "Be kind.", prefixes).get_prompt(messages) == "<s>Be kind.</s>"
    assert ChatTemplate("without", None, prefixes).get_prompt(messages) == ""


def test_without_a_system_message_there_is_no_default_prompt() -> None:
    assert get_chat_template("qwen").get_prompt(said(("user", "U"))) == "<|im_start|>user\nU<|im_end|>\n"


def test_unlisted_roles_have_no_prefix_and_absent_text_is_empty() -> None:
    template = get_chat_template("chatml")
    assert template.get_prefix_and_suffix("critic", []) == ("", "")
    assert (
        template.get_prompt(said(("critic", "!"), ("assistant", None)))
        == "!<|im_start|>assistant\n<|im_end|>\n"
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"chatml.*llama-3-instruct") as caught:
        get_chat_template("no-such-family")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(KeyError):
        chat_template_registry["no-such-family"]


@pytest.fixture
def clean_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHAT_TEMPLATES, "_templates", dict(BUILT_IN))


@pytest.mark.usefixtures("clean_table")
def test_a_registered_template_is_found() -> None:
    mine = ChatTemplate("house", None, {"user": ("> ", "\n")})
    assert register_chat_template(mine) is mine
    assert get_chat_template("house") is mine
    assert "house" in chat_template_registry
    assert "house" in list(chat_template_registry)
    assert len(chat_template_registry) == len(BUILT_IN) + 1
    register_chat_template(ChatTemplate("house", None, {"user": ("> ", "\n")}))  # the same again
    other = ChatTemplate("house", None, {"user": ("# ", "\n")})
    with pytest.raises(ValueError, match="house"):
        register_chat_template(other)
    register_chat_template(other, replace=True)
    assert get_chat_template("house") is other


@pytest.mark.usefixtures("clean_table")
def test_a_built_in_is_not_replaced_by_accident() -> None:
    with pytest.raises(ValueError, match="chatml"):
        register_chat_template(ChatTemplate("chatml", None, {}))
    assert get_chat_template("chatml").role_prefix_and_suffix


@pytest.mark.parametrize("name", chat.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(chat, name) is not None


def test_a_name_that_is_not_public() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        getattr(chat, "nothing_here")  # noqa: B009 - the module's own __getattr__ is under test
