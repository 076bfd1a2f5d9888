"""The local transfer: between engines of one machine, or of one process.

They meet at a Unix socket in a folder that only this user can enter. Where the prefill engine's pool lies in
memory that can be mapped (RunnerConfig.shared_kv), the decode side maps it, for reading only, and copies
from pool to pool: once, and nothing crosses the socket but messages. Otherwise, as on a GPU, KV is pushed
through the socket.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from runtime.disagg.transfer.kv_manager import TransferOptions
from runtime.disagg.transfer.memory import ArrayMemory, KVMapping, KVMemory, copy_between, tokens_of
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.manager import BACKLOG, HELLO_S, PullingManager
from runtime.disagg.transfer.net.messages import Hello, Welcome
from runtime.disagg.transfer.net.receiving import Receiver
from runtime.ipc.zmq_mailbox import make_folder
from runtime.plan import Run
from runtime.protocol.errors import InternalFault, TransferError

SCHEME = "unix:"


class LocalManager(PullingManager):
    name: ClassVar[str] = "local"

    def __init__(self, memory: KVMemory, options: TransferOptions | None = None) -> None:
        super().__init__(memory, options)
        self._folder: Path | None = None
        self._pools: dict[str, ArrayMemory] = {}

    def open(self) -> tuple[socket.socket, str]:
        self._folder = Path(tempfile.mkdtemp(prefix="kv-"))
        path = self._folder / "kv.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            make_folder(self._folder)
            listener.bind(str(path))
            listener.listen(BACKLOG)
        except (OSError, InternalFault) as error:
            listener.close()
            raise TransferError(
                f"the socket cannot be made: {error}", where=str(path), hint="set TMPDIR to a shorter path"
            ) from error
        return listener, f"{SCHEME}{path}"

    def dial(self, address: str) -> socket.socket:
        if not address.startswith(SCHEME):
            raise TransferError(
                "that is no address of the local transfer",
                where=address[:200],
                hint="use tcp between machines",
            )
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(HELLO_S)
            end.connect(address.removeprefix(SCHEME))
        except OSError:
            end.close()
            raise
        return end

    def mapping(self) -> KVMapping | None:
        return self.memory.mapping

    def met(self, link: Link, end: socket.socket, answer: Hello | Welcome) -> None:
        """The prefill side sends its pool's file, opened for reading only, the decode side maps it."""
        match answer:
            case Hello() if link.pulls:
                assert self.memory.file is not None
                file = os.open(f"/proc/self/fd/{self.memory.file}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    socket.send_fds(end, [b"k"], [file])
                finally:
                    os.close(file)
            case Welcome(mapping=KVMapping() as mapping, layout=layout):
                _, files, _, _ = socket.recv_fds(end, 1, 1)
                if not files:
                    raise TransferError("the prefill side sent no file of its pool", where=link.peer)
                try:
                    pool = ArrayMemory.map(files[0], mapping, write=False)
                finally:
                    for file in files:
                        os.close(file)  # the mapping keeps what it needs
                if pool.layout != layout:
                    raise TransferError("the prefill side's pool is not as it said", where=link.peer)
                self._pools[link.session] = pool
                link.on_close(lambda: self._unmap(link.session))

    def bring(self, link: Link, there: Sequence[Run], receiver: Receiver, first: int) -> bool:
        pool, mine = self._pools.get(link.session), self.memory
        if pool is None:
            return False  # the link has ended, and its transfers with it
        heads = pool.layout.span

        def write(here: list[Run]) -> None:
            if isinstance(mine, ArrayMemory):
                copy_between(pool, there, mine, here, heads)
            else:
                mine.write(here, heads, pool.layout.order, pool.read(there, heads, pool.layout.order))

        return receiver.write_tokens(link, first, tokens_of(there), write)

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _unmap(self, session: str) -> None:
        self._pools.pop(session, None)
