"""The nixl transfer: the decode side reads the prefill side's memory through NIXL (UCX: RDMA if there is one,
else TCP and shared memory). Messages go over TCP, as with tcp.

KV is read into a buffer and copied to the pool from there: a read that is under way when its transfer ends
must not write into slots that belong to another sequence by then. UCX opens ports without a key, on the
loopback interface or those in UCX_NET_DEVICES: use a separate network. Pools on a device are refused; a
prefill side whose model is shared by several ranks sends as tcp does.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from runtime.disagg.transfer.kv_manager import TransferOptions
from runtime.disagg.transfer.memory import (
    Array,
    ArrayMemory,
    JoinedMemory,
    KVMapping,
    KVMemory,
    spots,
    tokens_of,
)
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.manager import PullingManager
from runtime.disagg.transfer.net.messages import Hello, Welcome
from runtime.disagg.transfer.net.receiving import Receiver
from runtime.disagg.transfer.tcp import connect, listen
from runtime.ipc.address import is_loopback
from runtime.plan import Run
from runtime.protocol.errors import BadRequest, EngineDead, TransferError, TransferPeerLost

LOOK_S = (0.0, 0.001)
"""Between two looks at a read that is under way: at first, and at most."""
PROGRESS_US = 10_000
"""NIXL's own thread wakes when something arrives, and after this long in any case."""
_starting = threading.Lock()
"""One agent is made at a time: that needs settings of the whole process."""


class _Peer(msgspec.Struct, frozen=True):
    """For the decode side. agent: NIXL's metadata; address: of the pool, in that process."""

    agent: bytes
    address: int


class NixlManager(PullingManager):
    name: ClassVar[str] = "nixl"

    def __init__(self, memory: KVMemory, options: TransferOptions | None = None) -> None:
        """Raises MissingExtra, by the table, without the package; BadRequest for a pool on a device;
        TransferError if NIXL cannot start."""
        super().__init__(memory, options)
        if not isinstance(memory, ArrayMemory | JoinedMemory):
            raise BadRequest(
                "the nixl transfer reads pools in the host's memory only", where="KV pool", hint="use tcp"
            )
        self._started: Any = _make_agent(is_loopback(self.options.host))
        self._address, self._mapping = 0, None
        if isinstance(memory, ArrayMemory):
            self._address, self._mapping = memory.address
            self._pool = self._register(self._address, self._mapping.size)
        self._remote: dict[str, tuple[str, int, KVMapping]] = {}
        self._buffer: tuple[Array, Any] | None = None
        self._abandoned: list[Any] = []

    @property
    def _agent(self) -> Any:
        agent = self._started
        if agent is None:
            raise EngineDead("this engine is ending", where="transfer")
        return agent

    def close(self) -> None:
        """Also ends NIXL's thread and closes its ports."""
        super().close()
        self._started = None  # buffers stay: a read that was given up may still be under way

    def open(self) -> tuple[socket.socket, str]:
        return listen(self.options)

    def dial(self, address: str) -> socket.socket:
        return connect(address)

    def mapping(self) -> KVMapping | None:
        return self._mapping

    def extra(self) -> bytes:
        return msgspec.msgpack.encode(_Peer(self._agent.get_agent_metadata(), self._address))

    def met(self, link: Link, end: socket.socket, answer: Hello | Welcome) -> None:
        match answer:
            case Welcome(mapping=KVMapping() as mapping, layout=layout, extra=extra):
                agent = self._agent
                try:
                    peer = msgspec.msgpack.decode(extra, type=_Peer)
                    name = agent.add_remote_agent(peer.agent)
                except Exception as error:
                    raise TransferError(
                        f"NIXL cannot reach the prefill side: {error}", where=link.peer, hint=self._hint
                    ) from error
                if mapping.layout != layout:
                    raise TransferError("the prefill side's pool is not as it said", where=link.peer)
                named = name.decode() if isinstance(name, bytes) else str(name)
                self._remote[link.session] = (named, peer.address, mapping)
                link.on_close(lambda: self._forget_agent(link.session))

    def bring(self, link: Link, there: Sequence[Run], receiver: Receiver, first: int) -> bool:
        remote = self._remote.get(link.session)
        if remote is None:
            return False  # the link has ended, and its transfers with it
        name, address, mapping = remote
        heads = mapping.layout.span
        offsets, sizes = spots(mapping, there, heads).T
        buffer = self._staging()
        ends = sizes.cumsum()
        here = np.stack([ends - sizes + buffer.ctypes.data, sizes, 0 * ends], axis=1)
        away = np.stack([offsets + address, sizes, 0 * ends], axis=1)
        try:
            self._read(link, name, here.astype(np.uint64), away.astype(np.uint64))
        except TransferError:
            # A read under way may still write into it: keep it, and never use it again.
            self._abandoned.append(self._buffer)
            self._buffer = None
            raise
        data = buffer[: int(sizes.sum())].data
        order = mapping.layout.order

        def write(slots: list[Run]) -> None:
            self.memory.write(slots, heads, order, data)

        return receiver.write_tokens(link, first, tokens_of(there), write)

    def _read(self, link: Link, name: str, here: Array, away: Array) -> None:
        until = time.monotonic() + self.options.waiting_timeout
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(away, "DRAM"), name
            )
            state, pause = agent.transfer(handle), LOOK_S[0]
            while state == "PROC" and not link.closed and time.monotonic() < until:
                time.sleep(pause)
                pause = min(LOOK_S[1], 2 * pause + 1e-5)
                state = agent.check_xfer_state(handle)
            if state != "PROC":
                handle.release()
        except Exception as error:
            raise TransferPeerLost(f"NIXL cannot read: {error}", where=link.peer, hint=self._hint) from error
        if state != "DONE":
            raise TransferPeerLost("NIXL's read did not end well", where=link.peer)

    @property
    def _hint(self) -> str | None:
        """For a peer that cannot be reached."""
        if not is_loopback(self.options.host):
            return None
        return "on another machine? Then give this side, by --disaggregation-host, an address that it reaches"

    def _staging(self) -> Array:
        if self._buffer is None:
            buffer = np.zeros(self.part_bytes, dtype=np.uint8)
            self._buffer = buffer, self._register(buffer.ctypes.data, buffer.nbytes)
        return self._buffer[0]

    def _register(self, address: int, size: int) -> Any:
        agent = self._agent
        try:
            return agent.register_memory([(address, size, 0, "")], "DRAM")
        except Exception as error:
            raise TransferError(f"NIXL cannot register memory: {error}", where="KV pool") from error

    def _forget_agent(self, session: str) -> None:
        self._remote.pop(session, None)


def _make_agent(loopback: bool) -> Any:
    from nixl import _api as api

    logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to stdout
    make = api.nixlBind.nixlAgent

    def with_pause(name: str, config: Any) -> Any:
        # The package sets 0: its thread would look again and again, and keep a core busy.
        config.pthrDelay = PROGRESS_US
        return make(name, config)

    with _starting:
        # NIXL's own setting, `ucx_devices`, is not kept for TCP; UCX reads this one when the agent is made.
        only_loopback = loopback and "UCX_NET_DEVICES" not in os.environ
        if only_loopback:
            os.environ["UCX_NET_DEVICES"] = "lo"
        api.nixlBind.nixlAgent = with_pause
        try:
            # Links meet their peers, each in its thread, while another thread reads.
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            return api.nixl_agent(secrets.token_hex(8), config)
        except Exception as error:
            raise TransferError(
                f"NIXL cannot start: {error}",
                where="UCX",
                hint="name the network interfaces that it may use in UCX_NET_DEVICES",
            ) from error
        finally:
            api.nixlBind.nixlAgent = make
            if only_loopback:
                del os.environ["UCX_NET_DEVICES"]
