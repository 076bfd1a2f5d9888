"""RankProcess: starts, watches and ends a process that runs runtime.engine.follower. Knows no plans."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from runtime.engine.follower import LogLine
from runtime.processes.pipeline.before_start import describe_exit, for_children
from runtime.protocol.errors import InternalFault

DEFAULT_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Overridden by the environment. Waiting OpenMP threads sleep instead of spinning on cores that the scheduler
needs; ranks, which are on one machine, connect over loopback."""


class RankProcess:
    """`name`: for errors and the log."""

    def __init__(self, name: str, files: Sequence[int], on_end: Callable[[RankProcess], None]) -> None:
        """Start it. files: descriptors of its mailbox, the masks and, optionally, its KV pool. on_end is
        called from another thread when it has ended. Raises InternalFault."""
        self.name, self._on_end = name, on_end
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.engine.follower", *map(str, (*files, -1)[:3])],
                stdin=subprocess.PIPE,  # it ends when this end of it is closed
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**DEFAULT_ENVIRONMENT, **for_children(os.environ)},
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
        """Close its stdin, by which it ends if it has not yet."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._watcher.join(seconds)

    def how_it_ended(self, seconds: float) -> str:
        """How it ended, for people; waits so long for the end."""
        if not self.wait(seconds):
            return f"{self.name}'s process closed its mailbox"
        return f"{self.name}'s process {describe_exit(self._process.returncode)}"

    def _watch(self) -> None:
        """Log its lines until it ends."""
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
