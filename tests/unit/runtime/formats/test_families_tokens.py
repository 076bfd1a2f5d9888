"""A family's marks as a tokenizer sees them: each mark is one token, the text comes back, turns do not melt
together; and the token that ends a turn is among the stop strings.

The tokenizer is the one of the checkpoint in this repository, with the families' marks added to it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

import runtime.pocket
from runtime.formats.chat import ChatTemplate, get_chat_template
from runtime.formats.chat.derive import derive_chat_template
from runtime.formats.chat.registry import BUILT_IN
from tests.exploring import tries

CHECKPOINT = Path(runtime.pocket.__file__).parent / "checkpoint"
MARK = re.compile(
    r"<\|[^<>|]+\|>|<[|][^<>|]+>|<[^<>|]+[|]>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_turn>"
    r"|<reserved_\d+>|\]~b\]|\[e~\[|</?think>"
)
# Where the format was fixed elsewhere without a stop string; the end-of-text token ends their turns.
NO_STOP = {
    "c4ai-command-r", "claude", "default", "gemma-4-it", "gemma-it", "llama-2-chat", "vicuna_v1.1", "yi-vl",
}  # fmt: skip
# The tokens at which the checkpoints' own generation settings end a turn.
ENDS = {
    "baichuan2": ["</s>"], "chatml": ["<|im_end|>"], "command-a": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek-r1-distill": ["<｜end▁of▁sentence｜>"], "deepseek-v2": ["<｜end▁of▁sentence｜>"],
    "deepseek-v3": ["<｜end▁of▁sentence｜>"], "deepseek-v3.1": ["<｜end▁of▁sentence｜>"],
    "gemma-3-it": ["<end_of_turn>"], "gemma-4": ["<turn|>"],
    "glm-4": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "glm-4.5": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gpt-oss": ["<|return|>", "<|call|>"], "granite-3-instruct": ["<|end_of_text|>"],
    "granite-4": ["<|end_of_text|>"], "grok-2": ["<|separator|>"], "hermes-3": ["<|im_end|>"],
    "interns1": ["<|im_end|>"], "internvl-2-5": ["<|im_end|>"], "internvl3": ["<|im_end|>"],
    "kimi-k2": ["<|im_end|>"], "llama-3-instruct": ["<|eot_id|>"], "llama-4": ["<|eot|>"],
    "magistral": ["</s>"], "minimax-m2": ["[e~["], "mistral": ["</s>"], "mistral-v1": ["</s>"],
    "mistral-v3": ["</s>"], "mistral-v3-tekken": ["</s>"], "mistral-v7": ["</s>"],
    "mistral-v7-tekken": ["</s>"], "olmo-2": ["<|endoftext|>"], "phi-3.5": ["<|end|>"],
    "phi-4": ["<|im_end|>"], "phi-4-mini": ["<|end|>"], "qwen": ["<|im_end|>"], "qwen2-vl": ["<|im_end|>"],
    "qwen2.5": ["<|im_end|>"], "qwen3": ["<|im_end|>"], "qwq": ["<|im_end|>"], "smollm2": ["<|im_end|>"],
    "smollm3": ["<|im_end|>"], "yi": ["<|im_end|>"], "yi-1.5": ["<|im_end|>"], "zephyr": ["</s>"],
}  # fmt: skip


def written(template: ChatTemplate) -> list[str]:
    return [*template.stop_str, *(text for pair in template.role_prefix_and_suffix.values() for text in pair)]


MARKS = sorted(
    {mark for name in BUILT_IN for text in written(get_chat_template(name)) for mark in MARK.findall(text)}
)
MARKED = [name for name in BUILT_IN if any(MARK.search(text) for text in written(get_chat_template(name)))]


def made() -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


TOKENIZER = made()
SAID = st.text(alphabet="ab Z09.\n é日🦊{}", min_size=1, max_size=10)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), SAID), min_size=1, max_size=5)


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=tries(12), deadline=None)
@given(system=st.none() | SAID, said=TURNS)
def test_a_conversation_through_a_tokenizer(
    name: str, system: str | None, said: list[tuple[str, str]]
) -> None:
    template = get_chat_template(name)
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns += [{"role": role, "content": content} for role, content in said]
    text = template.get_prompt(turns)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text

    marks = MARK.findall(text)
    assert [TOKENIZER.token_to_id(mark) for mark in marks] == [
        token for token in ids if TOKENIZER.id_to_token(token) in MARKS
    ]

    shorter = template.get_prompt(turns[:-1])
    if MARK.match(text[len(shorter) :]):
        before = TOKENIZER.encode(shorter, add_special_tokens=False).ids
        assert ids[: len(before)] == before


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_a_turn_stops(name: str) -> None:
    assert set(ENDS[name]) <= set(get_chat_template(name).stop_str)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_is_written_after_a_reply_stops(name: str) -> None:
    """The mark after a reply, or the next turn's where there is none, begins with a stop string."""
    template = get_chat_template(name)
    assert bool(template.stop_str) is (name not in NO_STOP)
    if not template.stop_str or name.startswith("minicpm"):
        return  # MiniCPM's format is fixed elsewhere with ChatML's stop strings over Vicuna's turns
    after = template.role_prefix_and_suffix["assistant"][1].strip()
    after = after or template.role_prefix_and_suffix["user"][0]
    assert any(after.startswith(stop) for stop in template.stop_str)


def test_the_checkpoint_of_this_repository() -> None:
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    derived = derive_chat_template(config["chat_template"], eos_token=config["eos_token"]).template
    chatml = get_chat_template("chatml")
    assert derived is not None
    for role in ("system", "user", "assistant"):
        assert derived.role_prefix_and_suffix[role] == chatml.role_prefix_and_suffix[role]
    assert config["eos_token"] in chatml.stop_str
