"""Programs over chat templates that are no prefixes and suffixes, or that rewrite earlier turns.

Each program runs on the bundled checkpoint. What the model was given is compared with what plain Jinja writes
for the same messages: Jinja's text, sent as a plain prompt, must be the very tokens that the cache holds.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from runtime.formats.chat import get_chat_template
from sglang_dsl.backends.engine import EngineBackend
from sglang_dsl.errors import BackendError, ProgramError

S, E = "<|im_start|>", "<|im_end|>\\n"
TURN = "{{ '" + S + "' + m.role + '\\n' + m.content + '" + E + "' }}"
OPEN = "{% if add_generation_prompt %}{{ '" + S + "assistant\\n' }}{% endif %}"


@dataclass(frozen=True)
class Awkward:
    """A template, and what must be found of it: whether it is append-only and keeps reasoning, and the words
    of a reason."""

    text: str
    append_only: bool
    keeps_reasoning: bool = True
    reason: str = ""
    system: bool = True


TEMPLATES = {
    "drops reasoning": Awkward(
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
        "{{ '" + S + "assistant\\n' + m.content.split('</think>')[-1].lstrip() + '" + E + "' }}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + OPEN,
        append_only=True,
        keeps_reasoning=False,
        reason="reasoning",
    ),
    "opens replies with an empty thought": Awkward(
        "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}"
        "{{ '" + S + "assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}",
        append_only=True,
        reason="another way",
    ),
    "writes an empty thought into the last reply": Awkward(
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
        "{{ '" + S + "assistant\\n<think>\\n\\n</think>\\n\\n' + m.content + '" + E + "' }}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + OPEN,
        append_only=False,
        reason="earlier turns",
    ),
    "merges the system message": Awkward(
        "{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\\n\\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '" + S + "' + m.role + '\\n' + (lead if loop.first else '') + m.content + '" + E + "' }}"
        "{% endfor %}" + OPEN,
        append_only=True,
        reason="system",
    ),
    "moves the system message to the last question": Awkward(
        "{% set lead = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role != 'system' %}{{ '" + S + "' + m.role + '\\n' }}"
        "{% if m.role == 'user' and loop.index0 >= messages | length - 2 %}{{ lead }}{% endif %}"
        "{{ m.content + '" + E + "' }}{% endif %}{% endfor %}" + OPEN,
        append_only=False,
        reason="earlier turns",
    ),
    "trims": Awkward(
        "{% for m in messages %}{{ '" + S + "' + m.role + '\\n' + m.content | trim + '" + E + "' }}"
        "{% endfor %}" + OPEN,
        append_only=True,
        reason="trims",
    ),
    "ends a conversation": Awkward(
        "{% for m in messages %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + S + "assistant\\n' }}{% else %}{{ eos_token }}{% endif %}",
        append_only=False,
        reason="ends a conversation",
    ),
    "writes the date": Awkward(
        "{{ '" + S + "system\\nToday is ' + strftime_now('%Y') + '." + E + "' }}"
        "{% for m in messages %}" + TURN + "{% endfor %}" + OPEN,
        append_only=True,
        reason="date",
    ),
    "numbers the turns": Awkward(
        "{% for m in messages %}{{ '"
        + S
        + "' + m.role + '\\n' ~ loop.index ~ '. ' ~ m.content + '"
        + E
        + "' }}"
        "{% endfor %}" + OPEN,
        append_only=True,
        reason="place to place",
    ),
    "counts the turns first": Awkward(
        "{{ '" + S + "system\\n' ~ messages | length ~ ' messages" + E + "' }}"
        "{% for m in messages %}" + TURN + "{% endfor %}" + OPEN,
        append_only=False,
        reason="earlier turns",
    ),
    "opens a reply always": Awkward(
        "{% for m in messages %}" + TURN + "{% endfor %}{{ '" + S + "assistant\\n' }}",
        append_only=False,
        reason="earlier turns",
    ),
}


def plain_jinja(source: str, messages: list[dict[str, Any]], opened: bool) -> str:
    """What Hugging Face tokenizers would write."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    text = environment.from_string(source).render(
        messages=messages, add_generation_prompt=opened, bos_token="", eos_token="<|im_end|>"
    )
    return str(text)


def prompt_of(source: str, messages: list[dict[str, Any]], begun: str) -> str:
    """The prompt of a reply after `messages`, of which `begun` is written."""
    return plain_jinja(source, messages, True) + begun


@pytest.fixture(scope="module", params=TEMPLATES)
def awkward(request: pytest.FixtureRequest) -> Awkward:
    return TEMPLATES[request.param]


@pytest.fixture(scope="module")
def dressed(awkward: Awkward) -> Iterator[Engine]:
    with Engine("pocket", max_total_tokens=8192, chat_template=awkward.text) as running:
        yield running


@sgl.function
def talk(s: Any, system: bool) -> None:
    if system:
        s += sgl.system("You answer questions about lands and rivers, in one sentence each. ")
    s += sgl.user("  Which river runs through Zembla?\n")
    s += sgl.assistant("<think>\nA river.\n</think>\n\n" + sgl.gen("first", max_tokens=12, temperature=0))
    s += sgl.user("Who rules Karsk? ")
    s += sgl.assistant("Well, " + sgl.gen("second", max_tokens=12, temperature=0))
    s += sgl.user("Is that good?")
    with s.assistant():
        s += "It is "
        s += sgl.select("third", choices=["good", "bad"])
        s += sgl.gen("more", max_tokens=4, temperature=0)
    forks = s.fork(2)
    forks += [sgl.user("And here?"), sgl.user("And there?")]
    forks += sgl.assistant(sgl.gen("branch", max_tokens=6, temperature=0))
    forks.join()


def check_prompt(engine: Engine, text: str, answer: str, meta: dict[str, Any], tokens: int) -> None:
    """`text` is, to the token, what the model was given when it wrote `answer`."""
    again = engine.generate(text, {"max_new_tokens": tokens, "temperature": 0})
    assert again.meta["prompt_tokens"] == meta["prompt_tokens"]
    assert again.meta["cached_tokens"] >= again.meta["prompt_tokens"] - 1
    assert again.text == answer


def test_a_program_of_many_calls(awkward: Awkward, dressed: Engine) -> None:
    dressed.flush_cache()
    state = talk.run(system=awkward.system, backend=EngineBackend(dressed))
    turns = state.messages()
    roles = [turn["role"] for turn in turns]
    replies = [at for at, role in enumerate(roles) if role == "assistant"]
    assert len(replies) == 3
    begun = {"first": "<think>\nA river.\n</think>\n\n", "second": "Well, ",
             "more": "It is " + state["third"]}  # fmt: skip
    texts: list[str] = []
    for (name, beginning), at in zip(begun.items(), replies, strict=True):
        meta = state.get_meta_info(name)
        text = prompt_of(awkward.text, turns[:at], beginning)
        if texts:
            shared = common(dressed.encode(texts[-1]), dressed.encode(text))
            assert shared > 0
            assert meta["cached_tokens"] >= shared - 1, name
            assert meta["cached_tokens"] > 0
        texts.append(text)
        assert turns[at]["content"].startswith(beginning + state[name]) or name == "more"
        check_prompt(dressed, text, state[name], meta, 4 if name == "more" else 12)
    assert state["third"] in ("good", "bad")
    assert state.get_meta_info("third")["cached_tokens"] > 0
    for question, answer in zip(("And here?", "And there?"), state["branch"], strict=True):
        text = prompt_of(awkward.text, [*turns, {"role": "user", "content": question}], "")
        again = dressed.generate(text, {"max_new_tokens": 6, "temperature": 0})
        assert again.text == answer
        assert again.meta["cached_tokens"] >= again.meta["prompt_tokens"] - 1


def test_a_stream_says_the_same(awkward: Awkward, dressed: Engine) -> None:
    backend = EngineBackend(dressed)
    whole = talk.run(system=awkward.system, backend=backend)
    streamed = talk.run(system=awkward.system, backend=backend, stream=True)
    assert "".join(streamed.text_iter()) == whole.text()
    assert streamed.messages() == whole.messages()
    assert streamed["branch"] == whole["branch"]


def test_what_is_found_of_it(awkward: Awkward, dressed: Engine) -> None:
    said = dressed.state()["chat_template"]
    assert said["source"] == "asked"
    assert said["append_only"] is awkward.append_only
    assert said["keeps_reasoning"] is awkward.keeps_reasoning
    assert any(awkward.reason in reason for reason in said["reasons"]), said["reasons"]
    found = dressed.derivation
    assert found is not None
    assert EngineBackend(dressed).chat_template is dressed.chat_template is found.template
    assert said["shape"] == ("jinja" if found.template is None else "prefixes")


def test_raw_text_between_turns(awkward: Awkward, dressed: Engine) -> None:
    @sgl.function
    def noted(s: Any) -> None:
        s += sgl.user("one")
        s += sgl.assistant("two")
        s += "\n(a note)\n"
        s += sgl.user("three")
        s += sgl.assistant(sgl.gen("x", max_tokens=4, temperature=0))

    state = noted.run(backend=EngineBackend(dressed))
    turns = [{"role": role, "content": text} for role, text in
             (("user", "one"), ("assistant", "two"), ("user", "three"))]  # fmt: skip
    shorter = plain_jinja(awkward.text, turns[:2], False)
    longer = plain_jinja(awkward.text, turns, True)
    if longer.startswith(shorter):
        text = f"{shorter}\n(a note)\n{longer.removeprefix(shorter)}"
        check_prompt(dressed, text, state["x"], state.get_meta_info("x"), 4)
        return
    with pytest.raises(BackendError, match="append-only") as caught:
        state["x"]
    assert caught.value.status == 400
    assert "chatml" in str(caught.value)
    assert caught.value.source is not None
    assert caught.value.source.file.endswith("test_awkward_templates.py")
    # The engine goes on.
    assert dressed.generate("a", {"max_new_tokens": 1}).output_ids


REFUSING = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant, not ' + m.role) }}{% endif %}"
    + TURN
    + "{% endfor %}"
    + OPEN
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_role_that_the_template_refuses_is_told_where_the_value_is_read(stream: bool) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    line = frame.f_lineno + 5

    @sgl.function
    def asked(s: Any) -> None:
        s += sgl.system("Be kind.") + sgl.user("Hi.")
        s += sgl.assistant(sgl.gen("x", max_tokens=4))

    with Engine("pocket", max_total_tokens=2048, chat_template=REFUSING) as engine:
        state = asked.run(backend=EngineBackend(engine), stream=stream)
        with pytest.raises(ProgramError) as caught:
            state["x"]
        error = caught.value
        assert isinstance(error, BackendError)
        assert error.status == 400
        assert "only user and assistant, not system" in str(error)
        assert error.source is not None
        assert error.source.file.endswith("test_awkward_templates.py")
        assert error.source.line == line
        assert f":{line}" in str(error)
        assert engine.generate("a", {"max_new_tokens": 1}).output_ids


def test_the_bundled_checkpoints_own_template(engine: Engine) -> None:
    choice = engine.template_choice
    assert (choice.source, choice.name) == ("checkpoint jinja", "chatml")
    said = engine.state()["chat_template"]
    assert said["append_only"]
    assert said["keeps_reasoning"]
    assert asyncio.run(EngineBackend(engine).info())["chat_template"] == said
    template = engine.chat_template
    assert template is not None
    assert (
        template.role_prefix_and_suffix["user"] == get_chat_template("chatml").role_prefix_and_suffix["user"]
    )


def common(one: list[int], other: list[int]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
