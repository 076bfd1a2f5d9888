"""The engines that backends.py compares, behind one face: ours by name, and three libraries as their
users use them. Each works on one thread and writes its masks as packed bits. Knows no cases, no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from runtime.grammar.base import GrammarBackend, Matcher
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary

OURS = ("auto", "outlines", "llguidance", "xgrammar")
LIBRARIES = ("outlines-core", "llguidance library", "xgrammar library")
WARM = (("regex", "[a-z]{0,5}"), ("json_schema", '{"type":"object","properties":{"a":{"type":"string"}}}'))
"""Compiled once while an engine is prepared, as a server does before it listens."""


class Refused(Exception):
    """The engine does not take the constraint; the text says why."""


class Session(ABC):
    """One generation."""

    @abstractmethod
    def mask(self) -> None:
        """Work the mask of this place out."""

    @abstractmethod
    def allows(self, token: int) -> bool:
        """Whether the last mask has `token`. Not timed."""

    @abstractmethod
    def advance(self, token: int) -> bool: ...


class Engine(ABC):
    """A vocabulary prepared."""

    @abstractmethod
    def compile(self, kind: str, spec: str) -> Any:
        """Something that begin() takes. Raises Refused."""

    @abstractmethod
    def begin(self, compiled: Any) -> Session: ...


class OurSession(Session):
    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher

    def mask(self) -> None:
        self.last = self.matcher.mask()

    def allows(self, token: int) -> bool:
        return bool(int(self.last.bits[token >> 5]) >> (token & 31) & 1)

    def advance(self, token: int) -> bool:
        return self.matcher.advance(token)


class OurEngine(Engine):
    def __init__(self, name: str, vocabulary: Vocabulary) -> None:
        self.backend: GrammarBackend = make_backend(name, vocabulary)
        for kind, spec in WARM:
            try:
                self.backend.compile(Constraint(kind, spec)).mask()  # type: ignore[arg-type]
            except UnsupportedConstraint:
                continue

    def compile(self, kind: str, spec: str) -> Matcher:
        try:
            return self.backend.compile(Constraint(kind, spec))  # type: ignore[arg-type]
        except BadConstraint as error:
            raise Refused(str(error)) from None

    def begin(self, compiled: Matcher) -> Session:
        return OurSession(compiled.copy())


class BitsSession(Session):
    """A library that fills words given to it."""

    def __init__(self, words: int) -> None:
        self.bits = np.zeros(words, dtype=np.uint32)

    def allows(self, token: int) -> bool:
        return bool(int(self.bits[token >> 5]) >> (token & 31) & 1)


class OutlinesCoreSession(BitsSession):
    def __init__(self, index: Any, words: int) -> None:
        from outlines_core import Guide

        super().__init__(words)
        self.guide = Guide(index)

    def mask(self) -> None:
        self.guide.write_mask_into(self.bits.ctypes.data, self.bits.size, 4)

    def advance(self, token: int) -> bool:
        try:
            self.guide.advance(token, return_tokens=False)
        except ValueError:
            return False
        return True


class OutlinesCoreEngine(Engine):
    """outlines-core: an Index over the vocabulary; schemas by its own regex builder."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from outlines_core import Index
        from outlines_core import Vocabulary as Words

        ids: dict[bytes, list[int]] = {}
        for number, data in enumerate(vocabulary.tokens):
            if data:
                ids.setdefault(data, []).append(number)
        self.words = -(-len(vocabulary) // 32)
        self.vocabulary = Words(min(vocabulary.eos), ids)
        Index("[a-z]{0,5}", self.vocabulary)

    def compile(self, kind: str, spec: str) -> Any:
        from outlines_core import Index
        from outlines_core.json_schema import build_regex_from_schema

        if kind not in ("regex", "json_schema"):
            raise Refused(f"takes no {kind}")
        try:
            return Index(spec if kind == "regex" else build_regex_from_schema(spec), self.vocabulary)
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from None

    def begin(self, compiled: Any) -> Session:
        return OutlinesCoreSession(compiled, self.words)


class LLGuidanceSession(BitsSession):
    def __init__(self, matcher: Any, words: int) -> None:
        super().__init__(words)
        self.matcher = matcher

    def mask(self) -> None:
        self.matcher.unsafe_compute_mask_ptr(self.bits.ctypes.data, self.bits.nbytes)

    def advance(self, token: int) -> bool:
        return bool(self.matcher.consume_token(token))


class LLGuidanceEngine(Engine):
    """llguidance with its general slices and its own limits."""

    def __init__(self, vocabulary: Vocabulary, tokenizer_json: Path) -> None:
        from llguidance import LLTokenizer

        self.tokenizer = LLTokenizer(
            str(tokenizer_json),
            n_vocab=len(vocabulary),
            eos_token=min(vocabulary.eos),
            slices=LLTokenizer.general_slices(),
        )
        self.words = -(-len(vocabulary) // 32)

    def compile(self, kind: str, spec: str) -> Any:
        from llguidance import LLMatcher

        make = {
            "regex": LLMatcher.grammar_from_regex,
            "json_schema": LLMatcher.grammar_from_json_schema,
            "ebnf": _gbnf,
        }.get(kind)
        if make is None:
            raise Refused(f"takes no {kind} here")
        try:
            matcher = LLMatcher(self.tokenizer, make(spec), log_level=0)
        except ValueError as error:
            raise Refused(str(error)) from None
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return matcher

    def begin(self, compiled: Any) -> Session:
        return LLGuidanceSession(compiled.deep_copy(), self.words)


def _gbnf(spec: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return LLMatcher.grammar_from_lark(gbnf_to_lark(spec))


class XGrammarSession(BitsSession):
    def __init__(self, compiled: Any, words: int) -> None:
        import torch
        import xgrammar

        super().__init__(words)
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self.tensor = torch.from_numpy(self.bits.view(np.int32)).view(1, -1)

    def mask(self) -> None:
        self.matcher.fill_next_token_bitmask(self.tensor)

    def advance(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token))


class XGrammarEngine(Engine):
    """xgrammar with its defaults, on one thread and without its cache of grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import torch
        import xgrammar

        torch.set_num_threads(1)
        self.words = -(-len(vocabulary) // 32)
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens), xgrammar.VocabType.RAW, vocab_size=len(vocabulary),
            stop_token_ids=sorted(vocabulary.eos), add_prefix_space=False,
        )  # fmt: skip
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, spec: str) -> Any:
        make = {
            "regex": self.compiler.compile_regex,
            "json_schema": self.compiler.compile_json_schema,
            "ebnf": self.compiler.compile_grammar,
            "structural_tag": self.compiler.compile_structural_tag,
        }.get(kind)
        if make is None:
            raise Refused(f"takes no {kind}")
        try:
            return make(spec)
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from None

    def begin(self, compiled: Any) -> Session:
        return XGrammarSession(compiled, self.words)


def make_engine(name: str, vocabulary: Vocabulary, tokenizer_json: Path) -> Engine:
    """One of OURS, or of LIBRARIES. The library llguidance wants the tokenizer, too: it forces tokens."""
    match name:
        case "outlines-core":
            return OutlinesCoreEngine(vocabulary)
        case "llguidance library":
            return LLGuidanceEngine(vocabulary, tokenizer_json)
        case "xgrammar library":
            return XGrammarEngine(vocabulary)
        case _:
            return OurEngine(name, vocabulary)
