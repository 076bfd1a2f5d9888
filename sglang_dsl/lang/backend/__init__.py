"""`lang.backend`: backends under the module names that sglang's programs import from. Holds no code of its
own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsl.lang import modules_of

if TYPE_CHECKING:
    from sglang_dsl.lang.backend import anthropic as anthropic
    from sglang_dsl.lang.backend import base_backend as base_backend
    from sglang_dsl.lang.backend import crusoe as crusoe
    from sglang_dsl.lang.backend import litellm as litellm
    from sglang_dsl.lang.backend import openai as openai
    from sglang_dsl.lang.backend import runtime_endpoint as runtime_endpoint
    from sglang_dsl.lang.backend import vertexai as vertexai
else:
    __getattr__ = modules_of(__name__)
