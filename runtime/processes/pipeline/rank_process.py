"""RankProcess: a process that runs runtime.engine.follower: started, watched and ended. Knows no plans."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from runtime.engine.follower import LogLine
from runtime.ipc.address import Address
from runtime.processes.pipeline.before_start import for_children
from runtime.protocol.errors import InternalFault

UNLESS_SAID = {"OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Unless the environment says otherwise. Threads of one operation that wait for one another sleep: they would
turn round and round on cores that the scheduler needs, and each operation wait for its turn. And ranks, which
are on one machine, listen for one another there alone."""


class RankProcess:
    """`name`: what it is called in errors and in the log."""

    def __init__(self, name: str, files: Sequence[int], on_end: Callable[[RankProcess], None]) -> None:
        """Start it. files: descriptors of its mailbox, the masks and, perhaps, its KV pool. on_end is called
        from another thread once it has ended. Raises InternalFault."""
        end, masks, kv = (*files, -1)[:3]
        arguments = [Address.fd(end).url, str(masks), str(kv)]
        self.name, self._on_end = name, on_end
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.engine.follower", *arguments],
                stdin=subprocess.PIPE,  # it ends when this end of it is closed
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**UNLESS_SAID, **for_children(os.environ)},
                pass_fds=files,
            )
        except OSError as error:
            raise InternalFault(f"{name}'s process cannot be started: {error}", where="runner") from error
        self._watcher = threading.Thread(target=self._watch, name="runner-process", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()

    def release(self, seconds: float) -> None:
        """Let go of what is held for it; it has ended, or will when it notices."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._watcher.join(seconds)

    def how_it_ended(self, seconds: float) -> str:
        """Waits so long for the end."""
        if not self.wait(seconds):
            return f"{self.name}'s process closed its mailbox"
        code = self._process.returncode
        if code >= 0:
            return f"{self.name}'s process ended with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"{self.name}'s process was killed by {name}"

    def _watch(self) -> None:
        """Pass on what it logs until it ends."""
        pipe = self._process.stdout
        assert pipe is not None
        left = b""
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                *lines, left = (left + data).split(b"\n")
                for raw in lines:
                    with contextlib.suppress(msgspec.DecodeError):
                        line = msgspec.json.decode(raw, type=LogLine)
                        logging.getLogger(line.logger).log(line.level, "%s", line.text)
        self._process.wait()
        self._on_end(self)
