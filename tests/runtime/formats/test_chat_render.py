"""Messages -> prompt text: raw text, open turns, increments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.render import TextTemplate, conversation, render_prompt
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import TemplateError
from runtime.protocol.messages import RAW_ROLE, Message, ToolCall

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
LAST_TURN_DIFFERS = "{% for m in messages %}{{ m.content if loop.last else '(old)' }}{% endfor %}"

JINJA = JinjaChatTemplate({"default": CHATML})
PLAIN = get_chat_template("chatml")
BOTH = pytest.mark.parametrize("template", [JINJA, PLAIN], ids=["jinja", "prefixes"])


def raw(text: str) -> Message:
    return Message(RAW_ROLE, text)


def test_raw_text_needs_no_template() -> None:
    assert render_prompt([raw("Once"), raw(" upon"), raw("")], None) == "Once upon"


def test_turns_without_a_template_name_the_ways_out() -> None:
    with pytest.raises(TemplateError, match=r"user.*chat template") as caught:
        render_prompt([Message("user", "hi")], None)
    assert "chatml" in str(caught.value)
    assert ".jinja" in str(caught.value)


@BOTH
def test_open_turns_of_any_role(template: ChatTemplate | TextTemplate) -> None:
    asked = Message("user", "Hi")
    head = "<|im_start|>user\nHi<|im_end|>\n"
    assert render_prompt([asked], template) == head
    for role in ("assistant", "user", "system"):
        for text in ("", "Well, ", " spaced "):
            got = render_prompt([asked, Message(role, text, open=True)], template)
            assert got == f"{head}<|im_start|>{role}\n{text}"
            alone = render_prompt([Message(role, text, open=True)], template)
            assert alone == f"<|im_start|>{role}\n{text}"


@BOTH
def test_raw_text_stands_between_turns(template: ChatTemplate | TextTemplate) -> None:
    messages = [raw("A"), Message("user", "U"), raw("B"), raw("C"), Message("assistant", "x", open=True)]
    assert render_prompt(messages, template) == "A<|im_start|>user\nU<|im_end|>\nBC<|im_start|>assistant\nx"
    assert render_prompt(messages[:-1], template) == "A<|im_start|>user\nU<|im_end|>\nBC"


def test_begin_of_text_goes_before_raw_text() -> None:
    template = JinjaChatTemplate({"default": NO_GENERATION_PROMPT}, {"bos_token": "<s>"})
    messages = [raw("A"), Message("user", "U"), raw("B"), Message("user", "V")]
    assert render_prompt(messages, template) == "<s>A[user]U</s>B[user]V</s>"


def test_a_template_without_generation_prompt() -> None:
    template = JinjaChatTemplate({"default": NO_GENERATION_PROMPT})
    asked = Message("user", "U")
    assert render_prompt([asked, Message("assistant", open=True)], template) == "[user]U</s>[assistant]"
    assert (
        render_prompt([asked, Message("assistant", "Yes ", open=True)], template)
        == "[user]U</s>[assistant]Yes "
    )


def test_a_template_that_only_puts_a_space_before_the_reply() -> None:
    template = JinjaChatTemplate({"default": LLAMA_2})
    asked = Message("user", "U")
    assert render_prompt([asked, Message("assistant", open=True)], template) == "[INST] U [/INST]"
    # What the model wrote there begins with its own space.
    assert render_prompt([asked, Message("assistant", " Yes", open=True)], template) == "[INST] U [/INST] Yes"
    # What the user wrote does not.
    assert render_prompt([asked, Message("assistant", "Yes", open=True)], template) == "[INST] U [/INST] Yes"


def test_a_prefilled_reply_is_what_transformers_continues() -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "Well, "},
    ]
    theirs, _ = render_jinja_template(conversations=[talk], chat_template=CHATML, continue_final_message=True)
    messages = [Message("user", "U"), Message("assistant", "Well, ", open=True)]
    assert render_prompt(messages, JINJA).rstrip() == theirs[0].rstrip()


def test_templates_that_rewrite_earlier_turns_cannot_hold_raw_text() -> None:
    template = JinjaChatTemplate({"default": LAST_TURN_DIFFERS})
    assert render_prompt([Message("user", "U"), Message("user", "V")], template) == "(old)V"
    with pytest.raises(TemplateError, match="append-only"):
        render_prompt([Message("user", "U"), raw("B"), Message("user", "V")], template)


def test_a_turn_the_template_drops_cannot_be_left_open() -> None:
    template = JinjaChatTemplate(
        {"default": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"}
    )
    with pytest.raises(TemplateError, match="cannot be left open"):
        render_prompt([Message("user", "U"), Message("critic", "", open=True)], template)


def test_only_the_last_turn_may_be_open() -> None:
    with pytest.raises(TemplateError) as caught:
        render_prompt([Message("user", "U", open=True), Message("user", "V")], PLAIN)
    assert caught.value.where == "messages[0]"


def test_parts_must_be_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_prompt([Message(RAW_ROLE, parts)], None) == "a b"
    with pytest.raises(TemplateError, match="image_url"):
        render_prompt([Message("user", [{"type": "image_url", "image_url": {"url": "x"}}])], PLAIN)


def test_what_prefixes_cannot_say_is_refused() -> None:
    asked = Message("user", "U")
    with pytest.raises(TemplateError, match="tools"):
        render_prompt([asked], PLAIN, tools=[{"type": "function"}])
    with pytest.raises(TemplateError, match="variables"):
        render_prompt([asked], PLAIN, template_kwargs={"enable_thinking": False})
    with pytest.raises(TemplateError, match="tool calls"):
        render_prompt([Message("assistant", "", tool_calls=(ToolCall("f", "{}"),))], PLAIN)


def test_tool_calls_reach_the_template_as_objects() -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.x + 1 }}{% endfor %}"
    message = Message("assistant", "", tool_calls=(ToolCall("f", '{"x": 41}'),))
    assert render_prompt([message], JinjaChatTemplate({"default": source})) == "42"


CONTENT = st.text(max_size=8).filter(lambda text: "\ue000" not in text)
TURN = st.builds(Message, st.sampled_from(["system", "user", "assistant", RAW_ROLE]), CONTENT)


@given(messages=st.lists(TURN, max_size=6), text=CONTENT, more=CONTENT)
def test_jinja_and_prefixes_agree_and_a_growing_turn_extends_itself(
    messages: list[Message], text: str, more: str
) -> None:
    begun = [*messages, Message("assistant", text, open=True)]
    grown = [*messages, Message("assistant", text + more, open=True)]
    closed = [*messages, Message("assistant", text + more), Message("user", "next")]
    for template in (JINJA, PLAIN):
        assert render_prompt(grown, template) == render_prompt(begun, template) + more
        assert render_prompt(closed, template).startswith(render_prompt(grown, template))
    assert render_prompt(closed, JINJA) == render_prompt(closed, PLAIN)


READS_WRAPPED = "{% for t in tools %}{{ t.function.name + '' }}{% endfor %}"
READS_BARE = (
    "{% for t in tools %}{% if t.function %}{{ raise_exception('bare ones only') }}{% endif %}"
    "{{ t.name }}{% endfor %}"
)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize("source", [READS_WRAPPED, READS_BARE])
@pytest.mark.parametrize("tool", [FUNCTION, {"type": "function", "function": FUNCTION}])
def test_tools_in_the_shape_that_the_template_takes(source: str, tool: dict[str, Any]) -> None:
    assert render_prompt([Message("user", "U")], JinjaChatTemplate({"default": source}), tools=[tool]) == "f"


def test_a_template_that_takes_tools_in_no_shape_says_its_first_reason() -> None:
    source = "{{ raise_exception('wrapped' if tools[0].function else 'bare') }}"
    with pytest.raises(TemplateError, match="wrapped"):
        render_prompt([Message("user", "U")], JinjaChatTemplate({"default": source}), tools=[FUNCTION])


@pytest.mark.parametrize("read", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("said", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("value", [True, False])
def test_thinking_is_said_by_the_name_that_the_template_reads(read: str, said: str, value: bool) -> None:
    template = JinjaChatTemplate({"default": f"{{{{ {read} }}}}"})
    assert render_prompt([Message("user", "U")], template, template_kwargs={said: value}) == str(value)


def test_force_reasoning() -> None:
    opens = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    shut = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think></think>' }}{% endif")
    assert JinjaChatTemplate({"default": opens}).force_reasoning
    assert not JinjaChatTemplate({"default": shut}).force_reasoning
    assert not JINJA.force_reasoning


def test_a_request_opens_a_reply_or_continues_the_last_turn() -> None:
    talk = [Message("user", "U"), Message("assistant", "Well")]
    assert render_prompt(conversation(talk[:1]), JINJA).endswith("<|im_start|>assistant\n")
    assert render_prompt(conversation(talk, continue_final_message=True), JINJA).endswith("assistant\nWell")
    assert render_prompt(conversation(talk, add_generation_prompt=False), JINJA).endswith("Well<|im_end|>\n")
    with pytest.raises(TemplateError, match="no last turn"):
        conversation([], continue_final_message=True)
