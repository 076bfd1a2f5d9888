"""LLGuidanceBackend: JSON schemas, Lark and EBNF grammars and regular expressions by the llguidance library.

llguidance keeps an Earley parser over a lexer of derivatives, and computes the mask of a state by walking the
vocabulary. A schema goes through `runtime.grammar.json_schema` first, which says what llguidance keeps
exactly, what has to be checked beside it, and what nobody here keeps. It knows no tokenizer: text that was
not sampled is followed byte by byte.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher
from llguidance._lib import LLParserLimits

from runtime.grammar.automata.regex_syntax import rust_literal, rust_spelling
from runtime.grammar.backends.llguidance_parser import Parser
from runtime.grammar.backends.llguidance_space import LLSpace
from runtime.grammar.backends.llguidance_text import text_grammar
from runtime.grammar.base import GrammarBackend, Matcher, Origin, last_steps
from runtime.grammar.ebnf.reading import check_lark_depth, is_ebnf, parse_ebnf
from runtime.grammar.ebnf.spelling import to_lark
from runtime.grammar.json_schema.checks.checked import CheckedMatcher
from runtime.grammar.json_schema.checks.runtime_checks import RuntimeChecks
from runtime.grammar.json_schema.checks.tracker import JsonTracker
from runtime.grammar.json_schema.empty import bury, endless, innermost
from runtime.grammar.json_schema.examples import examples
from runtime.grammar.json_schema.lower import ANY_JSON_LADDER, LADDER, Plan, lower
from runtime.grammar.json_schema.refs import KIND, Place, SchemaDocument, show
from runtime.grammar.json_schema.relaxation import Lowered, Relaxation, Unspelled
from runtime.grammar.json_schema.source import ESCAPES, format_policy, layout, read_document
from runtime.grammar.json_schema.texts.ecma import NO_CHARACTER
from runtime.grammar.missing_bytes import MissingByteMatcher
from runtime.grammar.tags.structural_tag import StructuralTags
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary


@dataclass(frozen=True)
class LLGuidanceLimits:
    """What compiling one constraint, and one step of it, may take, in llguidance's own units.

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


_DEFINITION = re.compile(r"json-schema:///#/\$defs/(\w+)")
_UNSATISFIABLE = "nsatisfiable"
"""Of schemas that no value matches, in which the library has the last word."""
_DEAD = re.compile(r"nsatisfiable.* while processing json-schema:///#/\$defs/(\w+)")
_MAX_DEAD = 64
_SOURCE_LINE = re.compile(r" 1 \| ")
_SOURCE_LINES = re.compile(r" \d+ \| ")
_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OPTIONS_LINE = re.compile(r"^%llguidance[ \t]+(\{.*\})[ \t]*$", re.MULTILINE)


class _Step(NamedTuple):
    """One successful call: how many of the library's tokens it took, and whether it was an end."""

    taken: int
    stopped: bool
    before: _Step | None


@dataclass(frozen=True)
class _Compiled:
    space: LLSpace
    origin: Origin
    where: str
    first: list[TokenMask] = field(default_factory=list)


class LLGuidanceMatcher(Matcher):
    """A place in a grammar. A copy shares the lexer and copies the parser's stack.

    After an eos only an eos may follow, which changes nothing.
    """

    def __init__(self, compiled: _Compiled, parser: Parser) -> None:
        self._compiled, self._parser = compiled, parser
        self._space = compiled.space
        self.vocabulary = self._space.vocabulary
        self._last: _Step | None = None
        self._stopped = False
        self._mask: TokenMask | None = compiled.first[0] if compiled.first else None
        self.origin = compiled.origin

    def advance(self, token: int) -> bool:
        space = self._space
        if token in space.vocabulary.eos:
            return self._done(0, stopped=True) if self.may_stop() else False
        if self._stopped or not 0 <= token < space.bits.width or not space.tokens[token]:
            return False
        if self._parser.try_consume_tokens([token]) != 1:
            self._check()
            return False
        return self._done(1)

    def advance_bytes(self, data: bytes) -> bool:
        if self._stopped:
            return self._done(0, stopped=True) if not data else False
        ids = [self._space.byte_ids[value] for value in data]
        taken = self._parser.try_consume_tokens(ids) if ids else 0
        if taken < len(ids):
            self._check()
            if taken:
                self._parser.rollback(taken)
            return False
        return self._done(taken)

    def _done(self, taken: int, *, stopped: bool = False) -> bool:
        self._last = _Step(taken, self._stopped, self._last)
        self._stopped = stopped
        if taken:
            self._mask = None
        return True

    def mask(self) -> TokenMask:
        if self._stopped:
            return self._space.bits.stop_only
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def _compute(self) -> TokenMask:
        if self._parser.is_stopped():
            self._check()
            return self._space.bits.stop_only
        bits = np.zeros(self._space.words, dtype=np.uint32)
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

    def rollback(self, steps: int) -> None:
        last, taken, stopped = self._last, 0, self._stopped
        for step in last_steps(self._last, steps):
            taken, stopped, last = taken + step.taken, step.stopped, step.before
        if taken:
            self._parser.rollback(taken)
            self._mask = None
        self._last, self._stopped = last, stopped

    def copy(self) -> LLGuidanceMatcher:
        twin = LLGuidanceMatcher(self._compiled, self._parser.copy())
        twin._last, twin._stopped, twin._mask = self._last, self._stopped, self._mask
        twin.origin = self.origin
        return twin

    def _check(self) -> None:
        """A limit was met while following the text: there is no way on, and the reason is told."""
        if self._parser.is_error():
            raise BadConstraint(
                f"is too complex to follow here: {_told(self._parser.get_error())}",
                where=self._compiled.where,
                hint="simplify it",
            )


class LLGuidanceBackend(GrammarBackend):
    """Kinds: json_schema, ebnf (GBNF text, or Lark in llguidance's variant), regex, choices, structural_tag.

    whitespace: between the tokens of JSON: "compact" (none), "single" (at most one space) or "flexible" (a
    space, or a line break with up to 40 columns of indentation).
    Properties come in the order of the schema.
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
        self._space: LLSpace | None = None
        self._lock = threading.Lock()

    @property
    def space(self) -> LLSpace:
        """Made when first needed: it takes a second for a large vocabulary."""
        with self._lock:
            if self._space is None:
                self._space = LLSpace(self.vocabulary)
                self._tags.prepare()
            return self._space

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
                pattern = "|".join(map(rust_literal, _options(constraint.spec)))
                return self._start(_unforced(f"start: /{pattern}/"), Origin(self.name), "choices")
            case "structural_tag":
                return self._tags.compile(constraint)

    def _text(self, schema: Any, excludes: Sequence[str]) -> tuple[str, list[str]]:
        return text_grammar(schema, excludes, formats=self._formats == "assertion")

    def _json(self, constraint: Constraint) -> Matcher:
        document = read_document(constraint, self._formats)
        spaces = self._layout if constraint.whitespace is None else layout(constraint.whitespace)
        try:
            return self._climb(document, LADDER, spaces)
        except Unspelled:  # a text that strings without escapes by number do not have
            escapes = {"json_allowed_escapes": ESCAPES + "u", "json_allow_general_unicode_escapes": True}
            return self._climb(document, ANY_JSON_LADDER, {**spaces, **escapes})

    def _climb(
        self, document: SchemaDocument, ladder: tuple[Relaxation, ...], layout: dict[str, Any]
    ) -> Matcher:
        """The narrowest language of `ladder` that the library takes, checked for what it lacks."""
        refused: BadConstraint | None = None
        tried: list[Lowered] = []
        for relaxation in ladder[-1:] if document.scoped else ladder:
            plan = lower(document, relaxation)
            if plan.schema in tried:
                continue  # it has nothing that this leaves to the validator
            tried.append(plan.schema)
            try:
                matcher = self._start_plan(plan, layout)
            except BadConstraint as error:
                told = _about_schema(error.message, plan)
                if _UNSATISFIABLE in told:
                    raise self._nothing(plan, relaxation, layout, told) from None
                refused = refused or UnsupportedConstraint(told, where=KIND)
                continue
            if not plan.checks:
                return matcher
            checked = CheckedMatcher(
                matcher, JsonTracker(RuntimeChecks(plan).root), self.space.closing_tokens
            )
            checked.mask()
            return checked
        assert refused is not None, "a ladder has a rung"
        raise refused

    def _start_plan(self, plan: Plan, layout: dict[str, Any]) -> Matcher:
        """A matcher of what the plan lowered to. The library refuses the whole for one definition that takes
        nothing, wherever that is used, so such definitions become `false` first."""
        told = plan.listed(), tuple(plan.ignored)
        origin = Origin(self.name, *told, examples=partial(examples, plan.document))
        dead = endless(plan.schema)
        if "" in dead:
            raise BadConstraint("Unsatisfiable schema: it needs itself, so only infinite values would match")
        schema: Lowered = bury(plan.schema, dead) if dead else plan.schema
        buried = 0
        while True:
            text = json.dumps({**schema, "x-guidance": layout} if isinstance(schema, dict) else schema)
            try:
                return self._start(_unforced(f"start: %json {text}"), origin, KIND)
            except BadConstraint as error:
                found = _DEAD.search(error.message)
                if found is None or found[1] in dead or buried >= _MAX_DEAD:
                    raise
                dead.add(found[1])
                buried += 1
                schema = bury(plan.schema, dead)

    def _nothing(
        self, plan: Plan, relaxation: Relaxation, layout: dict[str, Any], told: str
    ) -> BadConstraint:
        """The error for a schema that nothing matches: with the innermost place that says so."""

        def empty(place: Place) -> str | None:
            part = lower(plan.document, relaxation, place)
            try:
                self._start_plan(part, layout)
            except BadConstraint as error:
                message = _about_schema(error.message, part)
                return message if _UNSATISFIABLE in message else None
            return None

        place, told = innermost(plan.document, empty, told)
        # Of the texts with control characters, which this language leaves out, some may still match.
        unspelled = json.dumps(NO_CHARACTER)[1:-1] in json.dumps(plan.schema)
        kind = Unspelled if unspelled and not relaxation.everything else BadConstraint
        return kind(f"nothing matches: {told}", where=f"{KIND} {show(place)}")

    def _start(self, grammar: str, origin: Origin, where: str) -> Matcher:
        """A matcher at the start of `grammar`, its first mask made. Raises BadConstraint."""
        space = self.space
        parser = Parser.start(space.tokenizer, grammar, self._limits.to_library(), where)
        if parser.is_error():
            raise BadConstraint(_told(parser.get_error())[:2000], where=where)
        compiled = _Compiled(space, origin, where)
        matcher = LLGuidanceMatcher(compiled, parser)
        compiled.first.append(matcher.mask())
        return MissingByteMatcher(matcher, space.bits) if space.lacks_bytes else matcher


def _options(spec: str) -> list[str]:
    try:
        options = msgspec.json.decode(spec.encode("utf-8", "surrogatepass"), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadConstraint(f"is not a JSON list of strings: {error}", where="choices") from None
    if not options:
        raise BadConstraint("there are no options", where="choices")
    return options


def _lark(spec: str) -> str:
    """The library's form of a grammar: Lark, or EBNF, which is known by its `::=`."""
    if is_ebnf(spec):
        return _unforced(to_lark(parse_ebnf(spec)))
    check_lark_depth(spec)
    return _unforced(spec)


def _unforced(lark: str) -> str:
    """The grammar with masks that list every token that fits. By itself the library offers, where bytes are
    forced, nothing but the token that its tokenizer would write there."""
    options: dict[str, Any] = {}
    line = _OPTIONS_LINE.search(lark)
    if line is not None:
        try:
            options = msgspec.json.decode(line[1].encode(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadConstraint(f"the %llguidance line is not a JSON object: {error}", where="ebnf") from None
        lark = lark.replace(line[0], "", 1)
    options["no_forcing"] = True
    # At the end, so that the places in the library's messages are those of the text.
    return LLMatcher.grammar_from_lark(f"{lark}\n%llguidance {json.dumps(options)}")


def _told(text: str) -> str:
    """What the library says of a grammar, without its internal state."""
    told = " ".join(text.split("<state>")[0].split())
    told = _LARK_PLACE.sub(r"at line \1, column \2: ", told)
    return _SOURCE_LINES.split(told)[0] if told.startswith("at line") else told or "cannot be compiled"


def _about_schema(text: str, plan: Plan) -> str:
    """What the library says of a schema, in terms of the schema it was made from."""
    text = text.partition("failed to compile JSON schema: ")[2] or text
    text = _SOURCE_LINE.split(text)[0]
    text = _DEFINITION.sub(lambda found: show(plan.names.get(found[1], ())), text)
    return text.strip()[:400]
