"""Which content a template reads, by role: tables of templates, and that no text makes the probing fail."""

# ruff: noqa: E501 - a table of templates

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat import detect_jinja_template_content_format as detect
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.render import render
from runtime.protocol.messages import Message
from tests.exploring import tries

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*.jinja"))


def in_loop(body: str, name: str = "message", of: str = "messages") -> str:
    return f"{{% for {name} in {of} %}}{body}{{% endfor %}}"


PARTS = "{{ c.text }}{% endfor %}"
OPENAI = {
    "item": in_loop("{% for c in message['content'] %}" + PARTS),
    "attribute": in_loop("{% for c in message.content %}" + PARTS),
    "msg": in_loop("{% for c in msg.content %}" + PARTS, "msg"),
    "m": in_loop("{% for c in m.content %}" + PARTS, "m"),
    "message by name alone": "{% for c in message['content'] %}" + PARTS,
    "any loop variable": in_loop("{% for c in turn.content %}" + PARTS, "turn"),
    "unpacked loop variable": "{% for role, g in messages | groupby('role') %}{% for x in g %}"
    "{% for c in x.content %}" + PARTS + "{% endfor %}{% endfor %}",
    "aliased messages": "{% set talk = messages[1:] %}" + in_loop("{% for c in t.content %}" + PARTS, "t", "talk"),
    "messages chosen in branches": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}" + in_loop("{% for c in x.content %}" + PARTS, "x", "rest"),
    "first message": "{% for c in messages[0]['content'] %}" + PARTS,
    "last message by filter": "{% for c in (messages | last).content %}" + PARTS,
    "message by index": "{% for i in range(messages | length) %}{% for c in messages[i].content %}" + PARTS
    + "{% endfor %}",
    "set": in_loop("{% set content = message['content'] %}{% for c in content %}" + PARTS),
    "set of set": in_loop("{% set a = message.content %}{% set b = a %}{% for c in b %}" + PARTS),
    "set of the message": in_loop("{% set m2 = message %}{% for c in m2.content %}" + PARTS),
    "set in a branch": in_loop(
        "{% if message.content is string %}{% set k = [] %}{% elif true %}{% set k = message.content %}"
        "{% endif %}{% for c in k %}" + PARTS
    ),
    "set two at once": in_loop("{% set a, b = message.role, message.content %}{% for c in b %}" + PARTS),
    "with": in_loop("{% with parts = message.content %}{% for c in parts %}" + PARTS + "{% endwith %}"),
    "namespace": "{% set ns = namespace(parts=[]) %}"
    + in_loop("{% set ns.parts = message.content %}{% for c in ns.parts %}" + PARTS),
    "namespace set further down": "{% set ns = namespace(parts=[]) %}"
    + in_loop("{% for c in ns.parts %}" + PARTS + "{% set ns.parts = message.content %}"),
    "namespace at birth": "{% set ns = namespace(p=messages[0].content) %}{% for c in ns.p %}" + PARTS,
    "mapping": in_loop("{% set d = {'parts': message.content} %}{% for c in d['parts'] %}" + PARTS),
    "get": in_loop("{% for c in message.get('content') %}" + PARTS),
    "get with default": in_loop("{% for c in message.get('content', []) or [] %}" + PARTS),
    "key in a variable": "{% set key = 'content' %}" + in_loop("{% for c in message[key] %}" + PARTS),
    "keys in a list": in_loop("{% for k in ['role', 'content'] %}{% for c in message[k] %}" + PARTS + "{% endfor %}"),
    "list filter": in_loop("{% for c in message['content'] | list %}" + PARTS),
    "two filters": in_loop("{% for c in message.content | selectattr('type', 'equalto', 'text') | list %}" + PARTS),
    "default filter": in_loop("{% for c in message.content | default([]) %}" + PARTS),
    "content as a default": in_loop("{% for c in message.parts | default(message.content) %}" + PARTS),
    "filter without a loop": in_loop("{{ message.content | map(attribute='text') | join }}"),
    "join by attribute": in_loop("{{ message.content | join('', attribute='text') }}"),
    "contents of all": "{% for content in messages | map(attribute='content') %}{% for c in content %}" + PARTS
    + "{% endfor %}",
    "test": in_loop("{% for c in message.content is iterable %}" + PARTS),
    "slice": in_loop("{% for c in message['content'][:2] %}" + PARTS),
    "inline if": in_loop("{% for c in (message.content if message.content is not string else []) %}" + PARTS),
    "or": in_loop("{% for c in message.content or [] %}" + PARTS),
    "concatenation": in_loop("{% for c in [{'type': 'text', 'text': 'a'}] + message.content %}" + PARTS),
    "is string, else for": in_loop(
        "{% if message.content is string %}{{ message.content }}{% else %}{% for c in message.content %}"
        + PARTS + "{% endif %}"
    ),
    "loop with a test": in_loop("{% for c in message.content if c.type == 'text' %}" + PARTS),
    "loop else": in_loop("{% for t in message.tools %}{% else %}{% for c in message.content %}" + PARTS + "{% endfor %}"),
    "previous item": in_loop("{% for c in loop.previtem.content %}" + PARTS),
    "macro": "{% macro r(x) %}{% for c in x %}" + PARTS + "{% endmacro %}" + in_loop("{{ r(message.content) }}"),
    "macro after its use": "{% macro a(x) %}{{ b(x) }}{% endmacro %}{% macro b(y) %}{% for c in y %}" + PARTS
    + "{% endmacro %}" + in_loop("{{ a(message.content) }}"),
    "macro of the message": "{% macro r(it) %}{% for c in it['content'] %}" + PARTS + "{% endmacro %}"
    + in_loop("{{ r(turn) }}", "turn"),
    "macro by keyword": "{% macro r(a, b=none) %}{% for c in b %}" + PARTS + "{% endmacro %}"
    + in_loop("{{ r(1, b=message.content) }}"),
    "macro default": "{% macro r(a=messages[0].content) %}{% for c in a %}" + PARTS + "{% endmacro %}{{ r() }}",
    "macro varargs": "{% macro r() %}{% for v in varargs %}{% for c in v %}" + PARTS + "{% endfor %}{% endmacro %}"
    + in_loop("{{ r('', message.content) }}"),
    "macro kwargs": "{% macro r() %}{% for c in kwargs.p %}" + PARTS + "{% endmacro %}"
    + in_loop("{{ r(p=message.content) }}"),
    "macro by another name": "{% macro r(x) %}{% for c in x %}" + PARTS + "{% endmacro %}{% set show = r %}"
    + in_loop("{{ show(message.content) }}"),
    "macro, unpacked": "{% macro r(x) %}{% for c in x %}" + PARTS + "{% endmacro %}"
    + in_loop("{{ r(*[message.content]) }}"),
    "macro within a macro": "{% macro out(x) %}{% macro inn(y) %}{% for c in y %}" + PARTS
    + "{% endmacro %}{{ inn(x.content) }}{% endmacro %}" + in_loop("{{ out(message) }}"),
    "three macros deep": "{% macro a(x) %}{% for c in x %}" + PARTS + "{% endmacro %}{% macro b(x) %}{{ a(x) }}"
    "{% endmacro %}{% macro d(x) %}{{ b(x=x['content']) }}{% endmacro %}" + in_loop("{{ d(turn) }}", "turn"),
    "macro that calls itself": "{% macro a(x, n) %}{% if n %}{{ a(x, n - 1) }}{% else %}{% for c in x %}" + PARTS
    + "{% endif %}{% endmacro %}" + in_loop("{{ a(message.content, 3) }}"),
    "namespace called content": "{% set ns = namespace(content=none) %}"
    + in_loop("{% set ns.content = message.content %}{% for c in ns.content %}" + PARTS),
    "namespace of the message": "{% set ns = namespace(turn=none) %}"
    + in_loop("{% set ns.turn = message %}{% for c in ns.turn.content %}" + PARTS),
    "namespace of the messages": "{% set ns = namespace(rest=messages[1:]) %}"
    + in_loop("{% for c in t.content %}" + PARTS, "t", "ns.rest"),
    "namespace in a macro": "{% set ns = namespace(x=none) %}{% macro r() %}{% for c in ns.x %}" + PARTS
    + "{% endmacro %}" + in_loop("{% set ns.x = message.content %}{{ r() }}"),
    "call block within a call block": "{% macro o(x) %}{{ caller(x) }}{% endmacro %}"
    + in_loop("{% call(a) o(message) %}{% call(b) o(a.content) %}{% for c in b %}" + PARTS + "{% endcall %}{% endcall %}"),
    "inline if of a message": in_loop("{% for c in (message if message.role else messages[0]).content %}" + PARTS),
    "inline if without else": in_loop("{% for c in (message.content if message.content is iterable) %}" + PARTS),
    "odd loop variable": in_loop("{% for c in _0xF['content'] %}" + PARTS, "_0xF"),
    "loop variable called content": "{% for content in messages %}{% for c in content.content %}" + PARTS + "{% endfor %}",
    "loop variable called like a tool": in_loop("{% for c in tool.content %}" + PARTS, "tool"),
    "shadowed macro parameter": "{% macro r(message) %}{% set message = message.content %}{% for c in message %}"
    + PARTS + "{% endmacro %}" + in_loop("{{ r(message) }}"),
    "include beside it": "{% include 'head.jinja' %}" + in_loop("{% for c in message.content %}" + PARTS),
    "import beside it": "{% import 'parts.jinja' as parts %}{% from 'x.jinja' import show with context %}"
    + in_loop("{{ show(message) }}{% for c in message.content %}" + PARTS),
    "in a block": "{% block turns %}" + in_loop("{% for c in message.content %}" + PARTS) + "{% endblock %}",
    "in a filter block": in_loop("{% filter trim %}{% for c in message.content %}" + PARTS + "{% endfilter %}"),
    "in a block set": in_loop("{% set t %}{% for c in message.content %}" + PARTS + "{% endset %}{{ t }}"),
    "in autoescape": "{% autoescape true %}" + in_loop("{% for c in message.content %}" + PARTS) + "{% endautoescape %}",
    "items of the message": in_loop("{% for c in dict(message).content %}" + PARTS),
    "reversed": in_loop("{% for c in message.content | reverse %}" + PARTS, of="messages | reverse"),
    "batched messages": "{% for pair in messages | batch(2) %}{% for x in pair %}{% for c in x.content %}" + PARTS
    + "{% endfor %}{% endfor %}",
    "negative index": "{% for c in messages[-1]['content'] %}" + PARTS,
    "caller": "{% macro each(x) %}{{ caller(x.content) }}{% endmacro %}"
    + in_loop("{% call(parts) each(message) %}{% for c in parts %}" + PARTS + "{% endcall %}"),
    "call block": "{% macro box(x) %}{{ caller() }}{% for c in x %}" + PARTS + "{% endmacro %}"
    + in_loop("{% call box(message.content) %}-{% endcall %}"),
    "generation": in_loop("{% generation %}{% for c in message.content %}" + PARTS + "{% endgeneration %}"),
    "loop controls": in_loop("{% if loop.first %}{% continue %}{% endif %}{% for c in message.content %}"
                             "{% if c.type != 'text' %}{% break %}{% endif %}" + PARTS),
    "globals of templates": "{% if not messages %}{{ raise_exception('none') }}{% endif %}{{ strftime_now('%d') }}"
    "{{ tools | tojson(indent=4) }}" + in_loop("{%- for c in message.content -%}" + PARTS),
    "whitespace control": in_loop("{%-  for c in message [ 'content' ]  -%}" + PARTS),
    "keyword image": "{% if message.type == 'image' %}<image>{% endif %}",
    "keyword in an identifier": "{{ part['image_url'] }}",
    "keyword in a token": "<|vision_start|>",
    "keyword in a camel name": "{{ part.videoUrl }}",
    "keyword with a number": "<audio1>",
    "keyword, several": "{{ images | length }}",
    "keyword and broken": "{% for %} video",
}  # fmt: skip
STRING = {
    "empty": "",
    "blank": " \n ",
    "plain text": "You read the content of a message.",
    "text content": in_loop("{{ message['role'] }}: {{ message['content'] }}"),
    "trimmed": in_loop("{{ message.content | trim }}"),
    "revision": in_loop("revision provision supervision {{ message.content }}"),
    "division": "A division of imagery, audiobooks, videotapes and visionaries." + in_loop("{{ message.content }}"),
    "television": in_loop("{{ message.content }}{# television, envision #}"),
    "tools": "{% for t in tools or [] %}{% for c in t.content %}{{ c }}{% endfor %}{% endfor %}",
    "tool calls": in_loop("{{ message.content }}{% for c in message.tool_calls %}{{ c.function.name }}{% endfor %}"),
    "documents": "{% for d in documents %}{% for c in d['content'] %}{{ c }}{% endfor %}{% endfor %}"
    + in_loop("{{ message.content }}"),
    "other lists": in_loop("{% for x in [1, 2] %}{{ x }}{% endfor %}{{ message.content }}"),
    "other field": in_loop("{% for c in message.contents %}{{ c }}{% endfor %}"),
    "content of nobody": "{% for c in content %}{{ c }}{% endfor %}",
    "own messages": "{% for m in [{'content': 'abc'}] %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "lines": in_loop("{% for line in message.content.split('\\n') %}{{ line }}{% endfor %}"),
    "last of a split": in_loop("{% set content = message.content.split('</think>')[-1] %}"
                               "{% for c in content %}{{ c }}{% endfor %}"),
    "a count": in_loop("{% for i in range(message.content | length) %}.{% endfor %}"),
    "as JSON": in_loop("{% for c in message.content | tojson %}{{ c }}{% endfor %}"),
    "a text made of it": in_loop("{% for c in message.content + '.' %}{{ c }}{% endfor %}"),
    "set anew": in_loop("{% set c = message.content %}{{ c }}{% set c = message.tools %}"
                        "{% for x in c %}{{ x }}{% endfor %}"),
    "set inside a loop only": "{% set p = [] %}" + in_loop("{% set p = message.content %}")
    + "{% for c in p %}{{ c }}{% endfor %}",
    "block set": in_loop("{% set p %}{{ message.content }}{% endset %}{% for c in p %}{{ c }}{% endfor %}"),
    "macro that prints": "{% macro r(x) %}{{ x }}{% endmacro %}" + in_loop("{{ r(message.content) }}"),
    "macro over tools": "{% macro r(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}{{ r(tools) }}"
    + in_loop("{{ message.content }}"),
    "macro's text": "{% macro r(x) %}{{ x }}{% endmacro %}"
    + in_loop("{% for c in r(message.content) %}{{ c }}{% endfor %}"),
    "macro over a tool": "{% macro r(m) %}{% for c in m.content %}{{ c }}{% endfor %}{% endmacro %}"
    "{% for t in tools or [] %}{{ r(t) }}{% endfor %}",
    "include of it": "{% include 'content.jinja' %}" + in_loop("{{ message.content }}"),
    "import's macro": "{% from 'parts.jinja' import show %}" + in_loop("{{ show(message.content) }}"),
    "extends": "{% extends 'content.jinja' %}",
    "macro that is never called with it": "{% macro r(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
    + in_loop("{{ message.content }}"),
    "namespace of something else": "{% set ns = namespace(content='abc') %}{% for c in ns.content %}{{ c }}{% endfor %}"
    + in_loop("{{ message.content }}"),
    "inline if of texts": in_loop("{% for c in ('a' if message.content else 'b') %}{{ c }}{% endfor %}"),
    "call block that prints": "{% macro o(x) %}{{ caller(x) }}{% endmacro %}"
    + in_loop("{% call(a) o(message.content) %}{{ a }}{% endcall %}"),
    "in a comment": "{# {% for c in message.content %}{% endfor %} #}" + in_loop("{{ message.content }}"),
    "raw": "{% raw %}{% for c in message.content %}{% endfor %}{% endraw %}",
    "broken, unclosed": "{% for c in message.content %}{{ c }}",
    "broken, expression": "{% for c in message.content + %}{% endfor %}",
    "broken, unknown tag": "{% nothing %}{% for c in message.content %}{% endfor %}",
    "broken, unknown filter is still parsed": in_loop("{{ message.content | nothing }}"),
    "broken, closed twice": "{% for c in message.content %}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", OPENAI)
def test_reads_parts(name: str) -> None:
    assert detect(OPENAI[name]) == "openai"


@pytest.mark.parametrize("name", STRING)
def test_reads_text(name: str) -> None:
    assert detect(STRING[name]) == "string"


OF_FILES = {"gemma-3": "openai", "internvl3": "openai", "magistral": "openai"}
"""The others print a message's content as it is, or split it as text."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_templates_of_model_cards(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert detect(source) == OF_FILES.get(file.stem, "string")
    assert JinjaChatTemplate({"default": source}).content_format == detect(source)


def test_none_is_no_template() -> None:
    assert detect(None) == "string"


@pytest.mark.parametrize("given", [1, b"{{ message.content }}", ["x"], object()])
def test_what_is_no_text_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="a chat template is a str"):
        detect(given)


HUGE = {
    "long": "{{ message.content }}" + "x" * (1 << 18),
    "deep parentheses": "{{ content" + "(" * 100_000,
    "deep sums": "{{ content" + " + 1" * 50_000 + " }}",
    "deep loops": "{% for a in content %}" * 8_000 + "{% endfor %}" * 8_000,
    "many branches": "{% if a %}{% set content = message.role %}{% endif %}" * 4_000,
    "many names": "".join(f"{{% set a{i} = a{i + 1} %}}" for i in range(10_000)) + "content",
    "many macros": "{% macro a(x) %}{{ x }}{% endmacro %}" * 2_000 + "{{ a(message.content) }}" * 5_000,
    "unclosed blocks": "{% content " * 20_000,
    "unclosed comments": "content {# " * 20_000,
    "quotes": "{{ content '" * 20_000,
    "a long number": "{{ content }}{{ " + "9" * 10_000 + " }}",
}


@pytest.mark.parametrize("name", HUGE)
def test_never_hangs(name: str) -> None:
    """The only clock here is pytest's own limit; each of them takes a second at most."""
    assert detect(HUGE[name]) == "string"


WORDS = st.sampled_from(
    ["{%", "%}", "{{", "}}", "{#", "#}", "{%-", "-%}", " for ", " in ", " if ", " else ", " endfor ", " endif ",
     " set ", " endset ", " macro ", " endmacro ", " call ", " endcall ", " generation ", " endgeneration ",
     " break ", " continue ", " with ", " endwith ", " block ", " filter ", " raw ", " endraw ", " recursive ",
     " import ", " from ", " include ", " extends ", " as ", " is ", " not ", " and ", " or ", "a", "b", "m",
     "message", "messages", "content", ".", ",", "|", "~", "+", "**", "[", "]", "(", ")", "{", "}", ":", "=", "==",
     "'content'", "'", '"', "1", "1.5e3", "*", "loop", "ns", "namespace(", "caller(", ".get(", "\n", "\\", "\x00",
     "ü", "{% for a in messages %}", "{% endfor %}", "{% set b = a.content %}", "{% for c in b %}"]
)  # fmt: skip


@settings(max_examples=tries(300), deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=40).map("".join)))
def test_any_text_has_an_answer(text: str) -> None:
    assert detect(text) in ("openai", "string")
    assert detect("{{ message.content }}" + text) in ("openai", "string")


@settings(max_examples=tries(40), deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_any_spoilt_template_has_an_answer(file: Path, data: st.DataObject) -> None:
    text = file.read_text(encoding="utf-8")
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    for changed in (text[:start], text[start:], text[:start] + data.draw(st.text(max_size=5)) + text[end:]):
        assert detect(changed) in ("openai", "string")


NAMES = st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(
    lambda name: (
        name not in {"messages", "message", "loop", "namespace", "dict", "tools", "documents"}
        and name not in {"and", "or", "not", "is", "in", "if", "else", "none", "true", "false", "recursive"}
    )
)


@settings(max_examples=tries(100), deadline=None)
@given(st.lists(NAMES, min_size=3, max_size=3, unique=True), st.lists(st.integers(0, 7), max_size=5))
def test_names_and_detours_do_not_matter(names: list[str], detours: list[int]) -> None:
    """The same loop behind any chain of aliases; without the last loop, the same template reads text."""
    turn, alias, macro = names
    value, before, after = f"{turn}['content']", "", ""
    for at, detour in enumerate(detours):
        here = f"{alias}_{at}"
        match detour:
            case 0:
                before += f"{{% set {here} = {value} %}}"
                value = here
            case 1:
                value = f"({value} | list)"
            case 2:
                value = f"({value} if {turn}.role else [])"
            case 3:
                value = f"({value})[0:]"
            case 4:
                value = f"({value} or [])"
            case 5:
                before += f"{{% with {here} = {value} %}}"
                value, after = here, "{% endwith %}" + after
            case 6:
                before += f"{{% set {here} = namespace(x={value}) %}}"
                value = f"{here}.x"
            case _:
                value = f"{{'k': {value}}}.get('k')"
    define = f"{{% macro {macro}(z) %}}{{% for c in z %}}{{{{ c.text }}}}{{% endfor %}}{{% endmacro %}}"
    walks = f"{before}{{{{ {macro}({value}) }}}}{after}"
    prints = f"{before}{{{{ {value} }}}}{after}"
    assert detect(define + in_loop(walks, turn)) == "openai"
    assert detect(define + in_loop(prints, turn)) == "string"


def printed(source: str, *messages: Message) -> str:
    return render(messages, JinjaChatTemplate({"default": source})).text


SAID: list[dict[str, Any]] = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
ASIDE = {
    "tool": "{% if message.role == 'tool' %}{% for line in message.content %}{{ line }}{% endfor %}{% else %}"
    "{{ '[Q]' + message.content + '[/Q]' }}{% endif %}",
    "image": "{% if message.content is not string %}{% for c in message.content %}{% if c.type == 'image' %}[img]"
    "{% endif %}{% endfor %}{% endif %}{{ '[Q]' + message.content | string + '[/Q]' }}",
    "in a macro that is not called": "{% macro show(x) %}{% for c in x.content %}{{ c.text }}{% endfor %}{% endmacro %}"
    "{{ '[Q]' + message.content + '[/Q]' }}",
    "a word for media": "{# vision #}{{ '[Q]' + message.content | trim + '[/Q]' }}",
    "as JSON": "{% if message.content is iterable and message.content is not string %}"
    "{{ message.content | tojson }}{% else %}{{ '[Q]' + message.content + '[/Q]' }}{% endif %}",
}


@pytest.mark.parametrize("name", ASIDE)
def test_what_prints_only_texts_is_given_texts(name: str) -> None:
    """Whatever its source does with contents on the side."""
    assert printed(in_loop(ASIDE[name]), Message("user", SAID)) == "[Q]hello you[/Q]"


PARTS_OF = (
    "{% for c in message.content %}{{ c.text if c.type == 'text' else '[' ~ c.type ~ ']' }}{% endfor %}"
)
ROLES = "user", "system", "developer", "assistant", "tool"


@pytest.mark.parametrize("only", ROLES)
@pytest.mark.parametrize("reads", ["text", "parts"])
def test_each_role_is_given_what_it_reads(only: str, reads: str) -> None:
    """One role reads contents in one way, and all others in the other."""
    one, other = ("{{ '' + message.content }}", PARTS_OF)[:: 1 if reads == "text" else -1]
    source = in_loop(
        f"<{{{{ message.role }}}}>{{% if message.role == '{only}' %}}{one}{{% else %}}{other}{{% endif %}}"
    )
    for role in ROLES:
        joint = "hello you" if (role == only) == (reads == "text") else "helloyou"
        for said, shown in (("hi", "hi"), (SAID, joint)):
            before = [Message("user", "?")] if role in ("assistant", "tool") else []
            written = printed(source, *before, Message(role, said))
            assert written.endswith(f"<{role}>{shown}"), (role, written)


def test_media_go_as_parts_where_only_these_are_read_as_parts() -> None:
    """A template that prints a text, and runs over the parts of a content that begins with an image."""
    source = in_loop(
        "{% if message.content is string %}{{ message.content }}{% elif message.content[0].type == 'image' %}"
        f"{PARTS_OF}{{% else %}}{{{{ raise_exception('text as parts') }}}}{{% endif %}}"
    )
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert printed(source, Message("user", SAID)) == "hello you"
    assert printed(source, Message("user", [image, *SAID])) == "[image]helloyou"


def test_a_template_that_takes_one_message_only() -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}" + in_loop(PARTS_OF)
    assert printed(source, Message("user", SAID)) == "helloyou"
    assert printed(source, Message("assistant", "hi")) == "hi"


def test_calls_and_results_of_tools_may_be_asked_for() -> None:
    """As of templates that refuse a tool's message without the call that it answers, and other ids."""
    source = in_loop(
        "{% if message.role == 'tool' %}{% if messages[loop.index0 - 1].tool_calls[0].id | length != 9 or "
        "message.tool_call_id | length != 9 %}{{ raise_exception('ids') }}{% endif %}{{ message.content | string }}"
        "{% else %}" + PARTS_OF + "{% endif %}"
    )
    template = JinjaChatTemplate({"default": source})
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "content": SAID, "tool_call_id": "abcdefghi"},
    ]
    assert template.render(talk) == "abhello you"
