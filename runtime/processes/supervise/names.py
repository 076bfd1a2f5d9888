"""Names of the processes of a group, which are the names of their sockets."""

from __future__ import annotations

from pathlib import Path

from runtime.ipc.address import Address

SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"


def frontend_name(index: int) -> str:
    """The name of an HTTP worker, and the `http_worker_ipc` of its requests."""
    return f"worker-{index}"


def pid_file(folder: Path, name: str) -> Path:
    """Where the number of a process stands."""
    return folder / f"{name}.pid"


def mailbox_of(folder: Path, name: str) -> Address:
    return Address.ipc(folder / f"{name}.ipc")
