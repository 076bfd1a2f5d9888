"""A registered template's prefixes and suffixes give the text that the family's own Jinja gives.

The Jinja texts are in data/, their sources in data/SOURCES.md. Where a Jinja text is not made of prefixes and
suffixes, the table says how it differs, and the rest is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat import get_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.protocol.errors import TemplateError
from tests.exploring import tries

DATA = Path(__file__).parent / "data"
Turns = list[dict[str, str | None]]


def same(text: str) -> str:
    return text


@dataclass(frozen=True)
class Case:
    """How one family's Jinja relates to its registered template.

    template      the registered name
    lead          pattern of what Jinja writes before the first turn
    eos           the tokenizer's end-of-text, which some Jinja texts print
    spaced        roles whose text Jinja writes after a space that belongs to the text here (models spell it)
    adds_default  without a system message, Jinja writes the template's default system prompt
    before_system Jinja puts this before the system prompt; after_system: this after it
    own_system    what Jinja writes as the system prompt when there is none
    date          pattern of the date that Jinja writes; it is put to another day before comparing
    systems       False: Jinja refuses system messages
    moves_system  Jinja puts the system prompt into the last message, and only when the user wrote that
    opening       what Jinja's generation prompt adds to (or lacks of) the reply's prefix: prefix -> prompt
    closing       what Jinja does to the text when it ends with a reply; None: it rewrites that reply
    """

    template: str
    lead: str = re.escape("<s>")
    eos: str = "</s>"
    spaced: tuple[str, ...] = ()
    adds_default: bool = False
    before_system: str = ""
    after_system: str = ""
    own_system: str | None = None
    date: str = ""
    systems: bool = True
    moves_system: bool = False
    opening: Callable[[str], str] = same
    closing: Callable[[str], str] | None = same


def adding(more: str) -> Callable[[str], str]:
    return lambda text: text + more


def lacking(end: str) -> Callable[[str], str]:
    def cut(text: str) -> str:
        assert text.endswith(end)
        return text.removesuffix(end)

    return cut


GLM_LEAD = re.escape("[gMASK]<sop>")
REPLY = ("assistant",)
NOON = datetime(2026, 7, 26, 12)
A_DAY = "26 Jul 2024"
DATED = f"Cutting Knowledge Date: December 2023\nToday Date: {A_DAY}\n\n"
SMOLLM3 = (
    f"## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: {A_DAY}\nReasoning Mode: /think\n\n"
    "## Custom Instructions\n\n"
)
COMMAND_A = "# System Preamble\n(safety, languages, date)\n\n# Default Preamble\n(the defaults)"

CASES: dict[str, Case] = {
    "baichuan2": Case("baichuan2", lead=""),
    # A preamble of its own comes first, and a reply is opened after every conversation, asked for or not.
    "command-a": Case(
        "command-a",
        before_system=f"{COMMAND_A}\n\n# Developer Preamble\n(these take precedence)\n",
        own_system=COMMAND_A,
        opening=lacking("<|START_RESPONSE|>"),
        closing=adding("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    ),
    "command-r": Case("c4ai-command-r"),
    "deepseek-v2": Case("deepseek-v2", eos="<｜end▁of▁sentence｜>", spaced=REPLY),
    "deepseek-v3": Case("deepseek-v3"),
    # It opens the reply in the user's suffix: the same text wherever a reply follows.
    "deepseek-v3-0324": Case("deepseek-v3"),
    "deepseek-v3.1": Case("deepseek-v3.1"),
    "deepseek-r1-distill": Case("deepseek-r1-distill", opening=adding("<think>\n")),
    "gemma-2": Case("gemma-it", systems=False),
    "gemma-3": Case("gemma-3-it"),
    "gemma-4": Case("gemma-4", opening=adding("<|channel>thought\n<channel|>")),
    "glm-4": Case("glm-4", lead=GLM_LEAD, opening=lacking("\n")),
    "glm-4.5": Case("glm-4.5", lead=GLM_LEAD, opening=lacking("\n<think></think>\n")),
    "glm-4.7": Case("glm-4.7", lead=GLM_LEAD, opening=lambda prefix: lacking("</think>")(prefix) + "<think>"),
    # The identity and the date come first; a reply at the very end is closed for training.
    "gpt-oss": Case(
        "gpt-oss",
        lead=r"<\|start\|>system<\|message\|>(?s:.*?)<\|end\|>",
        opening=lacking("<|channel|>final<|message|>"),
        closing=lambda text: lacking("<|end|>")(text) + "<|return|>",
    ),
    "granite-4": Case("granite-4", lead="", adds_default=True),
    "grok-2": Case("grok-2", lead="", spaced=REPLY),
    "hermes-3": Case("hermes-3", adds_default=True),
    "internvl3": Case("internvl3", lead=""),
    "kimi-k2": Case("kimi-k2", lead="", adds_default=True),
    "kimi-k2-thinking": Case(
        "kimi-k2-thinking", lead="", adds_default=True, opening=lacking("<think></think>")
    ),
    "llama-2": Case("llama-2-chat", spaced=REPLY, closing=lacking("<s>")),
    "llama-3": Case("llama-3-instruct"),
    "llama-3.1": Case("llama-3-instruct", before_system=DATED, own_system=DATED),
    "llama-3.2": Case(
        "llama-3-instruct", before_system=DATED, own_system=DATED, date=r"(?<=Today Date: )\d\d \w+ \d{4}"
    ),
    "llama-4": Case("llama-4"),
    "magistral": Case("magistral", own_system="(how to think)[THINK](the thoughts)[/THINK](the answer)"),
    "minimax-m2": Case("minimax-m2", lead=re.escape("]~!b["), adds_default=True, opening=adding("<think>\n")),
    "mistral-v1": Case("mistral-v1", spaced=REPLY),
    "mistral-v3": Case("mistral-v3", spaced=REPLY, moves_system=True),
    "mistral-v3-tekken": Case("mistral-v3-tekken", moves_system=True),
    "mistral-v7": Case("mistral-v7", spaced=REPLY),
    "mistral-v7-tekken": Case(
        "mistral-v7-tekken",
        own_system=f"(who it is; the date is {A_DAY})",
        date=r"(?<=the date is )\d{4}-\d\d-\d\d",
    ),
    "olmo-2": Case("olmo-2", eos="<|endoftext|>", closing=lacking("\n")),
    "phi-3.5": Case("phi-3.5", lead="", closing=adding("</s>")),
    "phi-4": Case("phi-4", lead=""),
    "phi-4-mini": Case("phi-4-mini", lead="", closing=adding("</s>")),
    "qwen2": Case("qwen", lead="", adds_default=True),
    "qwen2.5": Case("qwen2.5", lead="", adds_default=True),
    # A reply at the very end gets an empty thought, which goes when the conversation continues.
    "qwen3": Case("qwen3", lead="", closing=None),
    "qwq": Case("qwq", lead="", opening=adding("<think>\n")),
    "smollm2": Case("smollm2", lead="", adds_default=True),
    "smollm3": Case(
        "smollm3",
        lead="",
        before_system=SMOLLM3,
        after_system="\n\n",
        own_system=f"{SMOLLM3}(how to think and to answer)\n\n",
        date=r"(?<=Today Date: )\d\d \w+ \d{4}",
    ),
    "vicuna": Case("vicuna_v1.1", adds_default=True, spaced=("user", "assistant")),
    "yi": Case("yi", lead=""),
    # As deepseek-v3-0324.
    "yi-1.5": Case("yi-1.5", lead=""),
    "zephyr": Case("zephyr", lead=""),
}
# Their Jinja drops the reasoning of earlier replies, so a reply that thought is not what it was; these
# keep that of a reply which ends the conversation.
KEEP_LAST = ("glm-4.5", "glm-4.7", "minimax-m2", "qwen3", "qwq")
DROP_REASONING = (*KEEP_LAST, "deepseek-v3.1", "deepseek-r1-distill")

TEXT = (
    st.text(alphabet="aZ0 é日.\n{}%<|/>'\"\\", min_size=1, max_size=12)
    .map(str.strip)
    .filter(lambda text: text != "" and "<|" not in text)
)
PAIRS = st.lists(st.tuples(TEXT, TEXT), max_size=3)


def jinja_of(name: str) -> JinjaChatTemplate:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = {"bos_token": "<s>", "eos_token": CASES[name].eos}
    return JinjaChatTemplate({"default": source}, tokens, now=lambda: NOON)


JINJA = {name: jinja_of(name) for name in CASES}


def conversation(system: str | None, pairs: list[tuple[str, str]], last: str) -> Turns:
    turns: Turns = [{"role": "system", "content": system}] if system is not None else []
    for asked, replied in pairs:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    return [*turns, {"role": "user", "content": last}]


def here(case: Case, turns: Turns) -> Turns:
    """The same conversation as the registered template is to be given it."""
    made: Turns = [
        {**turn, "content": f" {turn['content']}"} if turn["role"] in case.spaced else dict(turn)
        for turn in turns
    ]
    system = made.pop(0)["content"] if made[0]["role"] == "system" else None
    system = case.own_system if system is None else f"{case.before_system}{system}{case.after_system}"
    if system is not None or case.adds_default:
        made.insert(0, {"role": "system", "content": system})
    return made


def by_jinja(name: str, turns: Turns, *, opened: bool) -> str:
    """Jinja's text without what it writes before the first turn."""
    case = CASES[name]
    text = JINJA[name].render(turns, add_generation_prompt=opened)
    found = re.match(case.lead, text)
    assert found is not None, text
    text = text[found.end() :]
    return re.sub(case.date, A_DAY, text, count=1) if case.date else text


def test_every_jinja_file_is_compared_and_has_a_source() -> None:
    names = {path.stem for path in DATA.glob("*.jinja")}
    assert names == set(CASES)
    sources = (DATA / "SOURCES.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in sources for name in names)
    assert len(names) >= 15


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=tries(30))
@given(system=st.none() | TEXT, pairs=PAIRS, last=TEXT, reply=TEXT)
def test_prefixes_and_suffixes_give_jinjas_text(
    name: str, system: str | None, pairs: list[tuple[str, str]], last: str, reply: str
) -> None:
    case, template = CASES[name], get_chat_template(CASES[name].template)
    if not case.systems:
        system = None
    if system is not None and case.moves_system:
        pairs = []
    turns = conversation(system, pairs, last)
    mine = here(case, turns)
    text = template.get_prompt(mine)

    prefix, _ = template.get_prefix_and_suffix("assistant", mine)
    assert by_jinja(name, turns, opened=True) == text + case.opening(prefix)

    if case.closing is not None and not (system is not None and case.moves_system):
        turns.append({"role": "assistant", "content": reply})
        closed = case.closing(template.get_prompt(here(case, turns)))
        assert by_jinja(name, turns, opened=False) == closed


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.systems])
def test_families_without_a_system_role_refuse_it(name: str) -> None:
    with pytest.raises(TemplateError, match="System role"):
        JINJA[name].render(conversation("S", [], "U"))


@pytest.mark.parametrize("name", DROP_REASONING)
def test_earlier_reasoning_is_dropped_by_jinja_and_kept_by_prefixes(name: str) -> None:
    case = CASES[name]
    turns = conversation(None, [("U1", "<think>\nbecause\n</think>\n\nA1")], "U2")
    assert "because" not in JINJA[name].render(turns)
    assert "because" in get_chat_template(case.template).get_prompt(here(case, turns))
    assert ("because" in JINJA[name].render(turns[:-1])) is (name in KEEP_LAST)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.moves_system])
def test_where_jinja_moves_the_system_prompt_the_prefixes_stay_append_only(name: str) -> None:
    template, case = get_chat_template(CASES[name].template), CASES[name]
    shorter, longer = conversation("S", [], "U1"), conversation("S", [("U1", "A1")], "U2")
    assert not JINJA[name].render(longer).startswith(JINJA[name].render(shorter))
    assert template.get_prompt(here(case, longer)).startswith(template.get_prompt(here(case, shorter)))
    assert JINJA[name].render(longer).endswith(f"S\n\nU2{template.role_prefix_and_suffix['user'][1]}")
