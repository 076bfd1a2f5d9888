"""The transfers by name. Third parties add theirs through the entry-point group `sglang_dsl.kv.transfer`."""

from __future__ import annotations

from typing import Final

from runtime.disagg.transfer.base import KVManager
from runtime.protocol.registry import Registry

KV_TRANSFERS: Final[Registry[type[KVManager]]] = Registry(
    "kv transfer",
    {
        "fake": "runtime.disagg.transfer.fake:FakeManager",
        "local": "runtime.disagg.transfer.local:LocalManager",
        "nixl": "runtime.disagg.transfer.nixl:NixlManager",
        "tcp": "runtime.disagg.transfer.tcp:TcpManager",
    },
    {"nixl": "nixl"},
)
