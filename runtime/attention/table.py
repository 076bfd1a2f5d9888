"""The table of attention implementations. Imports none of them, and no torch."""

from __future__ import annotations

from typing import Any

from runtime.protocol.registry import Registry

AUTO = "auto"

ATTENTION: Registry[Any] = Registry(
    "attention",
    {
        "native": "runtime.attention.native_views:NativeViews",
        "torch_views": "runtime.attention.torch_views:TorchViews",
        "torch_plain": "runtime.attention.torch_views:TorchPlain",
        "triton": "runtime.attention.triton_tiles:TritonTiles",
        "reference": "runtime.attention.reference:Reference",
    },
)
