"""EngineClient: connects a TokenizerManager to a scheduler and a detokeniser in other processes, by mailboxes
and a thread that reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.mailbox import MailboxClosed
from runtime.processes.checkpoint.model import Model
from runtime.processes.frontend.build import build_tokenizer_manager
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.processes.supervise.channel import SCHEDULER, mailbox_of
from runtime.protocol.control import GroupFailed
from runtime.protocol.errors import EngineDead, RuntimeFault

log = logging.getLogger(__name__)

IDLE_S = 5.0
SEND_TIMEOUT_S = 0.5
"""Limits how long a scheduler that reads nothing can block a frontend's event loop."""


class EngineClient:
    """`name`: of this HTTP worker among the group's, and of its socket."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises InternalFault if the sockets cannot be created."""
        self._name = name
        self._inbox = mailbox_of(folder, name).inbox()
        self._outbox = mailbox_of(folder, SCHEDULER).outbox(timeout_s=SEND_TIMEOUT_S)
        self._lock = threading.Lock()
        self._manager: TokenizerManager | None = None
        self._fault: RuntimeFault | None = None
        self._thread = threading.Thread(target=self._read, name="outputs", daemon=True)
        self._thread.start()

    def open(
        self, engine: EngineConfig, server: ServerConfig, model: Model, facts: Mapping[str, Any]
    ) -> TokenizerManager:
        """The TokenizerManager, once the scheduler has reported its facts."""
        manager = build_tokenizer_manager(
            engine,
            model,
            int(facts["slots"]),
            self._outbox,
            name=self._name,
            served_name=next(iter(server.served_names), None),
            max_encode_chars=server.max_encode_chars,
            max_answer_bytes=server.max_answer_bytes,
        )
        with self._lock:
            self._manager = manager
            fault = self._fault
        if fault is not None:
            manager.fail_all(fault)
        return manager

    def give_up(self, fault: RuntimeFault) -> None:
        """Answer all requests, also later ones, with `fault`; with the first one if called again."""
        with self._lock:
            self._fault = self._fault or fault
            manager = self._manager
        if manager is not None:
            manager.fail_all(fault)

    def close(self) -> None:
        self._inbox.close()
        self._thread.join(IDLE_S)
        self._outbox.close()

    def _read(self) -> None:
        try:
            while True:
                for item in self._inbox.receive(IDLE_S):
                    if isinstance(item, GroupFailed):
                        self.give_up(
                            EngineDead(item.message, where=item.where, hint="send the request again")
                        )
                    elif self._manager is not None:
                        self._manager.handle(item)
        except MailboxClosed:
            self.give_up(EngineDead("the server is ending"))
        except Exception as error:
            log.exception("outputs cannot be read any more")
            self.give_up(EngineDead(f"outputs cannot be read any more: {type(error).__name__}: {error}"))
            raise
