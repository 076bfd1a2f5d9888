"""TorchProfiler: where a step's time goes, in all threads, as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from runtime.protocol.errors import BadRequest

log = logging.getLogger(__name__)

MAX_STEPS = 10_000


class TorchProfiler:
    """folder: the parent of all traces; None: a new folder in the system's temporary one. Used by one
    thread."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._running: Any = None
        self.recording = False
        self._file = Path()
        self._left: int | None = None

    def start(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        """Begin a profile; the trace will be in data["file"]. folder: a name below the profiler's own folder;
        steps: stop after this many. Raises BadRequest if one is running, a name or number is invalid, or the
        folder cannot be created."""
        if self._running is not None:
            raise BadRequest("a profile is being made already", where="profile", hint="stop it first")
        if steps is not None and not 1 <= steps <= MAX_STEPS:
            raise BadRequest(f"must be in 1 to {MAX_STEPS}, got {steps}", where="steps")
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json.gz"
        self._file = self._folder_for(folder) / name
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # The forward pass runs in a thread of its own.
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._running = profile(activities=activities, experimental_config=threads)
        self._running.start()
        self.recording = True
        self._left = steps
        return {"file": str(self._file)}

    def stop(self) -> dict[str, Any]:
        """End, and write the trace to data["file"]. Raises BadRequest if none is running, or it cannot be
        written."""
        running, self._running, self.recording = self._running, None, False
        if running is None:
            raise BadRequest("no profile is being made", where="profile", hint="start one first")
        running.stop()
        try:
            running.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            raise BadRequest(f"the trace cannot be written: {error}", where=str(self._file)) from error
        return {"file": str(self._file)}

    def stepped(self) -> None:
        """Called after each step; the last requested step ends the profile."""
        if self._running is None or self._left is None:
            return
        self._left -= 1
        if self._left <= 0:
            try:
                log.info("a profile was written to %s", self.stop()["file"])
            except BadRequest as fault:
                log.error("%s", fault)

    def close(self) -> None:
        """End and write a running profile: the interpreter would crash if it ended with one."""
        try:
            self.stop()
        except BadRequest as fault:
            log.debug("%s", fault)

    def _folder_for(self, folder: str | None) -> Path:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="sglang-dsl-profile-")
        base = Path(self._folder).expanduser().resolve()
        path = base if folder is None else (base / folder).resolve()
        if not path.is_relative_to(base):
            raise BadRequest(f"must be a name below {base}, got {folder!r}", where="folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest(f"cannot be made: {error.strerror or error}", where=str(path)) from error
        return path
