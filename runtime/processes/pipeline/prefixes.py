"""What a scheduler's prefix cache holds, for whoever asks."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.cache.none import NoCache
from runtime.protocol.control import MAX_PREFIX_IDS, MAX_PREFIXES, GetPrefixesReq
from runtime.scheduler.embedding import EmbeddingScheduler
from runtime.scheduler.scheduler import Scheduler


def surveyed(scheduler: Scheduler | EmbeddingScheduler, asked: GetPrefixesReq) -> dict[str, Any]:
    """A PrefixTree as data; no more of it than the limits, whoever asks. Vectors are made without a cache."""
    match scheduler:
        case Scheduler(manager=manager):
            cache = manager.cache
        case EmbeddingScheduler():
            cache = NoCache()
    tree = cache.survey(min(max(0, asked.most), MAX_PREFIXES), min(max(0, asked.ids), MAX_PREFIX_IDS))
    data: dict[str, Any] = msgspec.to_builtins(tree)
    return data
