"""How many replicas there should be. Ray Serve sees no requests, as they do not pass through it; each replica
tells how many its server has in hand. Loaded in Ray Serve's controller; delays and bounds are its own."""

from __future__ import annotations

import math
from typing import Any

REQUESTS = "requests"
"""What a replica's figure is called."""


def by_requests(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's AutoscalingContext -> the number of replicas that have target_ongoing_requests each, and
    the policy's state, which is none. Without figures: as many as now."""
    told = (context.aggregated_metrics or {}).get(REQUESTS) or {}
    if not told:
        return context.target_num_replicas, {}
    return math.ceil(sum(told.values()) / context.config.target_ongoing_requests), {}
