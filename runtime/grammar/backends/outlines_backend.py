"""OutlinesGrammarBackend: regular constraints by automata over the vocabulary (Willard & Louf,
arXiv:2307.09702), with masks computed as states are visited.
"""

from __future__ import annotations

from functools import partial

from runtime.grammar.automata import charset
from runtime.grammar.automata.automaton import Limits
from runtime.grammar.automata.dfa import DEAD, DEFAULT_LIMITS, compile_choices, compile_node, parse_regex
from runtime.grammar.automata.regex_syntax import Node
from runtime.grammar.base import GrammarBackend, Matcher, Origin, read_choices
from runtime.grammar.completion import Steps
from runtime.grammar.json_schema.document import KIND, format_policy, layout, read_document
from runtime.grammar.json_schema.examples import examples
from runtime.grammar.json_schema.schema_regex import schema_regex
from runtime.grammar.masks.mask_store import MaskStore
from runtime.grammar.masks.token_automaton import TokenAutomaton, TokenSpace
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary

_STOPPED = -2  # an eos was taken


class DfaMatcher(Matcher):
    """A state of an automaton, and the states before it as linked pairs, so that a copy costs nothing. After
    an eos only an eos may follow, which changes nothing."""

    def __init__(self, automaton: TokenAutomaton, state: int = 0) -> None:
        self._automaton = automaton
        self._dfa = automaton.dfa
        self.vocabulary = self._automaton.space.vocabulary
        self._state = state
        self._before: tuple[int, object] | None = None  # (state, the pair before it)

    def _move(self, state: int) -> bool:
        self._before = (self._state, self._before)
        self._state = state
        return True

    def advance(self, token: int) -> bool:
        space = self._automaton.space
        if token in space.vocabulary.eos:
            return self._move(_STOPPED) if self.may_stop() else False
        if self._state == _STOPPED or not 0 <= token < space.bits.width:
            return False
        data = space.bits.texts[token]
        return bool(data) and self._follow(data)

    def advance_bytes(self, data: bytes) -> bool:
        if self._state == _STOPPED:
            return self._move(_STOPPED) if not data else False
        return self._follow(data)

    def _follow(self, data: bytes) -> bool:
        state = self._dfa.walk(self._state, data)
        if state == DEAD or not self._automaton.leads_on(state):
            return False
        return self._move(state)

    def mask(self) -> TokenMask:
        if self._state == _STOPPED:
            return self._automaton.space.bits.stop_only
        return self._automaton.mask(self._state)

    def forced_bytes(self) -> bytes:
        return b"" if self._state == _STOPPED else self._dfa.forced(self._state)[0]

    def footprint(self) -> int:
        return self._dfa.nbytes + 1000

    def closing_steps(self, limit: int) -> Steps[tuple[int, ...] | None]:
        if self.may_stop():
            return ()
        ids = self._automaton.shortest_end(self._state, limit)
        return (yield from super().closing_steps(limit)) if ids is None else ids

    def may_stop(self) -> bool:
        return self._state == _STOPPED or self._dfa.accepts(self._state)

    def is_terminated(self) -> bool:
        return self._state == _STOPPED or self._dfa.is_final(self._state)

    def rollback(self, steps: int) -> None:
        state, before = self._state, self._before
        for taken in range(steps):
            if before is None:
                raise ValueError(f"cannot undo {steps} steps: only {taken} were taken")
            state, before = before  # type: ignore[assignment]
        self._state, self._before = state, before

    def copy(self) -> DfaMatcher:
        twin = DfaMatcher(self._automaton, self._state)
        twin._before, twin.origin = self._before, self.origin
        return twin


class OutlinesGrammarBackend(GrammarBackend):
    """Kinds: regex (exactly what re.fullmatch accepts, as UTF-8), choices, and json_schema if a regular
    expression keeps it.

    A schema becomes a regular expression by outlines-core, an extra; what it cannot express is refused by
    keyword and path, what it does not offer is listed in origin.narrowed. whitespace: "compact", "single",
    "flexible". schema_format: what `format` does in a schema: "assertion", or "annotation".
    grammar_cache_dir: a folder for tables of the vocabulary that are expensive to compute; "": none.
    """

    name = "outlines"
    OPTIONS = frozenset({"limits", "whitespace", "schema_format", "grammar_cache_dir"})

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits = DEFAULT_LIMITS, *, whitespace: str = "flexible",
        schema_format: str = "assertion", grammar_cache_dir: str = "",
    ) -> None:  # fmt: skip
        super().__init__(vocabulary)
        layout(whitespace)  # refuses what is no policy
        self._limits, self._whitespace = limits, whitespace
        self._formats = format_policy(schema_format)
        store = MaskStore(grammar_cache_dir, vocabulary) if grammar_cache_dir else None
        self._space = TokenSpace(vocabulary, store=store)
        charset.prepare()
        for pattern in (".", r"\w", r"[\w\s]"):
            compile_node(parse_regex(pattern))  # tables of UTF-8 that most patterns share are made with these

    def compile(self, constraint: Constraint) -> Matcher:
        match constraint.kind:
            case "regex":
                return self._start(parse_regex(constraint.spec))
            case "choices":
                dfa = compile_choices(read_choices(constraint.spec), self._limits)
                return DfaMatcher(TokenAutomaton(dfa, self._space))
            case "json_schema":
                return self._schema(constraint)
            case kind:
                text = f"the grammar backend {self.name!r} does not take this kind of constraint"
                raise UnsupportedConstraint(text, where=kind, hint="it takes regex, choices, json_schema")

    def _start(self, node: Node) -> DfaMatcher:
        """A matcher at the start of a language."""
        return DfaMatcher(TokenAutomaton(compile_node(node, self._limits), self._space))

    def _schema(self, constraint: Constraint) -> Matcher:
        document = read_document(constraint, self._formats)
        try:
            pattern, narrowed = schema_regex(document, constraint.whitespace or self._whitespace)
            matcher = self._start(parse_regex(pattern))
        except BadConstraint as error:
            if error.where != "regex":
                raise
            raise type(error)(error.message, where=KIND, hint=error.hint) from None
        matcher.origin = Origin(
            self.name,
            ignored=tuple(document.ignored),
            narrowed=narrowed,
            examples=partial(examples, document),
        )
        return matcher
