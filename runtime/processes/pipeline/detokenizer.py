"""DetokenizerManager: deltas in ids -> deltas in text, for many requests at once. Knows no scheduler and no
sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from runtime.grammar.search import Search
from runtime.processes.checkpoint.detokenize import IncrementalText, TextTable
from runtime.protocol.errors import BadConstraint, InternalFault, RuntimeFault
from runtime.protocol.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    StrOutput,
    TextRequest,
    TokenOutput,
)

MAX_STATES = 65_536
PATTERNS = 256
"""How many sets of stop patterns are kept ready."""


class _State:
    """One request: its text so far, and what was not sent of it yet."""

    __slots__ = ("request", "text", "untold")

    def __init__(self, table: TextTable, request: TextRequest, search: Search | None) -> None:
        self.request = request
        self.untold: StrOutput | None = None
        self.text = IncrementalText(
            table,
            stop=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            no_stop_trim=request.no_stop_trim,
            at_start=request.at_start,
            search=search,
        )

    def feed(self, delta: TokenOutput) -> StrOutput | None:
        """What there is to send now; a request that does not stream gets all at its end. Raises
        InternalFault."""
        text = self.text.feed(
            delta.new_ids,
            delta.replaced,
            skip=delta.healed,
            finished=delta.finish is not None,
            matched=None if delta.finish is None else delta.finish.matched,
        )
        delta.http_worker_ipc = self.request.http_worker_ipc
        output = StrOutput(delta.rid, text, delta)
        if self.untold is not None:
            output = join(self.untold, output)
        if delta.finish is None and not self.request.stream:
            self.untold = output
            return None
        self.untold = None
        return output

    def failed(self, fault: RuntimeFault) -> StrOutput:
        return failed_output(self.request.rid, fault, self.request.http_worker_ipc)


class DetokenizerManager:
    """Keeps at most `max_states` requests; when one more begins, the oldest ends with an error saying so."""

    def __init__(self, table: TextTable, max_states: int = MAX_STATES) -> None:
        self._table, self._max_states = table, max_states
        self._states: dict[str, _State] = {}
        self._searches = lru_cache(maxsize=PATTERNS)(_search)

    def __len__(self) -> int:
        return len(self._states)

    def handle(self, batches: Sequence[BatchTokenIDOutput]) -> BatchStrOutput | None:
        """The text of all these deltas: one StrOutput per request that has something new; None when there
        is none. Deltas of requests that never began, or ended, are dropped."""
        ready: dict[str, StrOutput] = {}
        for batch in batches:
            for request in batch.begun:
                self._begin(request, ready)
            for delta in batch.outputs:
                output = self._feed(delta)
                if output is not None:
                    _put(ready, output)
        if not ready:
            return None
        return BatchStrOutput(rids=list(ready), outputs=list(ready.values())).with_spec()

    def _begin(self, request: TextRequest, ready: dict[str, StrOutput]) -> None:
        if len(self._states) >= self._max_states:
            oldest = next(iter(self._states))
            fault = InternalFault(
                f"the detokeniser keeps at most {self._max_states} requests and dropped this one, the oldest",
                hint="lower max_waiting_requests",
            )
            _put(ready, self._states.pop(oldest).failed(fault))
        search = self._searches(request.stop_regex) if request.stop_regex else None
        self._states[request.rid] = _State(self._table, request, search)

    def _feed(self, delta: TokenOutput) -> StrOutput | None:
        state = self._states.get(delta.rid)
        if state is None:
            return None
        try:
            output = state.feed(delta)
        except InternalFault as fault:
            output = state.failed(fault)
        if output is not None and output.finish is not None:
            del self._states[delta.rid]
        return output


def _put(ready: dict[str, StrOutput], output: StrOutput) -> None:
    sooner = ready.get(output.rid)
    ready[output.rid] = output if sooner is None else join(sooner, output)


def failed_output(rid: str, fault: RuntimeFault, http_worker_ipc: str | None = None) -> StrOutput:
    """The delta that says that a request failed."""
    reason = FinishReason(type="abort", error=fault.to_dict())
    return StrOutput(rid, "", TokenOutput(rid, [], finish=reason, http_worker_ipc=http_worker_ipc))


def join(sooner: StrOutput, later: StrOutput) -> StrOutput:
    """Two outputs of one request as one, by the rules of JOIN: an OutputAccumulator comes to the same as with
    the two."""
    if sooner.delta.finish is not None:  # an end is never followed
        return sooner
    first, then = sooner.delta, later.delta
    delta = TokenOutput(**{name: rule(first, then, name) for name, rule in JOIN.items()})
    return StrOutput(later.rid, sooner.text + later.text, delta)


def _later(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return getattr(then, name)


def _given(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    """The later one's, where it has any."""
    value = getattr(then, name)
    return getattr(first, name) if value is None else value


def _kept_and_new(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    """Entries per id: the first's without those of ids that are replaced, and the later's."""
    kept = max(0, len(first.new_ids) - then.replaced)
    return getattr(first, name)[:kept] + getattr(then, name)


def _replaced(first: TokenOutput, then: TokenOutput, name: str) -> int:
    return first.replaced + max(0, then.replaced - len(first.new_ids))


def _all(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return [*(getattr(first, name) or ()), *(getattr(then, name) or ())] or None


def _of_first_id(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return getattr(first if first.new_ids else then, name)


JOIN: dict[str, Callable[[TokenOutput, TokenOutput, str], Any]] = {
    **dict.fromkeys(("rid", "finish"), _later),
    # Counts and times, which every output carries from the request's beginning on.
    **dict.fromkeys(
        (
            "prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens", "decode_steps",
            "retractions", "queue_s", "first_token_s",
        ),
        _later,
    ),
    # Told once, or again when there is more to say.
    **dict.fromkeys(
        (
            "input_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "grammar", "http_worker_ipc",
            "spec",
        ),
        _given,
    ),
    **dict.fromkeys(
        (
            "new_ids", "output_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
            "output_origins",
        ),
        _kept_and_new,
    ),
    "replaced": _replaced,
    "hidden_states": _all,
    "healed": _of_first_id,
}  # fmt: skip
"""How each field of two outputs becomes one: (first, then, its name) -> value."""


def _search(patterns: tuple[str, ...]) -> Search | None:
    try:
        return Search(patterns)
    except BadConstraint:
        return None  # the scheduler refuses the request with this reason
