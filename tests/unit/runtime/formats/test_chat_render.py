"""Messages -> prompt text: raw text, open turns, increments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.render import TemplateLimit, TextTemplate, conversation, render_prompt
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import TemplateError
from runtime.protocol.messages import RAW_ROLE, Message, ToolCall

DATA = Path(__file__).parent / "data"
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


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_prompt([Message(RAW_ROLE, parts)], None) == "a b"
    assert render_prompt([Message("user", parts)], PLAIN) == render_prompt([Message("user", "a b")], PLAIN)


@BOTH
def test_a_text_cannot_hold_media(template: ChatTemplate | TextTemplate) -> None:
    with pytest.raises(TemplateError, match="image_url") as caught:
        render_prompt([Message("user", [{"type": "image_url", "image_url": {"url": "x"}}])], template)
    assert caught.value.where == "messages[0].content[0]"


def test_what_looks_like_the_renderers_own_mark_is_text() -> None:
    odd = "\ue000open-turn\ue001"
    for template in (JINJA, PLAIN):
        got = render_prompt([Message("user", odd), Message("user", odd, open=True)], template)
        assert got == f"<|im_start|>user\n{odd}<|im_end|>\n<|im_start|>user\n{odd}"


def test_thinking_is_switched_on_and_off() -> None:
    ending = "{% if add_generation_prompt %}<assistant>{% if not enable_thinking | default(true) %}"
    template = JinjaChatTemplate(
        {"default": "{{ messages[0].content }}" + ending + "<think></think>{% endif %}{% endif %}"}
    )
    asked = conversation([Message("user", "U")])
    assert render_prompt(asked, template) == "U<assistant>"
    assert render_prompt(asked, template, template_kwargs={"enable_thinking": True}) == "U<assistant>"
    assert (
        render_prompt(asked, template, template_kwargs={"enable_thinking": False})
        == "U<assistant><think></think>"
    )


@pytest.mark.parametrize("own", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_with_a_field_of_its_own_is_not_silently_ignored(own: str) -> None:
    with pytest.raises(TemplateError, match=own) as caught:
        render_prompt([Message("user", "U")], JINJA, template_kwargs={own: True})
    assert caught.value.where == "template_kwargs"


def test_a_templates_own_message_is_a_bad_request() -> None:
    source = "{% if messages[0].role == 'system' %}\n{{ raise_exception('no system here') }}{% endif %}"
    with pytest.raises(TemplateError, match="no system here") as caught:
        render_prompt([Message("system", "S")], JinjaChatTemplate({"default": source}))
    assert (caught.value.status, caught.value.where) == (400, "chat_template:2")


@pytest.mark.parametrize("arguments", ["{", "", "[" * 5000, "9" * 5000, "NaN", '{"x": "\\ud800"}'])
def test_arguments_that_are_no_json_stay_as_they_are(arguments: str) -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | length }}{% endfor %}"
    message = Message("assistant", "", tool_calls=(ToolCall("f", arguments),))
    if arguments in ("NaN", '{"x": "\\ud800"}'):
        source = source.replace(" | length", " is defined")
        assert render_prompt([message], JinjaChatTemplate({"default": source})) == "True"
    else:
        assert render_prompt([message], JinjaChatTemplate({"default": source})) == str(len(arguments))


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


@pytest.mark.parametrize("source", [CHATML, NO_GENERATION_PROMPT, LLAMA_2, LAST_TURN_DIFFERS])
def test_a_known_opening_changes_no_prompt(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """It only spares a rendering."""
    template = JinjaChatTemplate({"default": source})
    texts = ("U", "", "<|im_start|>assistant\n", "</s>")
    turns = [Message(role, text) for text in texts for role in ("user", "assistant", "system")]
    talks = [[], *([one] for one in turns), turns[:2], turns[:3], turns[3:7]]

    def prompts() -> list[str]:
        made = []
        for talk in talks:
            try:
                made.append(render_prompt(conversation(talk), template))
            except TemplateError as error:
                made.append(str(error))
        return made

    found = prompts()
    assert (template.opening != "") == (source == CHATML)
    monkeypatch.setattr(JinjaChatTemplate, "opening", "")
    template = JinjaChatTemplate({"default": source})
    assert prompts() == found


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


NO_LONE_SYSTEM = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user turn') }}{% endif %}" + CHATML
)


def test_an_open_turn_after_what_the_template_refuses_on_its_own() -> None:
    template = JinjaChatTemplate({"default": NO_LONE_SYSTEM})
    begun = [Message("system", "S"), Message("user", "U", open=True)]
    assert render_prompt(begun, template) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU"
    # With nothing that it takes, its own words are told.
    with pytest.raises(TemplateError, match="no user turn"):
        render_prompt([Message("system", "S"), Message("assistant", open=True)], template)


ALWAYS_OPENS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<|says|>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
)


@pytest.mark.parametrize("before", [["user"], ["system", "user"], ["user", "assistant", "user"]])
@pytest.mark.parametrize("text", ["", "Well, ", " Yes"])
@pytest.mark.parametrize("opening", ["<|assistant|>", "<|assistant|>\n", "<|assistant|><|says|>"])
def test_a_template_that_opens_replies_unasked(before: list[str], text: str, opening: str) -> None:
    template = JinjaChatTemplate({"default": ALWAYS_OPENS + f"{{{{ {opening!r} }}}}"})
    asked = [Message(role, f"{role} says {index}") for index, role in enumerate(before)]
    begun = [*asked, Message("assistant", text, open=True)]
    assert render_prompt(begun, template) == render_prompt(asked, template) + text
    assert render_prompt(begun, template).endswith(f"<|end|>{opening}{text}")
    # A turn of another role is no reply.
    more = [*asked, Message("user", text, open=True)]
    assert render_prompt(more, template).endswith(f"<|end|><|user|>{text}")


@pytest.mark.parametrize("name", ["glm-4.7", "qwen3"])
def test_reasoning_is_the_templates_to_show(name: str) -> None:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    template = JinjaChatTemplate({"default": source})
    reply = Message("assistant", "A", reasoning_content="because")
    asked = Message("user", "U")
    assert "<think>" in render_prompt([asked, reply], template)
    assert "because" in render_prompt([asked, reply], template)
    assert "because" not in render_prompt([asked, reply, asked], template)
    kept = render_prompt([asked, reply, asked], template, template_kwargs={"clear_thinking": False})
    assert ("because" in kept) is (name == "glm-4.7")


def test_a_reply_that_thought_can_be_continued() -> None:
    thought = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"
    source = CHATML.replace("m['content']", f"{thought} + m['content']")
    begun = [Message("user", "U"), Message("assistant", "We", open=True, reasoning_content="why")]
    text = render_prompt(begun, JinjaChatTemplate({"default": source}))
    assert text.endswith("<|im_start|>assistant\n<think>why</think>We")


def test_prefixes_have_no_place_for_reasoning() -> None:
    talk = [Message("user", "U"), Message("assistant", "A", reasoning_content="because")]
    assert render_prompt(talk, PLAIN) == render_prompt([talk[0], Message("assistant", "A")], PLAIN)


class Slow:
    """Renders in no time, by a clock of its own in 0.6 s."""

    bos_token = ""
    opening = ""
    rendered = 0

    def thread_time(self) -> float:
        return self.rendered * 0.6

    def render(self, messages: Sequence[Mapping[str, Any]], **words: Any) -> str:
        self.rendered += 1
        return "".join(f"[{message['role']}]{message['content']}" for message in messages)


@pytest.mark.parametrize("tools", [None, [FUNCTION]])
def test_all_renderings_of_a_prompt_have_one_limit(
    monkeypatch: pytest.MonkeyPatch, tools: list[dict[str, Any]] | None
) -> None:
    slow = Slow()
    monkeypatch.setattr("runtime.formats.chat.render.time", slow)
    asked = [Message("user", "U"), Message("assistant", open=True)]
    with pytest.raises(TemplateLimit, match="one prompt") as caught:
        render_prompt(asked, slow, tools=tools)
    assert (caught.value.status, slow.rendered) == (400, 2)
    assert render_prompt(asked[:1], slow, tools=tools) == "[user]U"
