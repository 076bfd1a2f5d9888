"""Templates that a user names: built-in, files, named texts; and completion templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.formats.chat.completion import (
    CompletionTemplate,
    HoleAt,
    completion_template_registry,
    get_completion_template,
    register_completion_template,
)
from runtime.formats.chat.files import load_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import ModelLoadError, TemplateError
from runtime.protocol.registry import UnknownName

ASKED = [{"role": "user", "content": "U"}]


def test_a_builtin_name() -> None:
    assert load_chat_template("chatml") is get_chat_template("chatml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}\n", "<s>U"),
        ("{{ messages[0].content }}\\nnext\n\n", "U\nnext"),
        ("{{ messages[0].content + '\\n' }}|\n{{ '\\n' }}", "U\n|\n\n"),
    ],
)
def test_a_jinja_file(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(text, encoding="utf-8")
    template = load_chat_template(file, variables={"bos_token": "<s>"})
    assert isinstance(template, JinjaChatTemplate)
    assert template.render(ASKED) == expected


def test_a_conversation_file(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    data = {"name": "own", "system": "<|im_start|>system\n{system_message}", "system_message": "Be kind.",
            "user": "<|im_start|>user", "assistant": "<|im_start|>assistant", "sep_style": "CHATML",
            "stop_str": ["<|im_end|>", "<|im_start|>"]}  # fmt: skip
    file.write_text(json.dumps(data), encoding="utf-8")
    template = load_chat_template(str(file))
    assert isinstance(template, ChatTemplate)
    assert template.name == "own"
    assert template.stop_str == ("<|im_end|>", "<|im_start|>")
    turns: list[dict[str, Any]] = [{"role": "system", "content": None}, *ASKED]
    assert template.get_prompt(turns) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "{", '{"user": 5, "assistant": "A"}', '{"user":"U","assistant":"A","sep_style":"?"}',
     '{"user": "U", "assistant": "A", "stop_str": [1]}', '{"user":"U","assistant":"A","system_message":1}',
     "[" * 100_000],
)  # fmt: skip
def test_a_broken_conversation_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"broken\.json"):
        load_chat_template(file)


def test_named_texts() -> None:
    sources = {"default": "D", "tool_use": "T", "rag": "R"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = load_chat_template(sources)
    assert isinstance(plain, JinjaChatTemplate)
    assert (plain.render(ASKED), plain.render(ASKED, tools=tools)) == ("D", "T")
    named = load_chat_template(sources, hf_chat_template_name="rag")
    assert isinstance(named, JinjaChatTemplate)
    assert (named.render(ASKED), named.render(ASKED, tools=tools)) == ("R", "R")
    with pytest.raises(ModelLoadError, match="default, tool_use, rag"):
        load_chat_template(sources, hf_chat_template_name="none")


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.jinja.*chatml"):
        load_chat_template(tmp_path / "none.jinja")
    bad = tmp_path / "bad.jinja"
    bad.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelLoadError, match=r"bad\.jinja"):
        load_chat_template(bad)
    bad.write_text("a\n{% if %}", encoding="utf-8")
    with pytest.raises(TemplateError, match="cannot be parsed"):
        load_chat_template(bad)
    with pytest.raises(ModelLoadError, match="mapping"):
        load_chat_template({})


def test_completion_templates() -> None:
    assert {"deepseek-coder", "star_coder", "qwen-coder"} <= set(completion_template_registry)
    assert get_completion_template("deepseek-coder").render("a", "b") == (
        "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"
    )
    assert get_completion_template("star_coder").render("a", "b") == (
        "<fim_prefix>a<fim_suffix>b<fim_middle>"
    )
    assert get_completion_template("qwen-coder").render("a", "b") == (
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    with pytest.raises(UnknownName, match="star_coder"):
        get_completion_template("none")
    own = CompletionTemplate("star_coder", "1", "2", "3", HoleAt.END)
    with pytest.raises(ValueError, match="star_coder"):
        register_completion_template(own)
