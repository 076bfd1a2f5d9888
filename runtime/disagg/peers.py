"""Peers: this engine's end of a pair: its transfers, its pool's bytes, and the allowed
hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.cache.manager import Lease
from runtime.cache.radix import RadixCache
from runtime.disagg.transfer.bootstrap import BootstrapServer
from runtime.disagg.transfer.kv_manager import (
    FAKE_BOOTSTRAP_HOST,
    KVManager,
    KVReceiver,
    KVSender,
    TransferEnd,
)
from runtime.disagg.transfer.memory import KVMemory, cut
from runtime.plan import Run
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import Bootstrap, FinishReason


@dataclass(slots=True)
class Figures:
    """Totals since the start: requests, prompt tokens, seconds (from arrival to the end of the transfer)."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    offloaded: int = 0
    restored: int = 0

    def moved(self, tokens: int, seconds: float) -> None:
        self.requests += 1
        self.tokens += tokens
        self.seconds += seconds

    def state(self) -> dict[str, Any]:
        return {
            "num_transferred_requests_total": self.requests,
            "num_transfer_failed_requests_total": self.failed,
            "transferred_tokens_total": self.tokens,
            "transfer_seconds_total": self.seconds,
            "num_offloaded_requests_total": self.offloaded,
            "num_restored_requests_total": self.restored,
        }


class Hosts:
    """Which hosts a request may name: this machine's addresses, and those `allowed` ("*": all). Otherwise a
    request could make this engine connect anywhere."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._all = "*" in allowed
        self._known = {"localhost", socket.gethostname().lower(), *map(bare, allowed)}

    def check(self, host: str) -> None:
        """Raise BadRequest for a host that may not be named. Looks up no name."""
        name = bare(host)
        if not self._all and name not in self._known and not is_local(name):
            raise BadRequest(
                f"{host!r} is neither this machine nor an allowed host",
                where="bootstrap_host",
                hint="--disaggregation-allowed-hosts names others",
            )


def bare(host: str) -> str:
    return host.strip().removeprefix("[").removesuffix("]").lower()


def is_local(host: str) -> bool:
    """Whether it is an address of this machine, as text."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


@dataclass(slots=True, eq=False)
class Peers:
    """transfers: the real ones; fake: for requests without another side. most: requests whose KV
    moves at once. memory: the pool. server: this engine's bootstrap server; None on the decode side."""

    transfers: KVManager
    fake: KVManager
    most: int
    memory: KVMemory
    hosts: Hosts
    server: BootstrapServer | None = None
    figures: Figures = field(default_factory=Figures)

    def manager(self, bootstrap: Bootstrap) -> KVManager:
        return self.fake if bare(bootstrap.host) == FAKE_BOOTSTRAP_HOST else self.transfers

    def sender(self, bootstrap: Bootstrap) -> KVSender:
        """Raises BadRequest: the id is in use."""
        return self.manager(bootstrap).sender(bootstrap.room)

    def receiver(self, bootstrap: Bootstrap) -> KVReceiver:
        """Raises BadRequest: the id is in use, or the host is not allowed."""
        manager = self.manager(bootstrap)
        if manager is self.transfers:
            self.hosts.check(bootstrap.host)
        host = bare(bootstrap.host)
        at = f"[{host}]:{bootstrap.port}" if ":" in host else f"{host}:{bootstrap.port}"
        return manager.receiver(at, bootstrap.room)

    def close(self) -> None:
        self.transfers.close()
        if self.server is not None:
            self.server.close()

    def state(self, transfers: int) -> Mapping[str, Any]:
        """`transfers`: those under way."""
        return {
            "bootstrap": None if self.server is None else self.server.address,
            "num_free_metadata_rows": self.most - transfers,
            **self.figures.state(),
            "kv_transfer": self.transfers.state(),
        }


def runs_of(lease: Lease, cache: RadixCache, start: int, end: int) -> list[Run]:
    """The slots of the tokens start .. end-1 of a sequence, all of which have KV."""
    runs = [run for node in lease.path(cache) for run in node.runs]
    return cut([*runs, *lease.written()], start, end - start)


def failure_of(end: TransferEnd) -> RuntimeFault:
    return end.failure() or InternalFault(f"the transfer of room {end.bootstrap_id} failed for no reason")


def ended_by(side: str, reason: FinishReason) -> str:
    """The message to the other side about a request that ended here."""
    if reason.error is None:
        return f"ended by the {side} engine"
    return f"ended by the {side} engine: {reason.error.get('message')}"
