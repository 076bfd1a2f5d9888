"""Whether an output begins with reasoning: what the request says, what its prompt shows, what the template
leaves on."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.render import conversation
from runtime.formats.reasoning.marks import marks_of
from runtime.processes.checkpoint.model import Model, left_on, reasoning_kind
from runtime.processes.checkpoint.templates import TemplateChoice
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message

VOCAB = 512
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A"
)
PLAIN = TURNS + "{% endif %}"
OPENS = TURNS + "<think>\n{% endif %}"
HYBRID = (
    TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}{% endif %}"
)
SWITCHED_ON = TURNS + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
YES = Constraint("regex", "yes")


def preparer(files: dict[str, Any], template: str, *, as_text: bool = False) -> Preparer:
    data = dict(files["byte level"])
    if not as_text:
        free = 1 + max([*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])])
        marks = [
            {"id": free + at, "content": text, "special": True, "normalized": False, "single_word": False,
             "lstrip": False, "rstrip": False}
            for at, text in enumerate(("<think>", "</think>"))
        ]  # fmt: skip
        data["added_tokens"] = [*data["added_tokens"], *marks]
    tokenizer = Tokenizer(data, {}, VOCAB)
    made = JinjaChatTemplate({"default": template}, {})
    choice = TemplateChoice("checkpoint jinja", None, "", made)
    sources = [*made.sources.values(), "<think></think>"]
    marks = marks_of("auto", tokenizer.added_id, tokenizer.encode, sources)
    assert bool(marks.close_ids) != as_text
    model = Model(None, None, tokenizer, choice)  # type: ignore[arg-type]
    limits = Limits(VOCAB, 256, 256)
    return Preparer(tokenizer, made, limits, marks=marks, thinks=left_on(model, marks))


def reasons(made: Preparer, **fields: Any) -> bool:
    given = {
        "require_reasoning": None,
        "constraint": YES,
        "messages": conversation([Message("user", "Hi")]),
        **fields,
    }
    if "text" in given or "input_ids" in given:
        del given["messages"]
    (request,) = made.prepare(GenerateReqInput(**given)).requests
    return request.require_reasoning


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (PLAIN, {}, False),
        (PLAIN, {"enable_thinking": True}, True),
        (OPENS, {}, True),
        (HYBRID, {}, True),
        (HYBRID, {"enable_thinking": True}, True),
        (HYBRID, {"enable_thinking": False}, False),
        (HYBRID, {"thinking": False}, False),
        (SWITCHED_ON, {}, False),
        (SWITCHED_ON, {"thinking": True}, True),
        (SWITCHED_ON, {"enable_thinking": True}, True),
    ],
)
def test_where_nothing_is_said_the_template_says_it(
    tokenizer_files: dict[str, Any], template: str, variables: dict[str, Any], expected: bool, as_text: bool
) -> None:
    made = preparer(tokenizer_files, template, as_text=as_text)
    assert reasons(made, template_kwargs=variables) == expected
    assert not reasons(made, template_kwargs=variables, constraint=None), "nothing depends on it"
    assert not reasons(made, template_kwargs=variables, require_reasoning=False)


@pytest.mark.parametrize("as_text", [False, True])
def test_prompts_of_text_and_of_ids_show_it(tokenizer_files: dict[str, Any], as_text: bool) -> None:
    made = preparer(tokenizer_files, PLAIN, as_text=as_text)
    for text, expected in (
        ("a<think>\n", True),
        ("<think>a", False),
        ("<think>a</think>\n\n", False),
        ("a", False),
    ):
        assert reasons(made, text=text) == expected
        assert reasons(made, input_ids=made.tokenizer.encode(text)) == expected
    assert reasons(made, text="a", require_reasoning=True)


def test_a_message_that_quotes_the_mark_opens_nothing(tokenizer_files: dict[str, Any]) -> None:
    quoting = TURNS.removesuffix("A") + "{% endif %}"  # the reply follows the message at once
    made = preparer(tokenizer_files, quoting)
    assert not reasons(made, messages=conversation([Message("user", "<think>")]))


@pytest.mark.parametrize(
    ("template", "fields", "where"),
    [
        (PLAIN, {"max_thinking_tokens": -1}, "max_thinking_tokens"),
        (PLAIN, {"require_reasoning": False, "max_thinking_tokens": 1}, "max_thinking_tokens"),
        (SWITCHED_ON, {"require_reasoning": True}, "require_reasoning"),
        (PLAIN, {"require_reasoning": True, "template_kwargs": {"thinking": False}}, "require_reasoning"),
        (PLAIN, {"require_reasoning": True, "choices": ["a"], "constraint": None}, "require_reasoning"),
    ],
)
def test_contradictions_are_refused(
    tokenizer_files: dict[str, Any], template: str, fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        reasons(preparer(tokenizer_files, template), **fields)
    assert caught.value.where == where


def test_a_model_that_does_not_reason_says_so(tokenizer_files: dict[str, Any]) -> None:
    tokenizer = Tokenizer(dict(tokenizer_files["byte level"]), {}, VOCAB)
    made = Preparer(tokenizer, JinjaChatTemplate({"default": PLAIN}, {}), Limits(VOCAB, 256, 256))
    assert not reasons(made)
    for fields in ({"require_reasoning": True}, {"max_thinking_tokens": 3}):
        with pytest.raises(BadRequest, match="reasoning_end"):
            reasons(made, **fields)


def test_a_family_that_nobody_knows_is_named() -> None:
    assert reasoning_kind(None) is None
    assert reasoning_kind("auto") is None
    assert reasoning_kind("step3") is not None
    with pytest.raises(BadRequest, match="known: auto, deepseek-r1") as caught:
        reasoning_kind("nobody's")
    assert caught.value.where == "reasoning_parser"
