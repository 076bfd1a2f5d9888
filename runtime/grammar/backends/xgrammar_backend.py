"""XGrammarBackend: JSON schemas, EBNF, regular expressions and choices by the xgrammar library.

xgrammar matches with a pushdown automaton over bytes whose masks are prepared, for the whole vocabulary, when
a grammar is compiled. A JSON schema goes in as it is, if the library keeps it (see xgrammar_schema.py). All
else goes in as EBNF with characters by code point, because the library's own reading of patterns differs from
Python's (`\\x00b` is one character there, `\\w` is ASCII). Importing the library imports torch and
transformers, so that is done when the first constraint is compiled. It knows no tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from runtime.grammar.automata import regex_syntax
from runtime.grammar.backends.xgrammar_schema import check
from runtime.grammar.base import GrammarBackend, Matcher, Origin, last_steps
from runtime.grammar.ebnf import reading as ebnf
from runtime.grammar.ebnf import tree as ebnf_tree
from runtime.grammar.ebnf.spelling import to_narrow_ebnf
from runtime.grammar.json_schema.examples import examples
from runtime.grammar.json_schema.refs import KIND
from runtime.grammar.json_schema.source import format_policy, read_document
from runtime.grammar.masks.token_bits import Bits, token_bits
from runtime.grammar.missing_bytes import MissingByteMatcher, lacks_bytes
from runtime.grammar.tags.structural_tag import StructuralTags
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint
from runtime.protocol.registry import MissingExtra
from runtime.protocol.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

_CONTROLS = re.compile(rb"[\x00-\x1f]")
_CONTROLS_NOT_LINES = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Bytes that no JSON string holds, and that the library lets into strings of bounded length: texts with one
are barred. Whitespace is then spaces, or spaces and line breaks."""

_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"any_whitespace": False, "separators": (",", ":")},
    "single": {"any_whitespace": True, "max_whitespace_cnt": 1},
    "flexible": {"any_whitespace": True, "max_whitespace_cnt": 40},
}


@dataclass(frozen=True)
class XGrammarLimits:
    """What compiling one constraint may take. work: states that counts are written out to, times the size of
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


def _library() -> Any:
    """The library, which imports torch. Raises MissingExtra."""
    try:
        return importlib.import_module("xgrammar")
    except ModuleNotFoundError as error:
        raise _missing(error.name) from error


class XSpace:
    """A vocabulary prepared for xgrammar: made once, used by every constraint. Thread-safe.

    Ids of the library are those of the vocabulary, followed by one for each byte that no token spells, so
    that its mask tells of every byte whether it may follow, and by an end where the vocabulary has none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.bits = token_bits(vocabulary)
        self.lacks_bytes = lacks_bytes(self.bits)
        tokens = list(self.bits.texts)
        spelled = {data[0]: number for number, data in enumerate(tokens) if len(data) == 1}
        for value in range(256):
            if value not in spelled:
                spelled[value] = len(tokens)
                tokens.append(bytes([value]))
        self.ends = sorted(vocabulary.eos) or [len(tokens)]
        if not vocabulary.eos:
            tokens.append(b"")
        self.words = -(-len(tokens) // 32)
        self.spoken = self._packed(map(bool, tokens))
        """Ids that stand for text."""
        self.barred: dict[re.Pattern[bytes], Bits] = {
            pattern: self._packed(pattern.search(data) for data in tokens)
            for pattern in (_CONTROLS, _CONTROLS_NOT_LINES)
        }
        """Ids of the texts in which each is found."""
        self.library = _library()
        info = self.library.TokenizerInfo(
            tokens, self.library.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=self.ends,
            add_prefix_space=False,
        )  # fmt: skip
        self.compiler = self.library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _packed(self, flags: Iterable[object]) -> Bits:
        padded = np.zeros(self.words * 32, dtype=np.bool_)
        chosen = np.fromiter(map(bool, flags), dtype=np.bool_)
        padded[: len(chosen)] = chosen
        return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


class _Step(NamedTuple):
    """One successful call: how many of the library's steps it took, and whether it was after an end."""

    taken: int
    stopped: bool
    before: _Step | None


@dataclass(frozen=True)
class _Compiled:
    space: XSpace
    origin: Origin
    size: int
    barred: re.Pattern[bytes] | None = None
    """What no token of it may hold."""


class XGrammarMatcher(Matcher):
    """A place in a grammar. After an eos only an eos may follow, which changes nothing. The library never
    sees the end of a text: an end can be taken back, and is not told apart from another."""

    def __init__(self, compiled: _Compiled, parser: xgrammar.GrammarMatcher) -> None:
        self._compiled, self._parser = compiled, parser
        self._space = compiled.space
        self.vocabulary = self._space.vocabulary
        self._last: _Step | None = None
        self._stopped = False
        self._mask: TokenMask | None = None
        self.origin = compiled.origin

    def advance(self, token: int) -> bool:
        space = self._space
        if token in space.vocabulary.eos:
            return self._done(0, stopped=True) if self.may_stop() else False
        if self._stopped or not 0 <= token < space.bits.width or not space.bits.texts[token]:
            return False
        if self._compiled.barred and self._compiled.barred.search(space.bits.texts[token]):
            return False
        return self._done(1) if self._parser.accept_token(token) else False

    def advance_bytes(self, data: bytes) -> bool:
        if self._stopped:
            return self._done(0, stopped=True) if not data else False
        if self._compiled.barred and self._compiled.barred.search(data):
            return False
        if data and not self._parser.accept_string(data):
            return False
        return self._done(1 if data else 0)

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

    def _fill(self) -> Bits:
        """The library's mask, uint32 [words]; it writes into the array that is then given out."""
        bits = np.zeros(self._space.words, dtype=np.uint32)
        self._parser.fill_next_token_bitmask(bits.view(np.int32).reshape(1, -1))
        barred = self._compiled.barred
        return bits & ~self._space.barred[barred] if barred else bits

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
            return self._parser.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # the path ends inside of a character; the library hands out text
            return bytes(error.object)

    def may_stop(self) -> bool:
        return self._stopped or self._parser.is_completed()

    def is_terminated(self) -> bool:
        if self._stopped or not self._parser.is_completed():
            return self._stopped
        return not np.any(self._fill() & self._space.spoken)

    def rollback(self, steps: int) -> None:
        last, taken, stopped = self._last, 0, self._stopped
        for step in last_steps(self._last, steps):
            taken, stopped, last = taken + step.taken, step.stopped, step.before
        if taken:
            self._parser.rollback(taken)
            self._mask = None
        self._last, self._stopped = last, stopped

    def footprint(self) -> int:
        return self._compiled.size + (1 << 16)

    def copy(self) -> XGrammarMatcher:
        twin = XGrammarMatcher(self._compiled, self._parser.fork())
        twin._last, twin._stopped = self._last, self._stopped
        twin._mask, twin.origin = self._mask, self.origin
        return twin


class XGrammarBackend(GrammarBackend):
    """Kinds: json_schema (but for the keywords that xgrammar_schema refuses), ebnf (GBNF text), regex,
    choices, and structural_tag over them. Raises MissingExtra where the library is not installed.

    whitespace: between the tokens of JSON: "compact" (none), "single" (at most one space) or "flexible" (at
    most 40 spaces and line breaks). schema_format: with "annotation" the keyword `format` binds nothing.
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
        if whitespace not in _WHITESPACE:
            known = ", ".join(_WHITESPACE)
            raise BadRequest(f"must be one of {known}, got {whitespace!r}", where="whitespace")
        self._policy, self._formats = whitespace, format_policy(schema_format)
        self._limits = xgrammar_limits
        self._tags = StructuralTags(vocabulary, self.compile, self.name)
        self._space: XSpace | None = None
        self._lock = threading.Lock()

    @property
    def space(self) -> XSpace:
        """Made when first needed: it takes a second for a large vocabulary."""
        with self._lock:
            if self._space is None:
                self._space = XSpace(self.vocabulary)
            return self._space

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
                return self._grammar(ebnf.from_node(_choice(constraint.spec), "choices"), "choices")
            case "structural_tag":
                return self._tags.compile(constraint)

    def _json(self, constraint: Constraint) -> Matcher:
        document = read_document(constraint, self._formats)
        spaces = _WHITESPACE[constraint.whitespace or self._policy]
        kept = check(document)
        self._afford(kept.work, KIND)
        schema = json.dumps(document.root)
        try:
            compiled = self.space.compiler.compile_json_schema(schema, strict_mode=True, **spaces)
        except RuntimeError as error:
            raise UnsupportedConstraint(
                _told(error), where=KIND, hint='grammar backend "auto" may keep it'
            ) from None
        origin = Origin(
            self.name, ignored=kept.ignored, narrowed=kept.narrowed, examples=partial(examples, document)
        )
        flexible = (constraint.whitespace or self._policy) == "flexible"
        return self._start(compiled, KIND, origin, barred=_CONTROLS_NOT_LINES if flexible else _CONTROLS)

    def _grammar(self, grammar: ebnf_tree.Grammar, where: str) -> Matcher:
        self._afford(ebnf_tree.counted(grammar), where)
        endless = ebnf_tree.endless_rule(grammar)
        if endless is not None:
            raise UnsupportedConstraint(
                f"the rule {endless!r} can stand for itself with nothing beside it, which xgrammar follows"
                " without end",
                where=where,
                hint="take the empty alternative, or the rule itself, out of it",
            )
        size = ebnf_tree.written_out(grammar)
        if size > self._limits.written_out:
            raise UnsupportedConstraint(
                f"its rules, written out, come to more than {self._limits.written_out} characters and names,"
                " which xgrammar would hold",
                where=where,
                hint="use repeats instead of rules that name each other twice",
            )
        try:
            compiled = self.space.compiler.compile_grammar(to_narrow_ebnf(grammar))
        except RuntimeError as error:
            raise BadConstraint(_told(error), where=where) from None
        return self._start(compiled, where)

    def _afford(self, states: int, where: str) -> None:
        work = states * len(self.vocabulary)
        if work > self._limits.work:
            raise UnsupportedConstraint(
                f"its counts come to {states} states, which xgrammar would prepare for each of"
                f" {len(self.vocabulary)} tokens; at most {self._limits.work} in all are taken",
                where=where,
                hint='use smaller counts, or grammar backend "auto"',
            )

    def _start(
        self, compiled: xgrammar.CompiledGrammar, where: str, origin: Origin | None = None, *,
        barred: re.Pattern[bytes] | None = None,
    ) -> Matcher:  # fmt: skip
        if compiled.memory_size_bytes > self._limits.memory_bytes:
            raise BadConstraint(
                f"takes {compiled.memory_size_bytes} bytes compiled; at most {self._limits.memory_bytes}",
                where=where,
                hint="simplify it",
            )
        shared = _Compiled(self.space, origin or Origin(self.name), compiled.memory_size_bytes, barred)
        matcher = XGrammarMatcher(shared, self.space.library.GrammarMatcher(compiled))
        if not self.space.bits.count(matcher.mask()) and not matcher.may_stop():
            raise BadConstraint("nothing that the vocabulary spells matches", where=where)
        return MissingByteMatcher(matcher, self.space.bits) if self.space.lacks_bytes else matcher


def _choice(spec: str) -> ebnf_tree.Node:
    try:
        options = msgspec.json.decode(spec.encode("utf-8", "surrogatepass"), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadConstraint(f"is not a JSON list of strings: {error}", where="choices") from None
    if not options:
        raise BadConstraint("there are no options", where="choices")
    return ebnf_tree.Alt(tuple(ebnf.literal(option) for option in options))


def _told(error: RuntimeError) -> str:
    """What the library says, without where in its own source it stood."""
    text = " ".join(str(error).split("The JSON string is")[0].split())
    return text.partition(".cc:")[2].partition(": ")[2][:400] or text[:400] or "cannot be compiled"
