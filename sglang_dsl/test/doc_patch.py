"""`test.doc_patch`: how notebooks for sglang start a server. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]
