"""Sessions: conversations whose earlier turns need not be sent again. Each keeps a tree of its turns by name.

A turn names the turn it follows and how much of it; here that becomes a whole prompt, most of which is in the
prefix cache. A streaming session also keeps its last turn locked in the cache until its slots are needed. It
knows no running requests: the scheduler reports the outcome of each turn.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.cache.manager import CacheManager, Lease
from runtime.protocol.errors import BadRequest, PromptTooLong, QueueFull
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.request_base import MAX_NAME_BYTES
from runtime.scheduler.requests.request import Request

MAX_TURNS = 4096  # of one session
SET_BY_FRONTEND = ("turn", "clip", "owner")


class SessionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """session_params of a request.

    id        the session
    rid       the turn to follow: its prompt, its output, then this request's tokens. None: nothing (in a
              streaming session: the last turn)
    offset    how much of that to keep, like a slice: negative counts from the end; None and 0: all
    replace   drop what followed that turn until now (without rid: every turn); what of it still runs is
              cancelled, the turn itself too if it runs
    drop_previous_output   leave out that turn's output
    turn      the name of this turn for later ones; None: the request's id. Set by frontends, not by users
    clip      lower max_new_tokens to what fits, rather than refuse the turn; likewise
    owner     the client whose session it is; likewise
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False
    turn: str | None = None
    clip: bool = False
    owner: str = ""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> SessionParams:
        try:
            fields = {
                name: value
                for name, value in params.items()
                if name in cls.__struct_fields__ or (value is not None and value is not False)
            }
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(name for name in cls.__struct_fields__ if name not in SET_BY_FRONTEND)
            raise BadRequest(str(error), where="session_params", hint=f"fields: {known}") from error


@dataclass(slots=True, eq=False)
class _Turn:
    """prompt = the first `kept` tokens of the parent's whole, then `part`; whole = prompt, then `output`.
    `name`: for users; `rid`: the request's id here, which the frontend may have changed."""

    name: str
    rid: str
    parent: _Turn | None
    kept: int
    part: array[int]
    output: array[int] = field(default_factory=lambda: array("q"))
    done: bool = False
    children: list[_Turn] = field(default_factory=list)

    def whole(self) -> array[int]:
        line: list[_Turn] = []
        turn: _Turn | None = self
        while turn is not None:
            line.append(turn)
            turn = turn.parent
        tokens = array("q")
        for one in reversed(line):
            del tokens[one.kept :]
            tokens.extend(one.part)
            tokens.extend(one.output)
        return tokens

    def below(self) -> list[_Turn]:
        """All turns that follow it, directly or not."""
        turns = list(self.children)
        for turn in turns:
            turns.extend(turn.children)
        return turns


@dataclass(slots=True, eq=False)
class _Session:
    """live: how many turns run or wait. lease: what a streaming session keeps between its turns."""

    id: str
    owner: str
    capacity: int
    timeout_s: float | None
    streaming: bool
    used_at: float
    turns: dict[str, _Turn] = field(default_factory=dict)
    last: _Turn | None = None
    live: int = 0
    lease: Lease | None = None


def _size(turn: _Turn) -> int:
    return len(turn.part) + len(turn.output)


class Sessions:
    """`limit`: open sessions at most; `most_tokens`: of all their turns together. by_key: by owner and id."""

    def __init__(self, manager: CacheManager, limit: int, most_tokens: int = 16 << 20) -> None:
        self._manager, self._limit, self._most_tokens = manager, limit, most_tokens
        self.tokens = 0
        self.by_key: dict[tuple[str, str], _Session] = {}
        self._of: dict[str, tuple[_Session, _Turn]] = {}  # live turns by rid

    def __len__(self) -> int:
        return len(self.by_key)

    def open(
        self,
        session_id: str | None,
        capacity: int,
        timeout_s: float | None,
        streaming: bool,
        now: float,
        owner: str = "",
    ) -> str:
        """The new session's id. Raises BadRequest: id in use, too many open, number out of range."""
        name = uuid.uuid4().hex if session_id is None else session_id
        if (owner, name) in self.by_key:
            raise BadRequest(
                f"the session {name!r} is open already", where="session_id", hint="close it first"
            )
        if not name:
            raise BadRequest("must not be empty", where="session_id")
        if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            raise BadRequest(f"has more than {MAX_NAME_BYTES} bytes", where="session_id")
        if capacity < 0:
            raise BadRequest(f"must be at least 0 (no limit), got {capacity}", where="capacity")
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise BadRequest(f"must be a positive number, got {timeout_s}", where="timeout_s")
        if len(self.by_key) >= self._limit:
            raise BadRequest(
                f"{self._limit} sessions are open, the most there may be", where="session_id",
                hint="close one, or give sessions a timeout",
            )  # fmt: skip
        self.by_key[owner, name] = _Session(name, owner, capacity, timeout_s, streaming, now)
        return name

    def close(self, session_id: str, owner: str = "") -> list[str]:
        """Free its slots; returns the rids of its turns that still run. Raises BadRequest."""
        session = self._get(session_id, owner, "session_id")
        del self.by_key[owner, session_id]
        self._let_go(session)
        self.tokens -= sum(map(_size, session.turns.values()))
        rids = [rid for rid, (owner, _) in self._of.items() if owner is session]
        for rid in rids:
            del self._of[rid]
        return rids

    def expire(self, now: float) -> None:
        """Close the sessions that were not used for their timeout."""
        for one in list(self.by_key.values()):
            if one.timeout_s is not None and not one.live and now - one.used_at >= one.timeout_s:
                self.close(one.id, one.owner)

    def compose(
        self, req: TokenizedGenerateReqInput, live: Mapping[str, Request], now: float, limit: int
    ) -> tuple[TokenizedGenerateReqInput, list[str]]:
        """The request with its whole prompt, and the rids of turns to cancel for it. Changes nothing yet.
        `limit`: the most tokens of any request. Raises BadRequest."""
        params = SessionParams.of(req.session_params or {})
        session = self._get(params.id, params.owner, "session_params.id")
        session.used_at = now
        parent = self._parent(session, params)
        name = params.turn or req.rid
        if name in session.turns:
            raise BadRequest(f"the session has a turn {name!r} already", where="rid", hint="use a new id")
        if len(session.turns) >= MAX_TURNS:
            raise BadRequest(
                f"the session has {MAX_TURNS} turns, the most there may be", where="session_params.id",
                hint="open a new one, or replace turns",
            )  # fmt: skip
        if self.tokens + len(req.input_ids) > self._most_tokens:
            raise QueueFull(
                f"the sessions' turns have {self.tokens} tokens, of {self._most_tokens} that are kept",
                where="session_params.id", hint="close sessions that are not needed; max_session_tokens",
            )  # fmt: skip
        dropped: list[str] = []
        if params.replace:
            replaced = [*parent.below(), parent] if parent else list(session.turns.values())
            dropped = [turn.rid for turn in replaced if not turn.done]
        if parent is None:
            return self._fitting(session, req, limit if params.clip else None), dropped
        base = parent.whole()
        output = array("q", parent.output)
        if not parent.done and (request := live.get(parent.rid)) is not None:
            output = request.tokens[request.prompt_len :]
            base.extend(output)
        if params.drop_previous_output:
            del base[len(base) - len(output) :]
        if params.offset:
            if abs(params.offset) > len(base):
                raise BadRequest(
                    f"is {params.offset}, the turn has {len(base)} tokens", where="session_params.offset"
                )
            del base[params.offset :]
        base.extend(req.input_ids)
        whole = msgspec.structs.replace(req, input_ids=base.tolist())
        return self._fitting(session, whole, limit if params.clip else None), dropped

    def _fitting(
        self, session: _Session, req: TokenizedGenerateReqInput, limit: int | None
    ) -> TokenizedGenerateReqInput:
        """`limit`: max_new_tokens may be lowered to fit this; None: it stays."""
        tokens, new = len(req.input_ids), req.sampling_params.max_new_tokens
        if limit is not None:
            most = min(limit, session.capacity or limit) - tokens
            if 0 < most < new:
                least = min(req.sampling_params.min_new_tokens, most)
                params = msgspec.structs.replace(
                    req.sampling_params, max_new_tokens=most, min_new_tokens=least
                )
                req, new = msgspec.structs.replace(req, sampling_params=params), most
        if session.capacity and tokens + new > session.capacity:
            raise PromptTooLong(
                f"{tokens} tokens with all turns + max_new_tokens {new} are more than the session's capacity "
                f"of {session.capacity}",
                where="session_params",
                hint="open a larger session",
            )
        return req

    def begin(self, composed: TokenizedGenerateReqInput, new: int) -> None:
        """The composed request, whose last `new` tokens are its own, was accepted: it is a turn now."""
        params = SessionParams.of(composed.session_params or {})
        session = self.by_key[params.owner, params.id]
        parent = self._parent(session, params)
        if params.replace:
            for turn in parent.below() if parent else list(session.turns.values()):
                if session.turns.pop(turn.name, None) is not None:
                    self.tokens -= _size(turn)
                self._of.pop(turn.rid, None)
                session.live -= not turn.done
            if parent is not None:
                parent.children.clear()
        kept = len(composed.input_ids) - new
        name = params.turn or composed.rid
        turn = _Turn(name, composed.rid, parent, kept, array("q", composed.input_ids[kept:]))
        if parent is not None:
            parent.children.append(turn)
        session.turns[turn.name] = session.last = turn
        self.tokens += _size(turn)
        session.live += 1
        self._of[turn.rid] = session, turn

    def end(self, request: Request, now: float) -> None:
        """The request has finished, and its KV is in the cache; nothing happens if it was no turn."""
        live = self._of.pop(request.rid, None)
        if live is None:
            return
        session, turn = live
        if not turn.done:
            turn.output, turn.done = request.tokens[request.prompt_len :], True
            if session.turns.get(turn.name) is turn:
                self.tokens += len(turn.output)
        session.live -= 1
        session.used_at = now
        if session.streaming:
            self._let_go(session)
            session.lease = self._manager.open(request.tokens, request.source.extra_key)

    def leases(self) -> list[Lease]:
        """Leases that are kept between turns."""
        return [one.lease for one in self.by_key.values() if one.lease is not None]

    def give_up(self) -> bool:
        """Free the slots of the least recently used session that keeps some. False when none does."""
        keeping = [one for one in self.by_key.values() if one.lease is not None]
        if keeping:
            self._let_go(min(keeping, key=lambda one: one.used_at))
        return bool(keeping)

    def let_go(self) -> None:
        """Free the slots of all sessions."""
        while self.give_up():
            pass

    def void(self) -> None:
        """The cache is void, and with it the sessions' leases."""
        for session in self.by_key.values():
            session.lease = None

    def _get(self, session_id: str, owner: str, field: str) -> _Session:
        session = self.by_key.get((owner, session_id))
        if session is None:
            raise BadRequest(
                f"there is no session {session_id[:80]!r}", where=field, hint="open it; it may have timed out"
            )
        return session

    def _parent(self, session: _Session, params: SessionParams) -> _Turn | None:
        if session.streaming:
            return self._last(session, params)
        if params.rid is None:
            return None
        parent = session.turns.get(params.rid)
        if parent is None:
            raise BadRequest(
                f"the session {session.id!r} has no turn {params.rid!r}", where="session_params.rid"
            )
        if not parent.done and not params.replace:
            raise BadRequest(
                f"the turn {params.rid!r} is not finished", where="session_params.rid",
                hint="wait for it, or replace it",
            )  # fmt: skip
        return parent

    def _last(self, session: _Session, params: SessionParams) -> _Turn | None:
        """A streaming session only ever goes on from its last turn."""
        last = session.last
        if params.replace or params.offset or params.drop_previous_output:
            raise BadRequest("a streaming session only appends", where="session_params")
        if params.rid is not None and (last is None or params.rid != last.name):
            raise BadRequest("is not the session's last turn", where="session_params.rid")
        if session.live:
            raise BadRequest(
                "the session's last turn is not finished", where="session_params", hint="wait for it"
            )
        return last

    def _let_go(self, session: _Session) -> None:
        if session.lease is not None:
            self._manager.close(session.lease, (), 0)
            session.lease = None
