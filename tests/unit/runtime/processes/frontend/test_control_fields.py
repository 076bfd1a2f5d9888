"""Control tokens in every field that a user fills: names, ids, arguments, tools, variables, roles, tags."""

from __future__ import annotations

# ruff: noqa: E501 - tables
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

import runtime.pocket
from runtime.config.model import ModelSpec
from runtime.formats.chat.control import ControlTokens, acts_as_control
from runtime.formats.chat.files import find_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.protocol.errors import BadRequest, TemplateError
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message, ToolCall
from tests.exploring import tries

FOLDER = Path(runtime.pocket.__file__).parent / "checkpoint"
SPEC = ModelSpec.from_dir(FOLDER)
TOKENIZER = Tokenizer.load(FOLDER, SPEC.vocab_size, SPEC.eos_ids)
LIMITS = Limits(SPEC.vocab_size, 4096, 4096)
# Prints all that a request holds.
ALL = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ note | default('') }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.name }}|{{ m.tool_call_id }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = {TOKENIZER.added_id(text) for text in TOKENIZER.control_texts}


def preparer(source: str = ALL, **words: Any) -> Preparer:
    return Preparer(TOKENIZER, JinjaChatTemplate({"default": source}), LIMITS, **words)


def ids_of(made: Preparer, **fields: Any) -> list[int]:
    return list(made.prepare(GenerateReqInput(**fields)).requests[0].input_ids)


def control(ids: list[int]) -> list[int]:
    return [token for token in ids if token in CONTROL]


def asked(bad: str) -> dict[str, Any]:
    """A request with `bad` in each of its fields."""
    call = ToolCall(f"f{bad}", json.dumps({bad: [bad, {"x": bad}]}), id=f"i{bad}")
    return {
        "messages": [
            Message("system", bad, name=bad),
            Message("user", [{"type": "text", "text": bad}]),
            Message("assistant", "ok", tool_calls=(call,)),
            Message("tool", bad, tool_call_id=bad, name=bad),
            Message(f"role {bad}", "c"),
            Message("assistant", open=True),
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": bad,
                    "description": bad,
                    "parameters": {"properties": {bad: {"enum": [bad]}}},
                },
            }
        ],
        "template_kwargs": {"note": bad},
    }


def test_the_tokenizer_knows_its_tags_as_control_texts() -> None:
    assert {"<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"} <= set(
        TOKENIZER.control_texts
    )


@pytest.mark.parametrize("bad", sorted(TOKENIZER.control_texts))
def test_no_field_makes_a_control_id(bad: str) -> None:
    made = preparer()
    quoted, harmless = ids_of(made, **asked(bad)), ids_of(made, **asked("x"))
    assert control(quoted) == control(harmless)
    allowed = ids_of(made, **asked(bad), allow_control_tokens=True)
    assert allowed.count(TOKENIZER.added_id(bad)) == harmless.count(TOKENIZER.added_id(bad)) + 17  # type: ignore[arg-type]
    assert TOKENIZER.decode(quoted, False) == TOKENIZER.decode(allowed, False)


@settings(max_examples=tries(40), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*TOKENIZER.control_texts, "<", "think>", "\ue0f0", "\ue100", "\ue0f1", "\\ue0f0", "\\", '"']
        )
        | st.text(max_size=3),
        max_size=5,
    ).map("".join)
)
def test_any_text_in_any_field(bad: str) -> None:
    made = preparer()
    quoted = ids_of(made, **asked(bad))
    assert control(quoted) == control(ids_of(made, **asked("x")))
    allowed = ids_of(made, **asked(bad), allow_control_tokens=True)
    assert TOKENIZER.decode(quoted, False) == TOKENIZER.decode(allowed, False)


def test_an_escape_in_json_hides_nothing() -> None:
    call = ToolCall("f", '{"x": "\\u003cthink\\u003e<|im_\\u0065nd|>"}')
    made = preparer("{% for m in messages %}{{ m.tool_calls[0].function.arguments.x }}{% endfor %}")
    ids = ids_of(made, messages=[Message("assistant", "", tool_calls=(call,))])
    assert control(ids) == []
    assert TOKENIZER.decode(ids, False) == "<think><|im_end|>"


def test_a_template_that_prints_json_with_escapes() -> None:
    made = preparer("{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}")
    ids = ids_of(made, messages=[Message("user", 'é<think>"\\ue0f0\\ue104\\ue0f1')])
    assert control(ids) == []
    assert TOKENIZER.decode(ids, False) == '"\\u00e9<think>\\"\\\\ue0f0\\\\ue104\\\\ue0f1"'


def test_what_the_model_wrote_stays_as_it_is() -> None:
    thought = "<think>so</think>yes"
    made = preparer()
    ids = ids_of(made, messages=[Message("user", "<think>"), Message("assistant", thought)])
    tags = [TOKENIZER.added_id(text) for text in ("<think>", "</think>")]
    assert [token for token in ids if token in tags] == tags


def test_the_engines_default_holds_where_a_request_does_not_say() -> None:
    talk = [Message("user", "a<|im_end|><think>")]
    closed, opened = preparer(), preparer(allow_control_tokens=True)
    quoted = ids_of(closed, messages=talk)
    read = ids_of(opened, messages=talk)
    assert len(control(read)) == len(control(quoted)) + 2
    assert ids_of(closed, messages=talk, allow_control_tokens=True) == read
    assert ids_of(opened, messages=talk, allow_control_tokens=False) == quoted


def test_options_after_a_prompt_are_the_programs_own() -> None:
    made = preparer()
    talk = [Message("user", "a<think>"), Message("assistant", open=True)]
    job = made.prepare(
        GenerateReqInput(messages=talk, choices=["</think>", "\ue0f0\ue4ff\ue0f1", "\ue0f0\ue100\ue0f1"])
    )
    assert job.options[0].ids == (TOKENIZER.added_id("</think>"),)
    assert TOKENIZER.decode(job.options[1].ids, False) == "\ue0f0\ue4ff\ue0f1"
    assert TOKENIZER.decode(job.options[2].ids, False) == "\ue0f0\ue100\ue0f1"


def test_an_error_speaks_of_what_was_written() -> None:
    made = preparer("{{ raise_exception('no ' ~ messages[0].content) }}")
    with pytest.raises(TemplateError, match="no a<think>"):
        ids_of(made, messages=[Message("user", "a<think>")])


def test_values_that_are_nested_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    for fields in ({"tools": [{"x": deep}]}, {"template_kwargs": {"note": deep}}):
        with pytest.raises(BadRequest, match="nested"):
            ids_of(preparer(), messages=[Message("user", "U")], **fields)


def test_the_pocket_models_own_template_keeps_its_tags() -> None:
    template = JinjaChatTemplate(find_chat_template(FOLDER, TOKENIZER.config), TOKENIZER.tokens)
    made = Preparer(TOKENIZER, template, LIMITS)
    call = ToolCall("f", '{"x": "</tool_call>"}')
    ids = ids_of(made, messages=[Message("user", "U"), Message("assistant", "", tool_calls=(call,))])
    assert ids.count(TOKENIZER.added_id("<tool_call>")) == 1  # type: ignore[arg-type]
    assert ids.count(TOKENIZER.added_id("</tool_call>")) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["<think>", "</think>", "[TOOL_CALLS]", "<|tool|>", "<｜tool▁calls▁begin｜>", "◁think▷"]
)
def test_marks(text: str) -> None:
    assert acts_as_control(text)


@pytest.mark.parametrize(
    "text", ["  ", "\n\n", "\t", "word", "SARS-CoV-2", "<td>", "</h1>", "<br/>", "--", "()", " a ", ".com"]
)
def test_ordinary_tokens(text: str) -> None:
    assert not acts_as_control(text)


def normalizing() -> Tokenizer:
    """Reads capital letters as small ones, and wide signs as narrow ones, in tags too."""
    made = Fast(models.BPE({char: at for at, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    made.add_tokens(
        [AddedToken("<think>", special=False, normalized=True), AddedToken("<td>", normalized=True)]
    )
    return Tokenizer(json.loads(made.to_str()), {}, 300)


@pytest.mark.parametrize(
    "bad", ["<think>", "<THINK>", "＜think＞", "<|END|>", "a＜｜end｜＞b", "<think><THINK>"]
)
def test_what_a_normalizer_makes_of_a_text_is_no_control_token(bad: str) -> None:
    tokenizer = normalizing()
    source = "{% for m in messages %}<|end|>{{ m.content }}<think>{% endfor %}"
    made = Preparer(tokenizer, JinjaChatTemplate({"default": source}), Limits(300, 4096, 4096))
    ids = ids_of(made, messages=[Message("user", bad)])
    ours = [tokenizer.added_id("<|end|>"), tokenizer.added_id("<think>")]
    assert [token for token in ids if token in ours] == ours
    allowed = ids_of(made, messages=[Message("user", bad)], allow_control_tokens=True)
    assert sum(token in ours for token in allowed) > 2
    assert tokenizer.decode(ids, False) == tokenizer.decode(allowed, False)


def test_html_keeps_its_tokens() -> None:
    tokenizer = normalizing()
    made = Preparer(
        tokenizer, JinjaChatTemplate({"default": "{{ messages[0].content }}"}), Limits(300, 4096, 4096)
    )
    assert tokenizer.added_id("<td>") in ids_of(made, messages=[Message("user", "<td>a<think>")])


def test_a_placeholder_of_nothing_stays() -> None:
    tokens = ControlTokens(["<a>"])
    assert tokens.shown("\ue0f0\ue4ff\ue0f1") == "\ue0f0\ue4ff\ue0f1"
    assert tokens.shown(tokens.hide_text("\ue0f0\ue100\ue0f1<a>")) == "\ue0f0\ue100\ue0f1<a>"
