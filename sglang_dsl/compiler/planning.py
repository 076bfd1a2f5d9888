"""What a traced program will request: its plan, a dry run that counts calls, tokens and money; and its
constraints, which are sent to the backend before they are needed. Knows no executor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from runtime.protocol.constraint import Constraint
from sglang_dsl.backends.base import Backend
from sglang_dsl.budgets import Price
from sglang_dsl.compiler.trace import Program
from sglang_dsl.concurrency.loop import background
from sglang_dsl.conversation.requests import Prompt
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.interpreter.evaluator import with_node
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.ir import (
    Fork,
    Gen,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    Sampling,
    Select,
    Seq,
    Source,
    Text,
)
from sglang_dsl.views.notebook import Page

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 4
COUNTING_S = 60.0
COMPILING_S = 120.0
AT_ONCE = 1024
"""Constraints in one message."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call, or the warm-up of the text that branches share.

    prompt_tokens      of its prompt, with earlier generations at their maximum length
    cached_tokens      of these, those that an earlier call has computed already
    completion_tokens  at most, with all retries
    wave               its position in Program.waves(); None for a warm-up
    """

    kind: str
    name: str | None
    program: str
    branch: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wave: int | None
    src: Source | None = None

    def __str__(self) -> str:
        branch = ".".join(map(str, self.branch))
        in_branch = f"  branch {branch}" if branch else ""
        wave = "" if self.wave is None else f"  wave {self.wave}"
        shared = f" ({self.cached_tokens} shared)" if self.cached_tokens else ""
        generated = f", at most {self.completion_tokens} made" if self.completion_tokens else ""
        name = f" {self.name}" if self.name else ""
        return f"{self.kind}{name}: {self.prompt_tokens} tokens read{shared}{generated}{in_branch}{wave}"

    def __repr__(self) -> str:
        return f"PlannedCall({self})"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would request. `counted`: how tokens were counted. `cost`: in the unit of the price list,
    None without one. A run whose function decides by generated values may request something else."""

    program: Program
    steps: tuple[PlannedCall, ...]
    counted: str
    price: Price | None = None

    @property
    def calls(self) -> int:
        """Generations and choices, without warm-ups."""
        return sum(step.wave is not None for step in self.steps)

    @property
    def prompt_tokens(self) -> int:
        return sum(step.prompt_tokens for step in self.steps)

    @property
    def cached_tokens(self) -> int:
        return sum(step.cached_tokens for step in self.steps)

    @property
    def completion_tokens(self) -> int:
        """At most."""
        return sum(step.completion_tokens for step in self.steps)

    @property
    def waves(self) -> int:
        """The least number of consecutive calls, if independent ones are requested together."""
        return 1 + max((step.wave for step in self.steps if step.wave is not None), default=-1)

    @property
    def cost(self) -> float | None:
        """At most, by the price list."""
        if self.price is None:
            return None
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        return sum(self.price({name: getattr(step, name) for name in names}) for step in self.steps)

    def _head(self) -> str:
        cost = "" if self.cost is None else f", cost at most {self.cost:.6g}"
        return (
            f"{self.program.name}: {self.calls} calls in {self.waves} waves, {self.prompt_tokens} prompt "
            f"tokens ({self.cached_tokens} shared), at most {self.completion_tokens} made{cost}; "
            f"{self.counted}"
        )

    def tree(self) -> str:
        """The totals, and a line for each call."""
        lines = [self._head()]
        for step in self.steps:
            pad = "  " * (1 + len(step.branch) + (step.program != self.program.name))
            called = "" if step.program == self.program.name else f"{step.program}: "
            lines.append(f"{pad}{called}{step}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.tree()

    def __repr__(self) -> str:
        return f"Plan({self._head()})"

    def _page(self) -> Page:
        from sglang_dsl.views import listing  # for notebooks alone

        return Page(listing.plan(self._head(), self.steps), listing.plan_graph(self.program.name, self.steps))

    def _repr_html_(self) -> str:
        return self._page().html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._page().bundle()


def planned(program: Program, defaults: Sampling, backend: Backend | None, price: Price | None) -> Plan:
    """The plan of a traced program. Raises BadProgram for invalid parameters, and errors of a backend that
    counts tokens."""
    counting = _Counting(backend)
    order = {id(step.node): at for at, wave in enumerate(program.waves()) for step in wave}
    steps: list[PlannedCall] = []
    for one in _all(program):
        walk = _Walk(one.name, defaults, counting, order)
        steps += walk.sequence(one.body, (), _Progress(Transcript.EMPTY, 0, 0))
    return Plan(program, tuple(steps), counting.how, price)


def _all(program: Program) -> Iterator[Program]:
    for one in program.called:
        yield from _all(one)
    yield program


class _Counting:
    """Tokens of prompts and texts."""

    def __init__(self, backend: Backend | None) -> None:
        self._backend = backend
        self.how = f"tokens estimated as characters / {CHARACTERS_PER_TOKEN}"

    def prompt(self, prompt: Prompt) -> int:
        if self._backend is not None:
            count = background().run(self._backend.count_tokens(prompt), COUNTING_S)
            if count is not None:
                self.how = f"tokens counted by {self._backend.name}'s tokenizer"
                return count
            self._backend = None
        texts = [
            one.content if isinstance(one.content, str) else json.dumps(one.content)
            for one in prompt.messages
        ]
        return self.text("".join(texts))

    @staticmethod
    def text(text: str) -> int:
        return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


@dataclass(slots=True)
class _Progress:
    """The progress of a branch: its text without generations, the maximum number of generated tokens, and the
    number of tokens from the begin that an earlier call has computed."""

    transcript: Transcript
    generated: int
    cached: int


class _Walk:
    """The calls of one program."""

    def __init__(self, program: str, defaults: Sampling, counting: _Counting, order: dict[int, int]) -> None:
        self._program, self._defaults, self._counting, self._order = program, defaults, counting, order

    def sequence(self, body: Seq, branch: tuple[int, ...], at: _Progress) -> list[PlannedCall]:
        steps: list[PlannedCall] = []
        forked = 0
        for node in body.nodes:
            match node:
                case Gen():
                    call = lower(node, self._defaults)
                    most = call.sampling.max_new_tokens
                    tries = 1 + (node.retries or 0)
                    steps.append(self._step("gen", node, branch, at, 0, most * call.n * tries))
                    at.cached += most
                    at.generated += most
                case Select(choices=choices):
                    longest = max(map(self._counting.text, choices))
                    read = sum(map(self._counting.text, choices))
                    steps.append(self._step("select", node, branch, at, read, 0))
                    at.cached += longest
                    at.generated += longest
                case Fork(branches=branches):
                    if len(branches) > 1 and at.transcript.kind != "root":
                        steps.append(self._step("warm-up", node, branch, at, 0, 0))
                    for number, one in enumerate(branches, forked):
                        progress = _Progress(at.transcript, at.generated, at.cached)
                        steps += self.sequence(one, (*branch, number), progress)
                    forked += len(branches)
                case Text() | Media() | RoleBegin() | RoleEnd():
                    at.transcript = with_node(at.transcript, node)
                case _:
                    pass
        return steps

    def _step(
        self,
        kind: str,
        node: Gen | Select | Fork,
        branch: tuple[int, ...],
        at: _Progress,
        more: int,
        most: int,
    ) -> PlannedCall:
        tokens = self._counting.prompt(at.transcript.prompt()) + at.generated
        cached, at.cached = min(at.cached, tokens), tokens
        name = None if isinstance(node, Fork) else node.name
        wave = self._order.get(id(node))
        return PlannedCall(kind, name, self._program, branch, tokens + more, cached, most, wave, node.src)


# -- constraints ---------------------------------------------------------------------------------------------


def constraints_of(nodes: Iterable[Node], defaults: Sampling) -> tuple[Constraint, ...]:
    """The constraints of the generations among `nodes`, each once, in order."""
    constraints: dict[Constraint, None] = {}
    for node in nodes:
        if isinstance(node, Gen):
            try:
                constraint = lower(node, defaults).constraint
            except BadProgram:
                continue  # raised where it runs
            if constraint is not None:
                constraints[constraint] = None
    return tuple(constraints)


def precompile(backend: Backend, constraints: tuple[Constraint, ...]) -> None:
    """Compile the constraints in the background. Nothing waits for it, and nothing fails by it: an error of a
    constraint is raised where it is used."""
    if constraints:
        background().start(lambda: _precompile(backend, constraints))


async def _precompile(backend: Backend, constraints: tuple[Constraint, ...]) -> None:
    try:
        async with asyncio.timeout(COMPILING_S):
            for first in range(0, len(constraints), AT_ONCE):
                await backend.precompile(constraints[first : first + AT_ONCE])
    except (ProgramError, TimeoutError) as error:
        log.debug("%s did not compile ahead: %s", backend.name, error)
