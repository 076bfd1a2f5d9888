"""Which chat template an engine takes, from checkpoints on disk: asked, own Jinja, marks, name, or none."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from runtime.config.model import ModelSpec
from runtime.formats.chat import matching, register_chat_template_matching_function
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import get_chat_template
from runtime.formats.chat.render import render_prompt
from runtime.processes.checkpoint.templates import TemplateChoice, choose_template
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.errors import ModelLoadError, TemplateError
from runtime.protocol.messages import RAW_ROLE, Message

LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEKKEN = ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TALK = [Message("user", "U"), Message("assistant", "", open=True)]


def write(
    folder: Path,
    tokens: Sequence[str] = ("<s>", "</s>"),
    eos: str | int | Sequence[str] | None = None,
    *,
    architecture: str = "LlamaForCausalLM",
    model_type: str = "llama",
    generation_eos: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    special: bool = True,
) -> Path:
    """A checkpoint of one layer without weights. `eos`: of config.json; `generation_eos`: of
    generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Library(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text in tokens])
    made.save(str(folder / "tokenizer.json"))

    def ids(texts: Sequence[str]) -> list[int]:
        return [made.token_to_id(text) for text in texts]

    shape = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1, "intermediate_size": 8, "max_position_embeddings": 64,
             "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4,
             "sliding_window": None}  # fmt: skip
    said = shape | {"architectures": [architecture], "model_type": model_type} | (config or {})
    if isinstance(eos, str):
        said["eos_token_id"] = ids([eos])[0]
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    if generation_eos:
        text = json.dumps({"eos_token_id": ids(generation_eos)})
        (folder / "generation_config.json").write_text(text)
    return folder


def choose(folder: Path, asked: Any = None, name: str | None = None, **words: Any) -> TemplateChoice:
    spec = ModelSpec.from_dir(folder)
    tokenizer = Tokenizer.load(folder, spec.vocab_size, spec.eos_ids)
    return choose_template(asked, folder, tokenizer, name, **words)


# -- asked --------------------------------------------------------------------------------------------------


def test_what_is_asked_for_comes_first(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3-8B", CHATML, "<|im_end|>", tokenizer_config={"chat_template": OWN})
    (tmp_path / "mine.jinja").write_text(OWN.replace("<", "["))
    (tmp_path / "mine.json").write_text(json.dumps({"user": "U", "assistant": "A", "name": "mine"}))
    (tmp_path / "processor.json").write_text(json.dumps({"chat_template": OWN.replace("<", "(")}))
    named = {"default": OWN, "short": "{{ messages[0].content }}"}
    texts = {
        "llama-3-instruct": "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>",
        str(tmp_path / "mine.jinja"): "[user>U",
        str(tmp_path / "mine.json"): "U: U\n",
        str(tmp_path / "processor.json"): "(user>U",
        OWN.replace("<", "*"): "*user>U",
    }
    for asked, expected in texts.items():
        found = choose(folder, asked)
        assert found.source == "asked"
        assert render_prompt(TALK[:1], found.renderer) == expected
        assert asked[:20] in found.reason
    assert choose(folder, "llama-3-instruct").name == "llama-3-instruct"
    assert choose(folder, str(tmp_path / "mine.json")).name == "mine"
    assert render_prompt(TALK[:1], choose(folder, named).renderer) == "<user>U"
    assert render_prompt(TALK[:1], choose(folder, named, "short").renderer) == "U"


@pytest.mark.parametrize(
    "asked", ["no-such-template", "/no/such/file.jinja", "a" * 5000, "a\0b", "~nobody/x", ""]
)
def test_what_is_asked_for_and_not_there_is_an_error(tmp_path: Path, asked: str) -> None:
    folder = write(tmp_path / "Qwen3-8B")
    with pytest.raises(ModelLoadError, match="chatml"):
        choose(folder, asked)


def test_a_name_where_there_are_no_named_templates_is_not_dropped(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3-8B", CHATML, "<|im_end|>")
    for asked in (None, "chatml", OWN):
        with pytest.raises(ModelLoadError, match="rag"):
            choose(folder, asked, "rag")


# -- the checkpoint's own Jinja -----------------------------------------------------------------------------


def test_the_checkpoints_jinja_comes_before_its_marks_and_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3-8B", CHATML, "<|im_end|>", tokenizer_config={"chat_template": OWN})
    found = choose(folder)
    assert (found.source, found.name, found.reason) == ("checkpoint jinja", None, "tokenizer_config.json")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OWN + "2"}))
    assert choose(folder).reason == "tokenizer_config.json"
    (folder / "tokenizer_config.json").write_text("{}")
    found = choose(folder)
    assert (found.source, found.reason) == ("checkpoint jinja", "chat_template.json")
    assert render_prompt(TALK[:1], found.renderer) == "<user>U2"
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    found = choose(folder)
    assert (found.name, found.reason) == ("chatml", "chat_template.jinja")


def test_named_templates_of_the_checkpoint(tmp_path: Path) -> None:
    named = [{"name": "default", "template": OWN}, {"name": "rag", "template": "{{ messages[0].content }}"}]
    folder = write(tmp_path / "x", tokenizer_config={"chat_template": named})
    assert render_prompt(TALK[:1], choose(folder).renderer) == "<user>U"
    found = choose(folder, None, "rag")
    assert render_prompt(TALK[:1], found.renderer) == "U"
    assert "rag" in found.reason
    with pytest.raises(ModelLoadError, match="default, rag"):
        choose(folder, None, "other")


def test_an_empty_template_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", tokenizer_config={"chat_template": ""})
    (folder / "chat_template.json").write_text("{}")
    assert choose(folder).source == "none"
    (folder / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelLoadError, match=r"chat_template\.json"):
        choose(folder)


# -- marks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tokens", "eos", "words", "expected"),
    [
        # Its generations end where a turn ends: that is enough, whatever it is called.
        ("my-finetune", LLAMA_3, "<|eot_id|>", {}, "llama-3-instruct"),
        ("my-finetune", LLAMA_3, "<|end_of_text|>", {"generation_eos": ["<|end_of_text|>", "<|eot_id|>"]},
         "llama-3-instruct"),
        ("my-finetune", LLAMA_3, None, {"tokenizer_config": {"eos_token": "<|eot_id|>"}}, "llama-3-instruct"),
        ("my-finetune", CHATML, "<|im_end|>", {}, "chatml"),
        ("step-100", CHATML, "<|im_end|>",
         {"architecture": "Qwen3ForCausalLM", "model_type": "qwen3"}, "qwen3"),
        # Tokens that were added and are not marked special count as well.
        ("my-finetune", CHATML, "<|im_end|>", {"special": False}, "chatml"),
        # Or its name says that it chats.
        ("Llama-3-8B-my-instruct", LLAMA_3, "<|end_of_text|>", {}, "llama-3-instruct"),
        ("our_chat_model", LLAMA_3, "<|end_of_text|>", {}, "llama-3-instruct"),
        ("step-100", LLAMA_3, "<|end_of_text|>",
         {"config": {"_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct"}}, "llama-3-instruct"),
        ("Mistral-Small-24B-Instruct-2501", TEKKEN, "</s>",
         {"architecture": "MistralForCausalLM", "model_type": "mistral"}, "mistral-v7-tekken"),
    ],
)  # fmt: skip
def test_marks_that_are_borne_out(
    tmp_path: Path, name: str, tokens: list[str], eos: str | None, words: dict[str, Any], expected: str
) -> None:
    found = choose(write(tmp_path / name, tokens, eos, **words))
    assert (found.source, found.name) == ("checkpoint marks", expected)
    assert found.template is get_chat_template(expected)


@pytest.mark.parametrize(
    ("name", "tokens", "eos", "words"),
    [
        # Base Llama 3: every token of the instruct model, and its generations end with the text.
        ("Meta-Llama-3-8B", LLAMA_3, "<|end_of_text|>", {"generation_eos": ["<|end_of_text|>"]}),
        ("my-finetune", LLAMA_3, "<|end_of_text|>", {}),
        ("Qwen2.5-7B", CHATML, "<|endoftext|>",
         {"architecture": "Qwen2ForCausalLM", "model_type": "qwen2"}),
        ("Qwen3-8B-Base", CHATML, "<|endoftext|>",
         {"architecture": "Qwen3ForCausalLM", "model_type": "qwen3"}),
        # The name says base: the end token does not overrule it.
        ("my-model-base", LLAMA_3, "<|eot_id|>", {}),
        ("Mistral-Small-24B-Base-2501", TEKKEN, "</s>",
         {"architecture": "MistralForCausalLM", "model_type": "mistral"}),
        # </s> ends every text; it bears nothing out.
        ("my-finetune", TEKKEN, "</s>", {"architecture": "MistralForCausalLM", "model_type": "mistral"}),
        ("step-100", LLAMA_3, "<|end_of_text|>", {"config": {"_name_or_path": "meta-llama/Llama-3.1-8B"}}),
    ],
)  # fmt: skip
def test_base_checkpoints_are_given_no_format(
    tmp_path: Path, name: str, tokens: list[str], eos: str | None, words: dict[str, Any]
) -> None:
    found = choose(write(tmp_path / name, tokens, eos, **words))
    assert (found.source, found.name, found.template) == ("none", None, None)
    assert name in found.reason
    assert "special tokens" in found.reason


# -- names --------------------------------------------------------------------------------------------------


def test_the_name_decides_where_nothing_else_does(tmp_path: Path) -> None:
    plain = write(tmp_path / "vicuna-7b-v1.5")
    found = choose(plain)
    assert (found.source, found.name) == ("model name", "vicuna_v1.1")
    other = write(tmp_path / "step-7", config={"_name_or_path": "lmsys/vicuna-7b-v1.5"})
    assert (choose(other).source, choose(other).name) == ("model name", "vicuna_v1.1")
    unknown = write(tmp_path / "step-8", config={"_name_or_path": "../out"})
    assert choose(unknown).source == "none"
    assert choose(unknown, called="lmsys/vicuna-7b-v1.5").name == "vicuna_v1.1"


def test_a_hub_cache_folder_goes_by_its_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--lmsys--vicuna-7b-v1.5" / "snapshots" / "0123abcd"
    assert choose(write(snapshot)).name == "vicuna_v1.1"


def test_a_registered_function_is_a_persons_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_FUNCTIONS", [])
    folder = write(tmp_path / "house-model", CHATML, "<|im_end|>")
    register_chat_template_matching_function(lambda path: "zephyr" if "house-model" in path else None)
    found = choose(folder)
    assert (found.source, found.name) == ("model name", "zephyr")
    assert choose(folder, "qwen").name == "qwen"
    (folder / "chat_template.jinja").write_text(OWN)
    assert choose(folder).source == "checkpoint jinja"
    (folder / "chat_template.jinja").unlink()
    matching._FUNCTIONS.clear()
    register_chat_template_matching_function(lambda path: "nothing-of-this-name")
    with pytest.raises(ModelLoadError, match="nothing-of-this-name"):
        choose(folder)


# -- none ---------------------------------------------------------------------------------------------------


def test_without_a_template_turns_are_refused_with_the_reason_and_the_ways_out(tmp_path: Path) -> None:
    found = choose(write(tmp_path / "my-finetune"))
    assert (found.source, found.template, found.chat_template) == ("none", None, None)
    raw = [Message(RAW_ROLE, "just text", open=True)]
    assert render_prompt(raw, found.renderer) == "just text"
    conversations = [
        TALK,
        TALK[:1],
        [Message(RAW_ROLE, "text"), *TALK],
        [Message("assistant", "x", open=True)],
    ]
    for messages in conversations:
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            with pytest.raises(TemplateError) as caught:
                render_prompt(messages, found.renderer, tools=tools)
            error = caught.value
            assert error.status == 400
            assert error.where == "messages"
            assert "my-finetune" in error.message
            assert error.hint is not None
            for way in ('chat_template="chatml"', ".jinja", "register_chat_template_matching_function"):
                assert way in error.hint


def test_the_choice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="runtime.processes.templates"):
        choose(write(tmp_path / "my-finetune", LLAMA_3, "<|eot_id|>"))
    assert "llama-3-instruct" in caplog.text
    assert "checkpoint marks" in caplog.text
    assert "<|eot_id|>" in caplog.text


# -- what is known of it ------------------------------------------------------------------------------------


def test_what_is_said_of_a_choice(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", tokenizer_config={"chat_template": OWN})
    described = choose(folder).describe()
    assert described["source"] == "checkpoint jinja"
    assert described["shape"] == "prefixes"
    assert described["append_only"] is described["keeps_reasoning"] is described["reuses_replies"] is True
    assert json.loads(json.dumps(described)) == described
    upper = choose(folder, OWN.replace("m.content", "m.content | upper"))
    assert upper.chat_template is None
    assert upper.describe()["shape"] == "jinja"
    assert upper.describe()["reasons"]
    named = choose(folder, "chatml")
    assert named.chat_template is get_chat_template("chatml")
    assert named.derivation is None
    assert named.describe()["shape"] == "prefixes"
    broken = choose(folder, "{% for %}")
    assert isinstance(broken.template, JinjaChatTemplate)
    assert broken.chat_template is None
    assert broken.describe()["shape"] is None


def test_derivation_is_done_once_and_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(write(tmp_path / "x", tokenizer_config={"chat_template": OWN}))
    rendered = 0
    original = JinjaChatTemplate.render

    def counting(self: JinjaChatTemplate, *args: Any, **words: Any) -> str:
        nonlocal rendered
        rendered += 1
        return original(self, *args, **words)

    monkeypatch.setattr(JinjaChatTemplate, "render", counting)
    assert found.force_reasoning is False
    assert rendered == 2
    first = found.derivation
    looked = rendered
    assert first is not None
    assert looked > 10
    assert found.derivation is first
    assert found.describe()["append_only"]
    assert rendered == looked
