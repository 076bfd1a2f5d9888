"""What a derivation says of the whole: whether texts extend, replies are reused, reasoning stays; and its
limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.formats.chat import derive
from runtime.formats.chat.derive import derive_chat_template

DATA = Path(__file__).parent / "data"
TURN = "{{ '<' + m.role + '>' + m.content + ';' }}"
TURNS = "{% for m in messages %}" + TURN + "{% endfor %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("source", "append_only", "reuses"),
    [
        (TURNS + OPEN, True, True),
        # It opens no reply: the reply's own beginning is its prompt.
        (TURNS, True, True),
        # The prompt holds a thought that no history has.
        (TURNS + "{% if add_generation_prompt %}<assistant><think></think>{% endif %}", True, False),
        # Closed conversations are not continued; opened ones are.
        (TURNS + "{% if not add_generation_prompt %}END{% endif %}" + OPEN, False, True),
        ("{{ messages | length }}" + TURNS + OPEN, False, False),
        # Only a system message moves.
        (
            "{% for m in messages %}{% if m.role != 'system' %}{% if loop.last and m.role == 'user' and "
            "messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + TURN + "{% endif %}"
            "{% endfor %}" + OPEN,
            False,
            False,
        ),
        # System messages are refused: that says nothing of the rest.
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TURNS + OPEN,
            True,
            True,
        ),
    ],
)
def test_whether_texts_extend_and_replies_are_reused(source: str, append_only: bool, reuses: bool) -> None:
    found = derive_chat_template(source)
    assert (found.append_only, found.reuses_replies) == (append_only, reuses), found.reasons


def test_a_template_that_refuses_everything_has_nothing() -> None:
    found = derive_chat_template("{{ raise_exception('x' * 900) }}")
    facts = found.facts()
    assert facts == {
        "append_only": False,
        "keeps_reasoning": False,
        "reuses_replies": False,
        "reasons": facts["reasons"],
    }
    assert all(len(reason) <= 160 for reason in facts["reasons"])
    assert json.loads(json.dumps(facts)) == facts


def test_a_template_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "_PATIENCE_S", -1.0)
    found = derive_chat_template(TURNS + OPEN)
    assert found.template is None
    assert not found.keeps_reasoning
    assert "longer" in str(found.reasons)


@pytest.mark.parametrize("name", ["qwen3", "qwq", "deepseek-v3.1", "minimax-m2"])
def test_models_that_think_are_said_to_drop_thoughts(name: str) -> None:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    facts = derive_chat_template(source, bos_token="<s>", eos_token="</s>").facts()
    assert facts["keeps_reasoning"] is False
    assert any("reasoning" in reason for reason in facts["reasons"])
