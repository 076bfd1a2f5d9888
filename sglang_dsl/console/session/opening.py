"""The former place of Opening and Place (sglang_dsl.console.backend_flag), for one release."""

from sglang_dsl.console.backend_flag import BackendChoice as Place
from sglang_dsl.console.backend_flag import Opening

__all__ = ["Opening", "Place"]
