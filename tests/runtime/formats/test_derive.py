"""Prefixes and suffixes read off a Jinja template, without a look at the registry; and why there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat.derive import Derivation, Trait, derive_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.template import ChatTemplateStyle
from runtime.protocol.errors import TemplateError

DATA = Path(__file__).parent / "data"
EOS = {"deepseek-v2": "<｜end▁of▁sentence｜>", "olmo-2": "<|endoftext|>"}
NAMES = sorted(path.stem for path in DATA.glob("*.jinja"))
# name of the data -> the registered template with the very same prefixes and suffixes
SAME = {
    "command-r": "c4ai-command-r", "deepseek-v3": "deepseek-v3", "gemma-2": "gemma-it",
    "granite-4": "granite-4",
    "hermes-3": "hermes-3", "kimi-k2": "kimi-k2", "llama-3": "llama-3-instruct", "llama-4": "llama-4",
    "mistral-v7-tekken": "mistral-v7-tekken", "olmo-2": "olmo-2", "phi-3.5": "phi-3.5", "phi-4": "phi-4",
    "phi-4-mini": "phi-4-mini", "qwen2": "qwen", "qwen2.5": "qwen2.5", "qwen3": "qwen3", "qwq": "qwq",
    "smollm2": "smollm2", "yi": "yi", "zephyr": "zephyr",
}  # fmt: skip


def jinja(name: str) -> JinjaChatTemplate:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    return JinjaChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": EOS.get(name, "</s>")})


JINJA = {name: jinja(name) for name in NAMES}
FOUND: dict[str, Derivation] = {name: derive_chat_template(JINJA[name], name=name) for name in NAMES}


@pytest.mark.parametrize("name", SAME)
def test_derived_is_what_is_registered(name: str) -> None:
    derived, registered = FOUND[name].template, get_chat_template(SAME[name])
    assert derived is not None, [str(reason) for reason in FOUND[name].reasons]
    roles = ["user", "assistant"]
    if "system" in derived.role_prefix_and_suffix:
        roles.append("system")
    for role in roles:
        assert derived.role_prefix_and_suffix[role] == registered.role_prefix_and_suffix[role], role
    assert derived.style is registered.style


@pytest.mark.parametrize("name", NAMES)
def test_each_family_is_derived(name: str) -> None:
    assert FOUND[name].template is not None, [str(reason) for reason in FOUND[name].reasons]


TEXT = st.text(alphabet="aZ0 é日.\n{}%<|/>'\"\\", min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(TEXT, TEXT), max_size=3), last=TEXT, system=st.none() | TEXT)
def test_derived_text_is_jinjas(
    name: str, pairs: list[tuple[str, str]], last: str, system: str | None
) -> None:
    found = FOUND[name]
    assert found.template is not None
    if "system" not in found.template.role_prefix_and_suffix:
        system = None
    turns = [] if system is None else [{"role": "system", "content": system}]
    for asked, replied in pairs:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    turns.append({"role": "user", "content": last})
    preamble = found.preamble if system is None else ""
    mine = found.bos + preamble + found.template.get_prompt(turns) + found.generation_prompt
    assert mine == JINJA[name].render(turns, add_generation_prompt=True)


def test_the_llama_2_style_is_seen() -> None:
    found = FOUND["llama-2"].template
    assert found is not None
    assert found.style is ChatTemplateStyle.LLAMA2
    assert found.role_prefix_and_suffix["system"] == ("<<SYS>>\n", "\n<</SYS>>\n\n")


@pytest.mark.parametrize(
    "name", ["deepseek-v3.1", "deepseek-r1-distill", "glm-4.5", "minimax-m2", "qwen3", "qwq"]
)
def test_dropped_reasoning_is_said(name: str) -> None:
    assert FOUND[name].has(Trait.DROPS_REASONING)
    assert not FOUND[name].keeps_reasoning


def test_the_default_system_prompt_is_read_off() -> None:
    template = FOUND["qwen2"].template
    assert template is not None
    assert template.default_system_prompt == "You are a helpful assistant."


USER_ONLY = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
ODD = [
    ("{% for m in messages %}{{ m.content if loop.last else '(old)' }}{% endfor %}", Trait.REWRITES, False),
    ("{{ raise_exception('never') }}", Trait.REFUSES, False),
    ("{% for m in messages %}{{ m.content | upper }};{% endfor %}", Trait.LOSES_TEXT, True),
    ("{% for m in messages %}{{ loop.index ~ m.role ~ ':' ~ m.content }};{% endfor %}", None, True),
    ("{{ strftime_now('%Y') }}" + USER_ONLY, Trait.DATE, True),
]


@pytest.mark.parametrize(("source", "trait", "append_only"), ODD)
def test_what_is_not_of_the_shape_says_why(source: str, trait: Trait | None, append_only: bool) -> None:
    found = derive_chat_template(source)
    assert found.append_only is append_only
    if trait is not Trait.DATE:
        assert found.template is None
    assert found.reasons
    if trait is not None:
        assert found.has(trait), [str(reason) for reason in found.reasons]


def test_a_template_that_cannot_be_parsed_is_an_error() -> None:
    with pytest.raises(TemplateError, match="cannot be parsed"):
        derive_chat_template("{% if %}")


def test_the_seed_decides_nothing_for_a_template_of_the_shape() -> None:
    source = (DATA / "hermes-3.jinja").read_text(encoding="utf-8")
    found = {
        str(derive_chat_template(source, bos_token="<s>", eos_token="</s>", seed=seed)) for seed in range(4)
    }
    assert len(found) == 1
