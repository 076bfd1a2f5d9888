"""What all structs that travel have in common: ids, and the way back. Knows no field of any request."""

from __future__ import annotations

import os

import msgspec

MAX_NAME_BYTES = 512
"""Of an id, a session's name or a salt."""


def new_rid() -> str:
    return os.urandom(16).hex()


class BaseReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Anything about one request, or, before it is normalised, about several. `http_worker_ipc` routes the
    answer when there are several frontends."""

    rid: str | list[str] | None = None
    http_worker_ipc: str | None = None

    def regenerate_rid(self) -> str | list[str]:
        """Give the request fresh ids, as many as it has, and return them."""
        self.rid = [new_rid() for _ in self.rid] if isinstance(self.rid, list) else new_rid()
        return self.rid


class SingleReq(BaseReq, kw_only=True):
    """Anything about exactly one request, or one question to the scheduler: it always has an id."""

    rid: str = msgspec.field(default_factory=new_rid)


class BaseBatchReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Anything about several requests at once; parallel lists, one entry per rid. `http_worker_ipcs`: where
    each one's answer goes; None where the items say it themselves, or there is one frontend."""

    rids: list[str] = []
    http_worker_ipcs: list[str | None] | None = None

    def regenerate_rids(self) -> list[str]:
        """Give every item a fresh id and return them."""
        self.rids = [new_rid() for _ in self.rids]
        return self.rids


class SpeculativeDecodingMetricsMixin(BaseBatchReq, kw_only=True):
    """How well drafted tokens did; parallel lists, one entry per rid, empty where nothing was drafted.

    spec_verify_ct             verification steps
    spec_accepted_tokens       drafted tokens that were accepted
    spec_drafted_tokens        drafted tokens that were verified
    spec_acceptance_histogram  [i]: steps in which exactly i drafted tokens were accepted
    """

    spec_verify_ct: list[int] = []
    spec_accepted_tokens: list[int] = []
    spec_drafted_tokens: list[int] = []
    spec_acceptance_histogram: list[list[int]] = []

    @property
    def spec_num_correct_drafts(self) -> list[int]:
        """The newer name of spec_accepted_tokens."""
        return self.spec_accepted_tokens

    @property
    def spec_correct_drafts_histogram(self) -> list[list[int]]:
        """The newer name of spec_acceptance_histogram."""
        return self.spec_acceptance_histogram

    @property
    def spec_accept_length(self) -> list[float]:
        """Tokens gained by one verification step, the step's own included; 0 without steps."""
        pairs = zip(self.spec_accepted_tokens, self.spec_verify_ct, strict=True)
        return [(accepted + steps) / steps if steps else 0.0 for accepted, steps in pairs]

    @property
    def spec_accept_rate(self) -> list[float]:
        """Share of drafted tokens that were accepted; 0 without drafts."""
        pairs = zip(self.spec_accepted_tokens, self.spec_drafted_tokens, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]
