"""A stranger's template: text or an error, whatever it says."""

# ruff: noqa: E501 - a table of templates

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.protocol.errors import TemplateError
from tests.exploring import tries

WORDS = ["{{", "}}", "{%", "%}", " for a in ", " endfor ", " if ", " endif ", " set ", " endset ", " macro m() ",
         " endmacro ", " block b ", " endblock ", " include ", " import ", " extends ", " as ", " call m() ",
         " endcall ", " filter ", " endfilter ", " with ", "messages", "range(9)", "'x'", "1", "9" * 5000, "1e999",
         "-", "not ", "+", "*", "**", "%", "//", "~", "|", "tojson", "center", "sort", "format", "(", ")", "[", "]",
         "{", "}", ",", ":", ".", "__class__", "self", "loop", "namespace(a=1)", "strftime_now('%Y')", " is ",
         "in", "defined", "=", "==", "raise_exception('x')", " generation ", " endgeneration ", "\x00", "\ud800", "ü"]  # fmt: skip


LEGIT = {
    "long conversation": (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] and 'x' not in m.role %}"
        "{{ '<|' + m.role + '|>' ~ m.content | trim }}{% endif %}{% endfor %}",
        3000,
        500,
    ),
    "long text": (
        "{% for m in messages %}{{ m.content | replace('a', 'b') | trim }}{% endfor %}",
        2,
        4_000_000,
    ),
    "sorting and grouping": (
        "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% endfor %}"
        "{{ messages | map(attribute='content') | unique | list | length }}{{ messages | tojson(indent=4) | length }}",
        500,
        2000,
    ),
    "numbers that are no widths": (
        "{{ '%d' % 1234567890123 }}{{ '{:d}'.format(99999999999) }}{{ 'a b' | truncate(255, true) }}"
        "{{ '7' | int(default=10**9) }}{{ messages[0].content.title() | length }}",
        1,
        400_000,
    ),
    "formats": ("{{ '%-20s|%05.1f|%s' | format('a', 1.5, '{:>12}'.format('b')) }}{{ '%d' % 7 }}", 1, 10),
}


@pytest.mark.parametrize("name", LEGIT)
def test_harmless_templates_are_not_hit(name: str) -> None:
    source, count, size = LEGIT[name]
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": f"{at} " + "word " * (size // 5)} for at in range(count)]
    assert JinjaChatTemplate({"default": source}).render(messages)


def test_a_long_source_that_is_not_hostile() -> None:
    source = "".join(f"{{% if messages[0].content == '{i}' %}}{i}{{% endif %}}\n" for i in range(1000))
    assert JinjaChatTemplate({"default": source}).render([{"role": "user", "content": "7"}]).strip() == "7"


@settings(max_examples=tries(150), deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join))
def test_any_source_gives_text_or_a_template_error(source: str) -> None:
    template = JinjaChatTemplate({"default": source})
    with contextlib.suppress(TemplateError):
        assert isinstance(template.render([{"role": "user", "content": "x"}]), str)
    assert template.content_format in ("openai", "string")
    assert all(isinstance(name, str) for name in template.reads)
