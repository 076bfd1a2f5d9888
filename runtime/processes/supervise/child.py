"""A child of the server: receives its configuration, runs its role, and ends with its supervisor.

    python -m runtime.processes.supervise.child <descriptor of a socket to the supervisor>

It loads only what its role needs, and leaves signals to the supervisor.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from runtime.ipc.address import Address
from runtime.ipc.mailbox import MailboxClosed
from runtime.processes.supervise import logs
from runtime.processes.supervise.channel import FROM_CHILD, TO_CHILD, ChildSpec, Failed
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.protocol.console import set_title
from runtime.protocol.errors import BadRequest, InternalFault
from runtime.protocol.registry import MissingExtra, Registry

log = logging.getLogger(__name__)

ROLES: Registry[Callable[[ChildSpec, Lifecycle], None]] = Registry(
    "child role",
    {
        "scheduler": "runtime.processes.supervise.child_scheduler:run",
        "detokenizer": "runtime.processes.supervise.child_detokenizer:run",
        "http": "runtime.server.worker:run",
    },
    extras={"http": "server"},
)


def main(arguments: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if len(arguments) != 1:
        print("error: no socket to a supervisor (python -m runtime serve starts these)", file=sys.stderr)
        return 2
    descriptor = int(arguments[0])
    supervisor = Address.fd(descriptor)
    inbox, outbox = supervisor.inbox(TO_CHILD), supervisor.outbox(FROM_CHILD)
    os.close(descriptor)
    try:
        spec, *orders = inbox.receive(None)
    except MailboxClosed:
        return 1
    assert isinstance(spec, ChildSpec)
    logs.set_up(spec.server, spec.name)
    set_title(spec.name)
    lifecycle = Lifecycle(inbox, outbox, spec, orders)
    lifecycle.start()
    try:
        ROLES.load(spec.role)(spec, lifecycle)
    except BaseException as error:
        if lifecycle.stopping is None:
            # The supervisor reports it to the user. A defect's traceback is for the log.
            cause = BadRequest(str(error)) if isinstance(error, MissingExtra) else InternalFault.of(error)
            if isinstance(cause, InternalFault):
                log.error("ends: %s", error, exc_info=error)
            lifecycle.report(Failed(cause.to_dict()))
            return 1
        log.debug("ended while stopping: %s", error)
    lifecycle.tidy()
    return 0 if lifecycle.stopping is not None and not lifecycle.orphaned else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # Threads of libraries and of abandoned requests must not keep the process.
    os._exit(code)
