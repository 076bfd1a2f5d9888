"""The bundled checkpoint's files: size, tokenizer, chat template, card, and equality with transformers."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.pocket.chat import render
from examples.pocket.corpus import conversation
from examples.pocket.items import TARGETS
from examples.pocket.tasks import HELD
from examples.pocket.tokenizer import SPECIAL, TAGS
from runtime.pocket import path
from tests.exploring import tries

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path()))


def test_total_size() -> None:
    assert sum(file.stat().st_size for file in path().rglob("*")) <= 16_000_000


def test_files_agree_on_the_end_of_a_turn(tokenizer: Any) -> None:
    config = json.loads((path() / "config.json").read_text())
    generation = json.loads((path() / "generation_config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]
    assert config["vocab_size"] == len(tokenizer)


def test_special_tokens_and_tags_are_single_tokens(tokenizer: Any) -> None:
    for token in SPECIAL + TAGS:
        assert len(tokenizer.encode(f"a{token}b")) == 3
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL + TAGS]
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    assert all(tag in shown for tag in TAGS)
    assert not any(token in shown for token in SPECIAL)


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1204")) == list("1204")


@settings(max_examples=tries(300), deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("seed", range(20))
def test_template_equals_the_training_text(tokenizer: Any, seed: int) -> None:
    made = conversation(random.Random(seed), HELD, 4, tools=seed % 2 == 0)
    shown = tokenizer.apply_chat_template(
        made.messages, tools=made.tools or None, tokenize=False, add_generation_prompt=True
    )
    assert shown == render(made.messages, made.tools)


@pytest.mark.parametrize("seed", range(20))
def test_template_is_append_only(tokenizer: Any, seed: int) -> None:
    made = conversation(random.Random(seed), HELD, 4, tools=seed % 2 == 0)
    tools = made.tools or None
    previous = ""
    for count in range(1, len(made.messages) + 1):
        part = made.messages[:count]
        shown = tokenizer.apply_chat_template(part, tools=tools, tokenize=False)
        assert shown.startswith(previous)
        opened = tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=True)
        assert opened == shown + "<|im_start|>assistant\n"
        previous = shown


def test_structured_tool_calls_print_like_the_training_text(tokenizer: Any) -> None:
    call = {"name": "get_weather", "arguments": {"city": "Orlan"}}
    asked = [{"role": "user", "content": "Weather in Orlan?"}]
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    plain = [*asked, {"role": "assistant", "content": text}]
    for content in ("", None):
        structured = [
            *asked,
            {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": call}]},
        ]
        shown = tokenizer.apply_chat_template(structured, tokenize=False)
        assert shown == tokenizer.apply_chat_template(plain, tokenize=False)


def test_the_card_lists_the_evaluated_figures() -> None:
    card = (path() / "MODEL_CARD.md").read_text()
    assert "Apache-2.0" in card
    assert re.search(r"Measured on 20\d\d-\d\d-\d\d ", card)
    assert re.search(r"\d+ minutes", card)
    for task, target in TARGETS.items():
        row = re.search(rf"^\| {task} \|(.*)\|$", card, re.MULTILINE)
        assert row, task
        figures = [float(figure) for figure in re.findall(r"([\d.]+) %", row[1])]
        assert len(figures) >= 2
        assert figures[0] == pytest.approx(100 * target)
        assert min(figures[1:]) >= figures[0]


def test_the_training_module_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from examples.pocket.model import Pocket, Shape

    weights = {k: v.float() for k, v in load_file(str(path() / "model.safetensors")).items()}
    ours = Pocket(Shape(vocab=weights["model.embed_tokens.weight"].shape[0]))
    ours.load_state_dict(weights)
    theirs = AutoModelForCausalLM.from_pretrained(str(path()), dtype=torch.float32).eval()
    ids = torch.randint(0, 1000, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        mine = ours.logits(ours.hidden(ids)[0])
        assert torch.allclose(mine, theirs(ids).logits, atol=2e-3, rtol=1e-3)
