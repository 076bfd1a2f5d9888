"""LLGuidanceBackend: JSON schemas, Lark and EBNF grammars and regular expressions by the llguidance library,
an Earley parser over a lexer of derivatives. Text that was not sampled is followed byte by byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher
from llguidance._lib import LLParserLimits

from runtime.grammar.automata.regex_syntax import rust_literal, rust_spelling
from runtime.grammar.backends.library_matcher import LibraryMatcher
from runtime.grammar.backends.llguidance_parser import LLSpace, Parser
from runtime.grammar.backends.llguidance_schema import compile_schema
from runtime.grammar.backends.llguidance_text import text_grammar
from runtime.grammar.backtracking import MissingByteMatcher
from runtime.grammar.base import GrammarBackend, Matcher, Origin, read_choices
from runtime.grammar.ebnf.reading import check_lark_depth, is_ebnf, parse_ebnf
from runtime.grammar.ebnf.spelling import to_lark
from runtime.grammar.json_schema.document import KIND, format_policy, layout, read_document
from runtime.grammar.tags.structural_tag import StructuralTags
from runtime.grammar.tags.tag_space import tag_space
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary


@dataclass(frozen=True)
class LLGuidanceLimits:
    """What compiling one constraint, and one step of it, may cost, in llguidance's own units.

    start_fuel, step_fuel   work of the lexer when compiling and for one mask (about 50 and 14 a microsecond)
    step_items, row_items   items of the parser for one mask, and for one byte of text
    states, grammar_size    states of the lexer (1 to 2 kB each), symbols of the grammar
    """

    start_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 200_000
    row_items: int = 20_000
    states: int = 50_000
    grammar_size: int = 500_000

    def to_library(self) -> LLParserLimits:
        return LLParserLimits(
            max_items_in_row=self.row_items,
            initial_lexer_fuel=self.start_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.states,
            max_grammar_size=self.grammar_size,
            verbose_errors=False,
        )


DEFAULT_LIMITS = LLGuidanceLimits()


_SOURCE_LINES = re.compile(r" \d+ \| ")
_LARK_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OPTIONS_LINE = re.compile(r"^%llguidance[ \t]+(\{.*\})[ \t]*$", re.MULTILINE)


class LLGuidanceMatcher(LibraryMatcher):
    """A copy shares the lexer and copies the parser's stack."""

    _space: LLSpace
    _parser: Parser

    def _take_token(self, token: int) -> bool:
        if self._parser.try_consume_tokens([token]) == 1:
            return True
        self._check()
        return False

    def _take_bytes(self, data: bytes) -> int | None:
        ids = [self._space.byte_ids[value] for value in data]
        taken = self._parser.try_consume_tokens(ids)
        if taken == len(ids):
            return taken
        self._check()
        if taken:
            self._parser.rollback(taken)
        return None

    def _compute(self) -> TokenMask:
        if self._parser.is_stopped():
            self._check()
            return self._space.bits.stop_only
        bits = np.zeros(self._space.word_count, dtype=np.uint32)
        self._parser.compute_mask(bits.ctypes.data, bits.nbytes)
        self._check()
        return self._space.bits.seal(bits)

    def forced_bytes(self) -> bytes:
        if self._stopped or self._parser.is_stopped():
            return b""
        forced = self._parser.compute_ff_bytes()
        self._check()
        return forced

    def may_stop(self) -> bool:
        return self._stopped or self._parser.is_accepting()

    def is_terminated(self) -> bool:
        return self._stopped or (self._parser.is_stopped() and not self._parser.is_error())

    def _twin(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._space, self.origin, self._parser.copy())

    def _check(self) -> None:
        """Raise BadConstraint if a limit was met while following the text."""
        if self._parser.is_error():
            raise BadConstraint(
                f"is too complex to follow here: {_message(self._parser.get_error())}",
                where=self._parser.kind,
                hint="simplify it",
            )


class LLGuidanceBackend(GrammarBackend):
    """Kinds: json_schema, ebnf (GBNF text, or Lark in llguidance's variant), regex, choices, structural_tag.

    whitespace: between the tokens of JSON: "compact" (none), "single" (at most one space) or "flexible" (a
    space, or a line break with up to 40 columns of indentation). Properties come in the order of the schema.
    schema_format: what `format` does in a schema: "assertion", or "annotation".
    """

    name = "llguidance"
    OPTIONS = frozenset({"whitespace", "schema_format", "parser_limits"})

    def __init__(
        self, vocabulary: Vocabulary, *, whitespace: str = "flexible", schema_format: str = "assertion",
        parser_limits: LLGuidanceLimits = DEFAULT_LIMITS,
    ) -> None:  # fmt: skip
        super().__init__(vocabulary)
        self._limits = parser_limits
        self._layout, self._formats = layout(whitespace), format_policy(schema_format)
        self._tags = StructuralTags(vocabulary, self.compile, self.name, self._text)

    @cached_property
    def space(self) -> LLSpace:
        """Created when first needed: it takes a second for a large vocabulary."""
        tag_space(self.vocabulary)
        return LLSpace(self.vocabulary)

    def compile(self, constraint: Constraint) -> Matcher:
        match constraint.kind:
            case "json_schema":
                return self._json(constraint)
            case "ebnf":
                return self._start(
                    _lark(constraint.spec), Origin(self.name, literals=constraint.spec), "ebnf"
                )
            case "regex":
                grammar = _unforced(f"start: /{rust_spelling(constraint.spec)}/")
                return self._start(grammar, Origin(self.name, literals=constraint.spec), "regex")
            case "choices":
                pattern = "|".join(map(rust_literal, read_choices(constraint.spec)))
                return self._start(_unforced(f"start: /{pattern}/"), Origin(self.name), "choices")
            case "structural_tag":
                return self._tags.compile(constraint)

    def _text(self, schema: Any, excludes: Sequence[str]) -> tuple[str, list[str]]:
        return text_grammar(schema, excludes, formats=self._formats == "assertion")

    def _json(self, constraint: Constraint) -> Matcher:
        document = read_document(constraint, self._formats)
        spaces = self._layout if constraint.whitespace is None else layout(constraint.whitespace)
        return compile_schema(document, spaces, self.name, self._start_json, self.space.closing_tokens)

    def _start_json(self, schema: str, origin: Origin) -> Matcher:
        return self._start(_unforced(f"start: %json {schema}"), origin, KIND)

    def _start(self, grammar: str, origin: Origin, kind: str) -> Matcher:
        """A matcher at the start of `grammar`, with its first mask. Raises BadConstraint."""
        space = self.space
        parser = Parser.start(space.tokenizer, grammar, self._limits.to_library(), kind)
        if parser.is_error():
            raise BadConstraint(_message(parser.get_error())[:2000], where=kind)
        matcher = LLGuidanceMatcher(space, origin, parser)
        matcher.mask()
        return MissingByteMatcher(matcher, space.bits) if space.lacks_bytes else matcher


def _lark(spec: str) -> str:
    """The library's form of a grammar: Lark, or EBNF, which is known by its `::=`."""
    if is_ebnf(spec):
        return _unforced(to_lark(parse_ebnf(spec)))
    check_lark_depth(spec)
    return _unforced(spec)


def _unforced(lark: str) -> str:
    """The grammar with masks that list every token that fits. By default, if bytes are forced, the library
    offers only the token that its tokenizer would write."""
    options: dict[str, Any] = {}
    line = _OPTIONS_LINE.search(lark)
    if line is not None:
        try:
            options = msgspec.json.decode(line[1].encode(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadConstraint(f"the %llguidance line is not a JSON object: {error}", where="ebnf") from None
        lark = lark.replace(line[0], "", 1)
    options["no_forcing"] = True
    # At the end, so that the positions in the library's messages are those of the text.
    return LLMatcher.grammar_from_lark(f"{lark}\n%llguidance {json.dumps(options)}")


def _message(text: str) -> str:
    """The library's error message without its internal state."""
    message = _LARK_POSITION.sub(r"at line \1, column \2: ", " ".join(text.split("<state>")[0].split()))
    return (
        _SOURCE_LINES.split(message)[0] if message.startswith("at line") else message or "cannot be compiled"
    )
