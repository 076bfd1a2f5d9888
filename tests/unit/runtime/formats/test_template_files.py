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


def test_jinja_text_itself() -> None:
    template = load_chat_template("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}\n" * 40,
                                  variables={"eos_token": "</s>"})  # fmt: skip
    assert isinstance(template, JinjaChatTemplate)
    assert template.render(ASKED) == "U</s>" * 40
    with pytest.raises(TemplateError, match="cannot be parsed"):
        load_chat_template("{% if %}")
    assert load_chat_template("{% if %}", check=False) is not None


def test_a_processors_file(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.JSON"
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}), encoding="utf-8")
    template = load_chat_template(file)
    assert isinstance(template, JinjaChatTemplate)
    assert template.render(ASKED) == "U!"
    file.write_text(json.dumps({"chat_template": {"default": "D", "rag": "R"}}), encoding="utf-8")
    named = load_chat_template(file, hf_chat_template_name="rag")
    assert isinstance(named, JinjaChatTemplate)
    assert named.render(ASKED) == "R"
    wrongs: list[Any] = [5, [], {}, {"default": 1}]
    for wrong in wrongs:
        file.write_text(json.dumps({"chat_template": wrong}), encoding="utf-8")
        with pytest.raises(ModelLoadError, match=r"chat_template"):
            load_chat_template(file)


def test_a_name_without_named_texts_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps({"user": "U", "assistant": "A"}), encoding="utf-8")
    (tmp_path / "own.jinja").write_text("{{ messages }}", encoding="utf-8")
    for spec in ("chatml", tmp_path / "own.json", tmp_path / "own.jinja", "{{ messages }}"):
        with pytest.raises(ModelLoadError, match="rag") as caught:
            load_chat_template(spec, hf_chat_template_name="rag")
        assert caught.value.where == "hf_chat_template_name"


@pytest.mark.parametrize("spec", ["", "x" * 5000, "a\0b", "~no-such-user/x", "\ud800", "no such thing"])
def test_what_is_neither_name_nor_file_nor_text_is_an_error(spec: str) -> None:
    with pytest.raises(ModelLoadError, match="chatml"):
        load_chat_template(spec)


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


def test_odd_files_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    for name, text, said in [
        ("empty.jinja", "\n", "is empty"),
        ("plain.txt", "Hello there", "no Jinja"),
        ("utf16.jinja", "{{ messages }}".encode("utf-16"), "not UTF-8"),
        ("empty.json", '{"chat_template": ""}', "is empty"),
        ("short.json", '{"user": "U"}', 'missing required field `assistant`.*may have "system"'),
        ("big.jinja", "x" * (5 << 20), "bytes"),
    ]:
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ModelLoadError, match=said) as caught:
            load_chat_template(file)
        assert caught.value.where == str(file)
    with pytest.raises(ModelLoadError, match="is a directory"):
        load_chat_template(tmp_path)
    with pytest.raises(ModelLoadError, match="there is no file"):
        load_chat_template(tmp_path / "none.jinja")
    with pytest.raises(ModelLoadError, match="'rag' is empty"):
        load_chat_template({"default": "D", "rag": " "})
    (tmp_path / "bom.jinja").write_bytes("\ufeff{{ messages[0].content }}".encode())
    assert load_chat_template(tmp_path / "bom.jinja").render(ASKED) == "U"  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", [None, 5, b"chatml", ["chatml"], object()])
def test_values_of_another_type_are_refused(spec: Any) -> None:
    with pytest.raises(ModelLoadError, match="got"):
        load_chat_template(spec)


@pytest.mark.parametrize(
    ("asked", "near"),
    [("CHATML", "chatml"), ("chatlm", "chatml"), ("qwn3", "qwen3"), ("Qwen-3", "qwen3"),
     ("qwen/qwen2.5", "qwen2.5"), ("llama3", "llama-3-instruct"), ("llama_4", "llama-4"),
     ("gpt oss", "gpt-oss"), ("no-such-thing-here", None), ("", None)],
)  # fmt: skip
def test_a_near_name_is_offered(asked: str, near: str | None) -> None:
    for ask, kind in ((load_chat_template, ModelLoadError), (get_chat_template, UnknownName)):
        with pytest.raises(kind) as caught:
            ask(asked)
        assert (f"did you mean {near!r}?" in str(caught.value)) is (near is not None)
        assert "did you mean" not in str(caught.value) or near is not None


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
