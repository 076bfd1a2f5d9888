"""`python -m runtime router`: reads the options, listens, and serves until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn

from runtime.config.flags import make_parser, read_values, with_key
from runtime.config.serving.router import RouterConfig
from runtime.processes.supervise import logs
from runtime.processes.supervise.supervisor import listening, tell_ready
from runtime.protocol.console import set_title
from runtime.server.http.serve import make_server, new_event_loop, set_drain
from runtime.server.router.app import Router

log = logging.getLogger(__name__)

GROUPS = (("router", RouterConfig),)
ENDS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end it."""
TICK_S = 0.1
DESCRIPTION = (
    "One address in front of several servers: replicas (--worker URL ...), or pairs of prefill and decode "
    "servers (--prefill URL ... --decode URL ...)."
)


def command(arguments: Sequence[str], environment: Mapping[str, str], prog: str) -> int:
    """The exit code. Raises BadRequest for options that are wrong, UnknownName for such a policy."""
    parser = make_parser(prog, DESCRIPTION, GROUPS)
    config = with_key(RouterConfig.of(read_values(arguments, environment, parser, GROUPS)["router"]))
    logs.set_up(config.server, "router", config.worker_api_key or "")
    set_title("router")
    router = Router(config)
    with (
        counting_signals(*ENDS) as arrived,
        listening(config.server) as listener,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(serve(router, listener, arrived))
    return 0


@contextmanager
def counting_signals(*numbers: int) -> Iterator[Counter[int]]:
    """How often each of these signals arrived: also before the web server handles them, and those that it
    raises again at its end."""
    arrived: Counter[int] = Counter()

    def count(number: int, frame: FrameType | None) -> None:
        arrived[number] += 1

    before = {number: signal.signal(number, count) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(arrived: Counter[int]) -> bool:
    return any(arrived[number] for number in ENDS)


async def serve(router: Router, listener: socket.socket, arrived: Counter[int]) -> None:
    """Until SIGTERM or SIGINT. Requests in hand then have drain_timeout_s, after a second SIGINT nothing."""
    config = router.config
    server = make_server(router.app, config.server)
    set_drain(server, config.drain_timeout_s)
    async with router.running():
        watch = asyncio.create_task(_end(router, server, arrived), name="sglang-dsl-end")
        tell_ready(config.ready_file, listener)
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.cancel()


async def _end(router: Router, server: uvicorn.Server, arrived: Counter[int]) -> None:
    while not server.should_exit:
        await asyncio.sleep(TICK_S)
        if ended(arrived):
            server.should_exit = True
    patience = router.config.drain_timeout_s
    log.info("ending; requests in hand may take %g s", patience)
    await asyncio.sleep(patience)
    router.give_up(f"the router is ending, and the request was not finished within {patience:g} s")
