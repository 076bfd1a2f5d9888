"""XGrammarBackend: JSON schemas, EBNF, regular expressions and choices by the xgrammar library, a pushdown
automaton over bytes whose masks are prepared for the whole vocabulary when a grammar is compiled.

A schema that the library keeps goes in as it is (see xgrammar_schema.py), all else as EBNF with characters by
code point, because the library reads patterns otherwise than Python (`\\x00b` is one character there, `\\w`
is ASCII). Importing the library imports torch and transformers, so that waits for the first constraint.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from runtime.grammar.automata import regex_syntax
from runtime.grammar.backends.library_matcher import LibraryMatcher, LibrarySpace
from runtime.grammar.backends.xgrammar_schema import check
from runtime.grammar.backtracking import MissingByteMatcher
from runtime.grammar.base import GrammarBackend, Matcher, Origin, read_choices
from runtime.grammar.ebnf import reading as ebnf
from runtime.grammar.ebnf import tree
from runtime.grammar.ebnf.spelling import to_narrow_ebnf
from runtime.grammar.json_schema.document import KIND, format_policy, layout, read_document
from runtime.grammar.json_schema.examples import examples
from runtime.grammar.masks.token_bits import Bits, TokenBits
from runtime.grammar.tags.structural_tag import StructuralTags
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.registry import MissingExtra
from runtime.protocol.vocabulary import Vocabulary

_CONTROLS = re.compile(rb"[\x00-\x1f]")
_CONTROLS_NOT_LINES = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Bytes that no JSON string contains, and that the library lets into strings of bounded length: they are
barred. Whitespace is then spaces, or spaces and line breaks."""

_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"any_whitespace": False, "separators": (",", ":")},
    "single": {"any_whitespace": True, "max_whitespace_cnt": 1},
    "flexible": {"any_whitespace": True, "max_whitespace_cnt": 40},
}


@dataclass(frozen=True)
class XGrammarLimits:
    """What compiling one constraint may cost. work: states that counts are written out to, times the size of
    the vocabulary (a million takes 0.1 to 1 s): the library cannot be interrupted. written_out: characters
    and names with all rules in the places of their names. memory_bytes: of what was compiled."""

    work: int = 8_000_000
    written_out: int = 1 << 16
    memory_bytes: int = 256 << 20


DEFAULT_LIMITS = XGrammarLimits()


def _missing(package: str | None) -> MissingExtra:
    return MissingExtra(
        f"grammar backend 'xgrammar' needs the package {package!r}: pip install 'sglang-dsl[xgrammar]'"
    )


class XSpace(LibrarySpace):
    """A vocabulary prepared for xgrammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        all_bits = TokenBits(Vocabulary(tuple(self.tokens)))
        self.text_ids = all_bits.pack(np.array([bool(data) for data in self.tokens]))
        self.barred: dict[re.Pattern[bytes], Bits] = {
            pattern: all_bits.pack(np.array([pattern.search(data) is not None for data in self.tokens]))
            for pattern in (_CONTROLS, _CONTROLS_NOT_LINES)
        }
        """Ids of the texts in which each matches."""
        try:
            self.library: Any = importlib.import_module("xgrammar")  # imports torch
        except ModuleNotFoundError as error:
            raise _missing(error.name) from error
        info = self.library.TokenizerInfo(
            self.tokens, self.library.VocabType.RAW, vocab_size=len(self.tokens), stop_token_ids=self.ends,
            add_prefix_space=False,
        )  # fmt: skip
        self.compiler = self.library.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class XGrammarMatcher(LibraryMatcher):
    """`size`: bytes compiled; `barred`: what no token may contain."""

    _space: XSpace

    def __init__(
        self, space: XSpace, origin: Origin, parser: Any, size: int, barred: re.Pattern[bytes] | None
    ) -> None:
        super().__init__(space, origin, parser)
        self._size, self._barred = size, barred

    def _take_token(self, token: int) -> bool:
        if self._barred and self._barred.search(self._space.bits.texts[token]):
            return False
        return bool(self._parser.accept_token(token))

    def _take_bytes(self, data: bytes) -> int | None:
        if self._barred and self._barred.search(data):
            return None
        return 1 if self._parser.accept_string(data) else None

    def _fill(self) -> Bits:
        """The library's mask; it writes into a new array."""
        bits = np.zeros(self._space.word_count, dtype=np.uint32)
        self._parser.fill_next_token_bitmask(bits.view(np.int32).reshape(1, -1))
        return bits & ~self._space.barred[self._barred] if self._barred else bits

    def _compute(self) -> TokenMask:
        bits, space = self._fill(), self._space
        if not space.vocabulary.eos:
            return space.bits.seal(bits)
        may_stop = self._parser.is_completed()
        for end in space.ends:
            bit = np.uint32(1 << (end & 31))
            bits[end >> 5] = bits[end >> 5] | bit if may_stop else bits[end >> 5] & ~bit
        return space.bits.seal(bits)

    def forced_bytes(self) -> bytes:
        if self._stopped:
            return b""
        try:
            return str(self._parser.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # the path ends inside of a character; the library returns text
            return bytes(error.object)

    def may_stop(self) -> bool:
        return self._stopped or bool(self._parser.is_completed())

    def is_terminated(self) -> bool:
        if self._stopped or not self._parser.is_completed():
            return self._stopped
        return not np.any(self._fill() & self._space.text_ids)

    def footprint(self) -> int:
        return self._size + (1 << 16)

    def _twin(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._space, self.origin, self._parser.fork(), self._size, self._barred)


class XGrammarBackend(GrammarBackend):
    """Kinds: json_schema (but for the keywords that xgrammar_schema refuses), ebnf (GBNF text), regex,
    choices, and structural_tag over them. Raises MissingExtra if the library is not installed.

    whitespace: between the tokens of JSON: "compact" (none), "single" (at most one space) or "flexible" (at
    most 40 spaces and line breaks). schema_format: with "annotation" the keyword `format` has no effect.
    """

    name = "xgrammar"
    OPTIONS = frozenset({"whitespace", "schema_format", "xgrammar_limits"})

    def __init__(
        self, vocabulary: Vocabulary, *, whitespace: str = "flexible", schema_format: str = "assertion",
        xgrammar_limits: XGrammarLimits = DEFAULT_LIMITS,
    ) -> None:  # fmt: skip
        super().__init__(vocabulary)
        if importlib.util.find_spec("xgrammar") is None:
            raise _missing("xgrammar")
        layout(whitespace)  # refuses what is no policy
        self._policy, self._formats = whitespace, format_policy(schema_format)
        self._limits = xgrammar_limits
        self._tags = StructuralTags(vocabulary, self.compile, self.name)

    @cached_property
    def space(self) -> XSpace:
        """Created when first needed: it takes a second for a large vocabulary."""
        return XSpace(self.vocabulary)

    def compile(self, constraint: Constraint) -> Matcher:
        match constraint.kind:
            case "json_schema":
                return self._json(constraint)
            case "ebnf":
                if not ebnf.is_ebnf(constraint.spec):
                    raise UnsupportedConstraint(
                        "Lark is not kept; grammars are EBNF (root ::= ...) here", where="ebnf"
                    )
                return self._grammar(ebnf.parse_ebnf(constraint.spec), "ebnf")
            case "regex":
                node = regex_syntax.without_conditions(regex_syntax.parse(constraint.spec))
                return self._grammar(ebnf.from_node(node, "regex"), "regex")
            case "choices":
                options = tuple(map(ebnf.literal, read_choices(constraint.spec)))
                return self._grammar(ebnf.from_node(regex_syntax.Alt(options), "choices"), "choices")
            case "structural_tag":
                return self._tags.compile(constraint)

    def _json(self, constraint: Constraint) -> Matcher:
        document = read_document(constraint, self._formats)
        policy = constraint.whitespace or self._policy
        kept = check(document)
        self._afford(kept.work, KIND)
        try:
            compiled = self.space.compiler.compile_json_schema(
                json.dumps(document.root), strict_mode=True, **_WHITESPACE[policy]
            )
        except RuntimeError as error:
            raise UnsupportedConstraint(
                _message(error), where=KIND, hint='grammar backend "auto" may keep it'
            ) from None
        origin = Origin(
            self.name, ignored=kept.ignored, narrowed=kept.narrowed, examples=partial(examples, document)
        )
        return self._start(compiled, KIND, origin, _CONTROLS_NOT_LINES if policy == "flexible" else _CONTROLS)

    def _grammar(self, grammar: tree.Grammar, kind: str) -> Matcher:
        self._afford(tree.counted(grammar), kind)
        endless = tree.endless_rule(grammar)
        if endless is not None:
            raise UnsupportedConstraint(
                f"the rule {endless!r} can stand for itself with nothing beside it, which xgrammar follows"
                " without end",
                where=kind,
                hint="take the empty alternative, or the rule itself, out of it",
            )
        if tree.written_out(grammar) > self._limits.written_out:
            raise UnsupportedConstraint(
                f"its rules, written out, come to more than {self._limits.written_out} characters and names,"
                " which xgrammar would hold",
                where=kind,
                hint="use repeats instead of rules that name each other twice",
            )
        try:
            compiled = self.space.compiler.compile_grammar(to_narrow_ebnf(grammar))
        except RuntimeError as error:
            raise BadConstraint(_message(error), where=kind) from None
        return self._start(compiled, kind, Origin(self.name), None)

    def _afford(self, states: int, kind: str) -> None:
        if states * len(self.vocabulary) > self._limits.work:
            raise UnsupportedConstraint(
                f"its counts come to {states} states, which xgrammar would prepare for each of"
                f" {len(self.vocabulary)} tokens; at most {self._limits.work} in all are taken",
                where=kind,
                hint='use smaller counts, or grammar backend "auto"',
            )

    def _start(self, compiled: Any, kind: str, origin: Origin, barred: re.Pattern[bytes] | None) -> Matcher:
        size, space = compiled.memory_size_bytes, self.space
        if size > self._limits.memory_bytes:
            raise BadConstraint(
                f"takes {size} bytes compiled; at most {self._limits.memory_bytes}",
                where=kind,
                hint="simplify it",
            )
        matcher = XGrammarMatcher(space, origin, space.library.GrammarMatcher(compiled), size, barred)
        if not space.bits.count(matcher.mask()) and not matcher.may_stop():
            raise BadConstraint("nothing that the vocabulary spells matches", where=kind)
        return MissingByteMatcher(matcher, space.bits) if space.lacks_bytes else matcher


def _message(error: RuntimeError) -> str:
    """The library's message, without positions in its own source."""
    text = " ".join(str(error).split("The JSON string is")[0].split())
    return text.partition(".cc:")[2].partition(": ")[2][:400] or text[:400] or "cannot be compiled"
