"""The checkpoint's own template: what templates may use, where they are found, what they must not do."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.formats.chat.files import find_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.protocol.errors import ModelLoadError, TemplateError

CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS_FIRST = """
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}A: {{ message.content | trim }}{% endgeneration %}
    {%- else %}
        {{- message.role | upper }}: {{ message['content'] }}
    {%- endif %}
{% endfor %}
{{- namespace(x=1).x }} {{ extra | default('none') }} {{ messages[-1].get('name', '-') }}
"""
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "1 < 2 & 'ü'"},
    {"role": "skip", "content": "x"},
    {"role": "assistant", "content": "  yes  ", "name": "bot"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": "<é>"}}}]


@pytest.mark.parametrize("source", [CHATML, TOOLS_FIRST])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("opened", [False, True])
def test_renders_what_transformers_renders(source: str, tools: Any, opened: bool) -> None:
    given = {"bos_token": "<s>", "extra": "E"}
    theirs, _ = render_jinja_template(
        conversations=[TALK], tools=tools, chat_template=source, add_generation_prompt=opened, **given
    )
    ours = JinjaChatTemplate({"default": source}, {"bos_token": "<s>"}).render(
        TALK, tools=tools, add_generation_prompt=opened, template_kwargs={"extra": "E"}
    )
    assert ours == theirs[0]


def test_strftime_now_gives_the_clocks_day() -> None:
    source = {"default": "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", JinjaChatTemplate(source).render([]))
    noon = datetime(2026, 7, 26, 12)
    template = JinjaChatTemplate(source, now=lambda: noon)
    assert template.render([]) == "2026-07-26"
    days = (noon + timedelta(days=count) for count in range(9))
    hasty = JinjaChatTemplate(source, now=lambda: next(days))
    still = hasty.stopped()
    first, second, again, third = (one.render([]) for one in (still, hasty, still, hasty))
    assert first == again < second < third


def test_raise_exception_becomes_a_template_error_with_its_text_and_line() -> None:
    template = JinjaChatTemplate({"default": "ok\n{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        template.render(TALK)
    assert caught.value.where == "chat_template:2"


def test_a_broken_template_says_where() -> None:
    with pytest.raises(TemplateError, match="cannot be parsed") as caught:
        JinjaChatTemplate({"default": "a\nb{% if %}"}).render(TALK)
    assert caught.value.where == "chat_template:2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ ('%s' | attr('__class__')) }}{{ undefined_name.field }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError):
        JinjaChatTemplate({"default": source}).render(list(TALK))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10000000000 }}",
        "{{ ''.center(10000000000) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'a' * 100000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_runaway_templates_are_stopped(source: str) -> None:
    with pytest.raises(TemplateError):
        JinjaChatTemplate({"default": source}).render(TALK)


def test_named_templates() -> None:
    template = JinjaChatTemplate({"tool_use": "T", "default": "D"})
    assert template.render([]) == "D"
    assert template.render([], tools=TOOLS) == "T"


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path, {}) == {}
    assert find_chat_template(tmp_path, {"chat_template": "A"}) == {"default": "A"}
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert find_chat_template(tmp_path, {"chat_template": listed}) == {"default": "A", "tool_use": "B"}
    assert find_chat_template(tmp_path, {"chat_template": {"x": "A"}}) == {"x": "A"}
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R", encoding="utf-8")
    assert find_chat_template(tmp_path, {"chat_template": "A"}) == {"default": "F", "rag": "R"}


@pytest.mark.parametrize("odd", [5, [1], [{"name": "x"}], {"default": 3}])
def test_odd_templates_are_load_errors(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(ModelLoadError, match="chat_template"):
        find_chat_template(tmp_path, json.loads(json.dumps({"chat_template": odd})))
