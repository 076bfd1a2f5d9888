"""Regular expressions drawn with texts that match them and texts that nearly do, and vocabularies with what
is awkward in real ones, for the property tests of grammars. It knows no test.

    EXPLORE=NUMBER         draws other examples, the same for the same number
    PROPERTY_LOOPS=10      ten times as many of them
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pydoc_data import topics
from typing import Any

import numpy as np
from hypothesis import strategies as st

from runtime.grammar.base import Matcher
from runtime.grammar.masks.vocabulary_bytes import vocabulary_from_tokenizer
from runtime.grammar.table import make_backend
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import EXPLORE, EXPLORING

LOOPS = int(os.environ.get("PROPERTY_LOOPS", "1"))
SEED = EXPLORE if EXPLORING else 5

# -- regular expressions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A regular expression and a maker of texts that (nearly always) match it."""

    pattern: str
    make: Callable[[random.Random], str]


_ATOMS: dict[str, str] = {
    "a": "a",
    "b": "b",
    "é": "é",
    "日": "日",
    "😀": "😀",
    r"\d": "07٣९",
    r"\w": "aZ_9éß日",
    r"\s": " \t\n\u00a0\u2003",
    r"\S": "a.é日",
    r"\D": "a-é",
    r"\W": "-. é"[:3] + "\u2003",
    ".": "ab é\t日",
    "[^a]": "b\né日",
    "[a-cé-ö]": "acéö",
    r"[\w-]": "a-9é",
    r"[^\W\d]": "a_é日",
    r"[^\s\"\\]": "ab日😀",
    "[\u4e00-\u9fff]": "日本",
    "(?i:ß)": "ßẞ",
    "(?i:k)": "kK\u212a",
    "(?i:[a-f])": "aFc",
    r"\x41": "A",
    r"\u00e9": "é",
    r"\.": ".",
    r"\\": "\\",
    r"\n": "\n",
    r"[\]\-^]": "]-^",
    r"(?a:\w)": "aZ_9",
    "(?s:.)": "a\né😀",
    r"\U0001F600": "😀",
    "[😀-😎]": "😀😎",
    r"\|": "|",
    r"[^\x00-\u00ff]": "日😀Ā",
    "[^\U00010000-\U0010ffff]": "a日",
    r"(?a:\s)": " \t",
    "[01]": "01",
    "ab": "",
    r"\x00": "\x00",
    r"[\x00-\x1f]": "\x00\x1f",
    "(?-i:q)": "q",
    "(?x: a # b\n)": "a",
    r"\t": "\t",
    " ": " ",
}
_CONDITIONS = [r"\b", r"\B", "^", "$", r"\A", r"\Z", "(?m:^)", "(?m:$)"]
IRREGULAR = [
    r"(?=a)",
    r"(?!a)",
    r"(?<=a)",
    r"(?<!b)",
    r"(?>a|ab)",
    "a*+",
    r"(a)\1",
    r"(?P<q>b)(?P=q)",
    "(c)?(?(1)a|b)",
]
POOL = 'ab\n 09_-.éß日😀\\"]|\x00\u212aAZkKq\u2003٣'


def _atom(pattern: str) -> Drawn:
    texts = _ATOMS[pattern]
    return Drawn(pattern, lambda dice: dice.choice(texts) if texts else pattern)


def _seq(parts: list[Drawn]) -> Drawn:
    return Drawn("".join(p.pattern for p in parts), lambda dice: "".join(p.make(dice) for p in parts))


def _alt(parts: list[Drawn], open_: str) -> Drawn:
    return Drawn(open_ + "|".join(p.pattern for p in parts) + ")", lambda dice: dice.choice(parts).make(dice))


def _repeat(part: Drawn, low: int, high: int | None, spelling: str) -> Drawn:
    def make(dice: random.Random) -> str:
        most = low + 3 if high is None else high
        count = dice.choice([low, most, dice.randint(low, most)])
        return "".join(part.make(dice) for _ in range(count))

    return Drawn(f"(?:{part.pattern}){spelling}", make)


_TIMES: list[tuple[int, int | None, str]] = [
    (0, 1, "?"),
    (0, None, "*"),
    (1, None, "+"),
    (0, 1, "??"),
    (0, None, "*?"),
    (2, 2, "{2}"),
    (1, 3, "{1,3}"),
    (0, 2, "{,2}"),
    (2, None, "{2,}"),
    (0, 0, "{0}"),
    (3, 5, "{3,5}?"),
]
_COUNTS = [(0, 20), (7, 7), (5, 40), (16, 64), (1, 100), (0, 300), (255, 256), (0, 1000)]
_atoms = st.sampled_from(sorted(_ATOMS)).map(_atom)


def _grow(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    several = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        several.map(_seq),
        st.builds(_alt, several, st.sampled_from(["(?:", "("])),
        st.builds(lambda part, times: _repeat(part, *times), inner, st.sampled_from(_TIMES)),
        st.builds(lambda part: Drawn(f"({part.pattern}|)", part.make), inner),
    )


def _counted(atom: Drawn, count: tuple[int, int], lazy: bool) -> Drawn:
    low, high = count
    spelling = (f"{{{low}}}" if low == high else f"{{{low},{high}}}") + "?" * lazy
    return _repeat(atom, low, high, spelling)


def _framed(part: Drawn, begin: str, end: str, flags: str) -> Drawn:
    return Drawn(f"{flags}{begin}(?:{part.pattern}){end}", part.make)


small_regexes = st.recursive(_atoms, _grow, max_leaves=7)
counters = st.builds(_counted, _atoms, st.sampled_from(_COUNTS), st.booleans())
regexes: st.SearchStrategy[Drawn] = st.one_of(
    small_regexes,
    small_regexes,
    st.lists(st.one_of(counters, st.recursive(_atoms, _grow, max_leaves=3)), min_size=1, max_size=3).map(
        _seq
    ),
    st.builds(lambda part, more: _alt([part, more], "(?:"), counters, _atoms),
    st.builds(
        _framed,
        small_regexes,
        st.sampled_from(["", "^", r"\A"]),
        st.sampled_from(["", "$", r"\Z"]),
        st.sampled_from(["", "(?i)", "(?s)", "(?a)", "(?m)", "(?ai)"]),
    ),
)


def _with(part: Drawn, spelling: str, more: Drawn) -> Drawn:
    return Drawn(part.pattern + spelling + more.pattern, lambda dice: part.make(dice) + more.make(dice))


conditional = st.recursive(
    st.builds(_with, _atoms, st.sampled_from(_CONDITIONS), _atoms) | _atoms, _grow, max_leaves=4
)
irregular = st.builds(_with, small_regexes, st.sampled_from(IRREGULAR), _atoms)


def texts_for(drawn: Drawn, seed: int, most: int = 1200) -> list[str]:
    """Texts that match, texts that nearly match, and others; short where `re` itself could take for ever."""
    dice = random.Random(seed)
    found = ["", dice.choice(POOL)]
    for _ in range(4):
        text = drawn.make(dice)[:most]
        found.append(text)
        found.extend(mutated(text, dice) for _ in range(3))
    return found


def mutated(text: str, dice: random.Random) -> str:
    at = dice.randint(0, len(text))
    match dice.randrange(5):
        case 0:
            return text[:at] + text[at + 1 :]
        case 1:
            return text[:at] + dice.choice(POOL) + text[at:]
        case 2:
            return text[:at] + dice.choice(POOL) + text[at + 1 :]
        case 3:
            return text[:at]
        case _:
            return text[:at] + text[max(0, at - 1) :]


# -- vocabularies --------------------------------------------------------------------------------------------


def _awkward() -> Vocabulary:
    """All bytes, words across tokens' usual borders, parts of characters, several characters in one, twins,
    two ends, control tokens whose text looks like content, and ids of no text."""
    words = [
        "the",
        " the",
        "ab",
        "abab",
        '{"',
        '"}',
        '":',
        '": ',
        '", "',
        "],",
        "[[",
        "}}",
        "10",
        "-1",
        "0.5",
        "true",
        "null",
        "日本",
        "日本語",
        "é",
        "éé",
        "😀😀",
        "e\u0301",
        "\n\n",
        "    ",
        "</think>",
        "</",
        "<f=",
        "1</f>",
        "</think>{",
        "yes",
        "ye",
        "no",
        "a",
        "a",
        "ab",
        '"a"',
        ',"b":',
        "aaaa",
        "-",
        "2026",
        "\\u00",
        '\\"',
        '"]',
    ]
    parts = [
        b"\xc3",
        b"\xa9",
        b"\xe6\x97",
        b"\x97\xa5",
        b"a\xe6",
        b"\xa5b",
        b"\xf0\x9f",
        b"\x98\x80",
        b'"\xc3',
    ]
    texts = [*(bytes([value]) for value in range(256)), *(word.encode() for word in words), *parts]
    control = [b"ab", b"1", b'{"a"', b""]
    first = len(texts)
    return Vocabulary(
        (*texts, *control, b"", b"</s>", b""),
        frozenset({*range(first, first + 4), first + 4, first + 5, first + 6}),
        frozenset({first + 4, first + 5}),
    )


def _gappy() -> Vocabulary:
    """Not every byte is a token: some stand only inside of longer ones."""
    words = [
        *'abcdefghijklmnov0123456789.,:;-_ "{}[]<>/=+*()',
        "true",
        "false",
        "null",
        "\\n",
        "é",
        "日",
        "xyz",
        "qu",
        "yes",
        "no",
        "the ",
        '":',
        "aa",
        "😀",
        "zz",
        "the",
        "END",
        "</think>",
    ]
    texts = [word.encode() for word in words]
    return Vocabulary((*texts, b""), frozenset({len(texts)}), frozenset({len(texts)}))


def _pocket() -> Vocabulary:
    from pathlib import Path

    import runtime.pocket

    folder = Path(runtime.pocket.__path__[0]) / "checkpoint"
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    eos = config["eos_token_id"]
    return vocabulary_from_tokenizer(
        data, vocab_size=config["vocab_size"], eos=eos if isinstance(eos, list) else [eos]
    )


def _trained() -> Vocabulary:
    """Byte-level BPE of 4,000 on English, program text and JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = list(topics.topics.values())[:40]
    dice = random.Random(1)
    texts += [
        json.dumps(
            {"name": "日本", "n": [dice.randrange(10**6), 0.5], "x": {"é": None}},
            indent=dice.choice([None, 2]),
        )
        for _ in range(300)
    ]
    tokenizer.train_from_iterator(texts, trainer)
    data = json.loads(tokenizer.to_str())
    return vocabulary_from_tokenizer(
        data, vocab_size=tokenizer.get_vocab_size() + 7, eos=[tokenizer.token_to_id("<|end|>")]
    )


_VOCABULARIES = {"awkward": _awkward, "gappy": _gappy, "pocket": _pocket, "trained": _trained}
VOCABULARIES = list(_VOCABULARIES)


@cache
def vocabulary(name: str) -> Vocabulary:
    return _VOCABULARIES[name]()


@cache
def backend(name: str, words: str, **options: Any) -> Any:
    return make_backend(name, vocabulary(words), **options)


def texts_of(words: Vocabulary) -> tuple[bytes, ...]:
    """The bytes of each id, b"" where it stands for no text."""
    silent = words.special | words.eos
    return tuple(b"" if number in silent else data for number, data in enumerate(words.tokens))


def allowed(matcher: Matcher) -> list[int]:
    """The ids of its mask, whose two forms must agree."""
    mask = matcher.mask()
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
    assert mask.allowed is None or mask.allowed.tolist() == ids
    return ids
