"""Prefixes and suffixes read off a Jinja template, without a look at the registry; and why there are none."""

from __future__ import annotations

import functools
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat.derive import Derivation, derive_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.template import ChatTemplateStyle
from runtime.protocol.errors import TemplateError
from tests.exploring import tries

DATA = Path(__file__).parent / "data"
EOS = {"deepseek-v2": "<｜end▁of▁sentence｜>", "olmo-2": "<|endoftext|>"}
NOON = datetime(2026, 7, 26, 12)
NAMES = sorted(path.stem for path in DATA.glob("*.jinja"))
# name of the data -> the registered template with the very same prefixes and suffixes
SAME = {
    "baichuan2": "baichuan2", "command-r": "c4ai-command-r", "deepseek-r1-distill": "deepseek-r1-distill",
    "deepseek-v3": "deepseek-v3", "deepseek-v3.1": "deepseek-v3.1", "gemma-2": "gemma-it",
    "gemma-3": "gemma-3-it", "gemma-4": "gemma-4", "granite-4": "granite-4", "hermes-3": "hermes-3",
    "internvl3": "internvl3", "kimi-k2": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2-thinking", "llama-3": "llama-3-instruct", "llama-4": "llama-4",
    "magistral": "magistral", "mistral-v7-tekken": "mistral-v7-tekken", "olmo-2": "olmo-2",
    "phi-3.5": "phi-3.5", "phi-4": "phi-4", "phi-4-mini": "phi-4-mini", "qwen2": "qwen",
    "qwen2.5": "qwen2.5", "qwen3": "qwen3", "qwq": "qwq", "smollm2": "smollm2", "yi": "yi",
    "zephyr": "zephyr",
}  # fmt: skip
# Jinja writes a space before these roles' texts; with the registered template it is the text's beginning.
SPACED = {
    "deepseek-v2": ("deepseek-v2", "assistant"), "grok-2": ("grok-2", "assistant"),
    "llama-2": ("llama-2-chat", "assistant"), "mistral-v1": ("mistral-v1", "assistant"),
    "mistral-v3": ("mistral-v3", "assistant"), "mistral-v7": ("mistral-v7", "assistant"),
    "vicuna": ("vicuna_v1.1", "assistant user"),
}  # fmt: skip
# Jinja writes text of its own around the system prompt: patterns of what comes before the registered prefix,
# and between it and the prompt.
FRAMED = {
    "glm-4": ("glm-4", r"\[gMASK\]<sop>", ""),
    "glm-4.5": ("glm-4.5", r"\[gMASK\]<sop>", ""),
    "glm-4.7": ("glm-4.7", r"\[gMASK\]<sop>", ""),
    "gpt-oss": ("gpt-oss", r"<\|start\|>system<\|message\|>(?s:.+)<\|end\|>", ""),
    "llama-3.1": ("llama-3-instruct", "", r"Cutting Knowledge Date: .+\nToday Date: 26 Jul 2024\n\n"),
    "llama-3.2": ("llama-3-instruct", "", r"Cutting Knowledge Date: .+\nToday Date: .+\n\n"),
    "minimax-m2": ("minimax-m2", r"\]~!b\[", ""),
    "smollm3": ("smollm3", "", r"## Metadata\n(?s:.+)\n## Custom Instructions\n\n"),
}
# Jinja opens the reply at the end of the user's turn.
OPENED_BY_USER = {"deepseek-v3-0324": "deepseek-v3", "yi-1.5": "yi-1.5"}
# Parts of the reasons given for a template that is not of the plain shape.
TRIMS, DATE, PREAMBLE, REWRITES = (
    "trims the text",
    "writes the date",
    "text of its own",
    "changes the text of earlier",
)
IN_USER, REFUSED, MOVED, DROPS = (
    "into a user's turn",
    "refuses a system message",
    "moves a system",
    "drops the reasoning",
)
LAST = "a reply that ends the conversation differs"
REASONS = {
    "baichuan2": {TRIMS},
    "command-a": {REWRITES, PREAMBLE, IN_USER},
    "gemma-2": {REFUSED, TRIMS},
    "gemma-3": {IN_USER, TRIMS},
    "gpt-oss": {DATE, PREAMBLE, REWRITES},
    "grok-2": {TRIMS, "another way"},
    "llama-3.2": {DATE, PREAMBLE},
    "llama-4": {TRIMS},
    "magistral": {PREAMBLE},
    "mistral-v3": {REWRITES, MOVED},
    "mistral-v3-tekken": {REWRITES, MOVED},
    "mistral-v7-tekken": {DATE, PREAMBLE},
    "phi-3.5": {"that is not continued with"},
    "qwen3": {REWRITES, DROPS, LAST},
    "smollm3": {DATE, PREAMBLE, TRIMS},
}


def jinja(name: str) -> JinjaChatTemplate:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = {"bos_token": "<s>", "eos_token": EOS.get(name, "</s>")}
    return JinjaChatTemplate({"default": source}, tokens, now=lambda: NOON)


@functools.cache
def derived_of(name: str) -> Derivation:
    return derive_chat_template(jinja(name), name=name)


@pytest.mark.parametrize("name", SAME)
def test_derived_is_what_is_registered(name: str) -> None:
    derived, registered = derived_of(name).template, get_chat_template(SAME[name])
    assert derived is not None, derived_of(name).reasons
    roles = ["user", "assistant"]
    if "system" in derived.role_prefix_and_suffix:
        roles.append("system")
    for role in roles:
        assert derived.role_prefix_and_suffix[role] == registered.role_prefix_and_suffix[role], role
    assert derived.style is registered.style


@pytest.mark.parametrize("name", SPACED)
def test_derived_is_what_is_registered_but_for_a_space(name: str) -> None:
    derived, registered = derived_of(name).template, get_chat_template(SPACED[name][0])
    assert derived is not None
    for role, (prefix, suffix) in derived.role_prefix_and_suffix.items():
        expected, end = registered.role_prefix_and_suffix[role]
        assert (prefix, suffix) == (expected.rstrip() + " " if role in SPACED[name][1] else expected, end), (
            role
        )


@pytest.mark.parametrize("name", FRAMED)
def test_derived_is_what_is_registered_but_for_the_systems_frame(name: str) -> None:
    registered_name, before, between = FRAMED[name]
    derived, registered = derived_of(name).template, get_chat_template(registered_name)
    assert derived is not None
    mine, theirs = dict(derived.role_prefix_and_suffix), registered.role_prefix_and_suffix
    assert mine["user"] == theirs["user"]
    assert mine["assistant"] == theirs["assistant"]
    prefix, suffix = mine["system"]
    assert re.fullmatch(f"{before}{re.escape(theirs['system'][0])}{between}", prefix)
    assert suffix.lstrip("\n") == theirs["system"][1].lstrip("\n")


@pytest.mark.parametrize("name", OPENED_BY_USER)
def test_a_reply_opened_by_the_users_turn_is_the_same_text(name: str) -> None:
    derived, registered = derived_of(name).template, get_chat_template(OPENED_BY_USER[name])
    assert derived is not None
    mine, theirs = derived.role_prefix_and_suffix, registered.role_prefix_and_suffix
    assert mine["user"] == (theirs["user"][0], theirs["user"][1] + theirs["assistant"][0])
    assert mine["assistant"] == ("", theirs["assistant"][1])
    assert mine["system"] == theirs["system"]
    assert derived_of(name).generation_prompt == ""


def test_the_tables_cover_the_families() -> None:
    whole = {*SAME, *SPACED, *FRAMED, *OPENED_BY_USER}
    assert set(NAMES) - whole == {"command-a", "mistral-v3-tekken"}
    assert len(SAME) >= 15


@pytest.mark.parametrize("name", REASONS)
def test_the_reasons_are_given(name: str) -> None:
    reasons = "; ".join(derived_of(name).reasons)
    assert all(part in reasons for part in REASONS[name]), reasons


@pytest.mark.parametrize("name", NAMES)
def test_each_family_is_derived(name: str) -> None:
    assert derived_of(name).template is not None, derived_of(name).reasons


TEXT = st.text(alphabet="aZ0 é日.\n{}%<|/>'\"\\", min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=tries(15), deadline=None)
@given(pairs=st.lists(st.tuples(TEXT, TEXT), max_size=3), last=TEXT, system=st.none() | TEXT)
def test_derived_text_is_jinjas(
    name: str, pairs: list[tuple[str, str]], last: str, system: str | None
) -> None:
    found = derived_of(name)
    assert found.template is not None
    if "system" not in found.template.role_prefix_and_suffix:
        system = None
    turns = [] if system is None else [{"role": "system", "content": system}]
    for asked, replied in pairs:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    turns.append({"role": "user", "content": last})
    preamble = found.preamble if system is None else ""
    mine = found.bos + preamble + found.template.get_prompt(turns) + found.generation_prompt
    assert mine == jinja(name).render(turns, add_generation_prompt=True)


def test_the_llama_2_style_is_seen() -> None:
    found = derived_of("llama-2").template
    assert found is not None
    assert found.style is ChatTemplateStyle.LLAMA2
    assert found.role_prefix_and_suffix["system"] == ("<<SYS>>\n", "\n<</SYS>>\n\n")


@pytest.mark.parametrize(
    "name", ["deepseek-v3.1", "deepseek-r1-distill", "glm-4.5", "glm-4.7", "minimax-m2", "qwen3", "qwq"]
)
def test_dropped_reasoning_is_said(name: str) -> None:
    assert any(DROPS in reason for reason in derived_of(name).reasons)
    assert not derived_of(name).keeps_reasoning


def test_the_default_system_prompt_is_read_off() -> None:
    template = derived_of("qwen2").template
    assert template is not None
    assert template.default_system_prompt == "You are a helpful assistant."


USER_ONLY = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
ODD = [
    ("{% for m in messages %}{{ m.content if loop.last else '(old)' }}{% endfor %}", REWRITES, False),
    ("{{ raise_exception('never') }}", "refuses plain conversations", False),
    ("{% for m in messages %}{{ m.content | upper }};{% endfor %}", "does not print", True),
    ("{% for m in messages %}{{ loop.index ~ m.role ~ ':' ~ m.content }};{% endfor %}", None, True),
    ("{{ strftime_now('%Y') }}" + USER_ONLY, DATE, True),
]


@pytest.mark.parametrize(("source", "why", "append_only"), ODD)
def test_what_is_not_of_the_shape_says_why(source: str, why: str | None, append_only: bool) -> None:
    found = derive_chat_template(source)
    assert found.append_only is append_only
    if why != DATE:
        assert found.template is None
    assert found.reasons
    if why is not None:
        assert any(why in reason for reason in found.reasons), found.reasons


def test_a_template_that_cannot_be_parsed_is_an_error() -> None:
    with pytest.raises(TemplateError, match="cannot be parsed"):
        derive_chat_template("{% if %}")


def test_the_seed_decides_nothing_for_a_template_of_the_shape() -> None:
    source = (DATA / "hermes-3.jinja").read_text(encoding="utf-8")
    found = {
        str(derive_chat_template(source, bos_token="<s>", eos_token="</s>", seed=seed)) for seed in range(4)
    }
    assert len(found) == 1


@pytest.mark.parametrize("name", ["llama-3.2", "smollm3", "gpt-oss"])
def test_a_day_that_ends_meanwhile_is_no_rewriting(name: str) -> None:
    days = (NOON + timedelta(days=count) for count in range(10_000))
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    hasty = derive_chat_template(JinjaChatTemplate({"default": source}, tokens, now=lambda: next(days)))
    assert hasty.facts()["append_only"] == derive_chat_template(jinja(name)).facts()["append_only"]
