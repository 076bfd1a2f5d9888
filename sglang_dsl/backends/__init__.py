"""Backends by name, and conversion of other objects to one. Loads a backend's module when it is used.

`engine.py` and `endpoint.py` are the bundled runtime in this process and over HTTP; `common/api.py` is the
base of the APIs of other providers (why without their packages:
`tutorials/decisions/007-apis-without-their-packages.md`), `blocking.py` of backends written for sglang.
"""

from __future__ import annotations

import functools
from typing import Any

from runtime.protocol.registry import Registry, UnknownName
from sglang_dsl.backends.base import Backend

BACKENDS: Registry[type[Backend]] = Registry(
    "backend",
    {
        "mock": "sglang_dsl.backends.mock:MockBackend",
        "engine": "sglang_dsl.backends.engine:EngineBackend",
        "endpoint": "sglang_dsl.backends.endpoint:RuntimeEndpoint",
        "openai": "sglang_dsl.backends.openai:OpenAI",
        "anthropic": "sglang_dsl.backends.anthropic:Anthropic",
        "gemini": "sglang_dsl.backends.gemini:Gemini",
        "vertexai": "sglang_dsl.backends.gemini:VertexAI",
        "litellm": "sglang_dsl.backends.litellm:LiteLLM",
        "crusoe": "sglang_dsl.backends.openai:Crusoe",
    },
)
NEED_A_MODEL = frozenset({"openai", "anthropic", "gemini", "vertexai", "litellm", "crusoe"})
"""Backends that need a model's name, so that their own name is not enough."""


@functools.cache
def by_name(name: str) -> Backend:
    """The process's one backend of this name, with its defaults: an engine is started once, not per run."""
    if name == "endpoint":
        raise TypeError(
            'the backend "endpoint" needs a server\'s address: pass its URL, or RuntimeEndpoint(url)'
        )
    if name in NEED_A_MODEL:
        kind = (BACKENDS.target(name) or name).rpartition(":")[2]
        raise TypeError(
            f"the backend {name!r} needs a model's name: pass an object made with one, as in {kind}(MODEL)"
        )
    if name not in BACKENDS:
        raise UnknownName(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}. {_instead_of(name)}")
    return BACKENDS.load(name)()


_APIS = {"OpenAI": ("gpt-", "o1", "o3", "o4"), "Anthropic": ("claude",), "Gemini": ("gemini",)}


def _instead_of(name: str) -> str:
    """A hint about a text that is no backend's name."""
    host, colon, port = name.partition(":")
    if host and colon and port.split("/")[0].isdigit():
        return f'For a server: backend="http://{name}"'
    api = next((api for api, starts in _APIS.items() if name.startswith(starts)), "Engine")
    return f"For a model: backend={api}({name!r})"


@functools.cache
def _at(url: str) -> Backend:
    """The process's one backend for the server at this address, so that its connections are shared."""
    return BACKENDS.load("endpoint")(url, lazy=True)  # type: ignore[call-arg]


def as_backend(value: Any) -> Backend:
    """A backend from what `backend=` takes: a Backend, an Engine, a Runtime, a server's URL, or a name of
    BACKENDS.

    Raises TypeError for other values, UnknownName for an unknown name.
    """
    if isinstance(value, type):  # has the methods of a backend, and would fail at the first call
        raise TypeError(
            f"backend takes an object, got the class {value.__name__}; write {value.__name__}(...)"
        )
    match value:
        case Backend():
            return value
        case str() if value.startswith(("http://", "https://")):
            return _at(value)
        case str():
            return by_name(value)
        case object(endpoint=Backend() as endpoint):  # a Runtime
            return endpoint
        case object(submit=_, stream_deltas=_, flush_cache=_):  # an Engine
            # By name: programs without an engine never load its module.
            return BACKENDS.load("engine")(value)  # type: ignore[call-arg]
        case _:
            names = ", ".join(BACKENDS)
            kinds = f"a Backend, an Engine, a Runtime, a URL or one of {names}"
            raise TypeError(f"backend takes {kinds}; got {type(value).__name__}")
