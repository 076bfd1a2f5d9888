"""The disaggregated stages put together, as an engine's options say."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial

from runtime.config.engine import EngineConfig
from runtime.disagg.decode import DecodeStage
from runtime.disagg.peers import Hosts, Peers
from runtime.disagg.prefill import PrefillStage
from runtime.disagg.transfer.bootstrap import BootstrapServer
from runtime.disagg.transfer.fake import FakeManager
from runtime.disagg.transfer.faults import Faults
from runtime.disagg.transfer.kv_manager import KV_TRANSFERS, TransferOptions
from runtime.disagg.transfer.memory import KVMemory
from runtime.protocol.errors import BadRequest
from runtime.scheduler.stage import Stage

log = logging.getLogger(__name__)


def open_peers(config: EngineConfig, memory: KVMemory | None, most: int) -> Peers | None:
    """This engine's end of a pair; None where it computes prompts and outputs itself. `most`: requests whose
    KV moves at once, at most. Raises BadRequest and TransferError."""
    if config.disaggregation_mode == "null":
        return None
    if memory is None:
        raise BadRequest(
            "this engine gives no access to its KV pool",
            where="disaggregation_mode",
            hint="on a GPU, start it with runner_process=False, and without tp_size",
        )
    secret = config.disaggregation_key
    key = None if secret is None else hashlib.sha256(secret.encode()).digest()
    options = TransferOptions(
        host=config.disaggregation_host,
        key=key,
        bootstrap_timeout=config.disaggregation_timeout_s,
        waiting_timeout=config.disaggregation_timeout_s,
        heartbeat=config.disaggregation_heartbeat_s,
        faults=Faults.of_environment(),
    ).verify()
    transfers = KV_TRANSFERS.load(config.disaggregation_transfer_backend)(memory, options)
    server: BootstrapServer | None = None
    try:
        if config.disaggregation_mode == "prefill":
            server = BootstrapServer(config.disaggregation_host, config.disaggregation_bootstrap_port, key)
            transfers.listen(server.address)
            log.info("bootstrap server on %s", server.address)
    except BaseException:
        transfers.close()
        if server is not None:
            server.close()
        raise
    return Peers(
        transfers,
        FakeManager(memory),
        most,
        memory,
        Hosts(config.disaggregation_allowed_hosts),
        server,
    )


def stage_of(config: EngineConfig, peers: Peers | None) -> Callable[..., Stage]:
    """Makes a scheduler's stage."""
    if peers is None:
        return Stage
    if config.disaggregation_mode == "prefill":
        return partial(PrefillStage, peers=peers)
    return partial(DecodeStage, peers=peers, reserved=config.num_reserved_decode_tokens)
