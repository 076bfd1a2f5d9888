"""ServerConfig: every option of the server that is not the engine's: address, key, limits, processes.

It opens no sockets and knows no HTTP beyond the words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.config.options import help_of, option, options_of, read
from runtime.protocol.errors import BadRequest

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`ServerConfig.of(...)` checks names, types and ranges."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 or :: lets other machines in")
    port: int = option(30000, "port to listen on; 0: any free one (the log says which)")
    api_key: str | None = option(
        None,
        "clients must send it as `Authorization: Bearer KEY`; better given in SGLANG_DSL_API_KEY or a file "
        "than on the command line, where other users of the machine can read it",
        secret=True,
    )
    api_key_file: str | None = option(None, "a file whose first line is the API key")
    served_model_name: str | None = option(None, "the model's name for clients; None: its directory's name")
    http_workers: int = option(1, "processes that serve HTTP and tokenise, all on one port")
    cors_origins: tuple[str, ...] = option(
        (), "origins whose pages may call the server (separated by commas, * for all); none by default"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names by which clients may address the server, beside IP addresses and names without a dot "
        "(separated by commas, * for all). By default any where other machines are let in or a key is "
        "needed, else none: a page could have its own name lead here",
    )
    max_body_bytes: int = option(32 << 20, "size of a request's body, at most; more is answered with 413")
    max_batch_items: int = option(1024, "prompts times samples (n) of one request, at most")
    max_concurrent_requests: int = option(
        2048, "HTTP requests in hand of one worker, at most; more are answered with 503"
    )
    max_body_depth: int = option(64, "levels of lists and objects in a request's body, at most")
    header_timeout_s: float = option(15.0, "seconds a connection may take to send a request's headers")
    body_timeout_s: float = option(60.0, "seconds a request may take to send its body")
    stall_timeout_s: float = option(
        60.0, "seconds a client may leave what was sent unread before it is cut off"
    )
    stream_comment_s: float = option(
        15.0, "seconds of silence after which a stream sends a comment; 0: it never does"
    )
    control_timeout_s: float = option(
        30.0, "seconds the scheduler may take to answer an order, such as /pause_generation"
    )
    incremental_streaming: bool = option(
        False, "streams of /generate send new text only, instead of all so far"
    )
    enable_cache_report: bool = option(False, "tell OpenAI clients how much of a prompt came from the cache")
    request_timeout_s: float | None = option(
        None, "seconds a request may take unless it says so itself; None: as long as it needs"
    )
    tool_server: str | None = option(
        None,
        "where calls of tools are run for /v1/responses: demo (Python, and a browser of tool_documents), or "
        "MCP servers, separated by commas, as host:port (SSE), a URL (streamable HTTP; SSE if it ends in "
        "/sse) or stdio:COMMAND; None: tools are the clients'",
        secret=True,  # a URL, or a command, may hold a key
    )
    tool_documents: str | None = option(
        None,
        "what the browser of --tool-server demo reads: a folder of text, Markdown and HTML files, or a URL "
        "with {query} of a search engine that answers in JSON, as SearXNG does",
        secret=True,
    )
    tool_timeout_s: float = option(
        30.0, "seconds that a call of a tool, or connecting to its server, may take"
    )
    max_tool_calls: int = option(32, "calls of tools that are run for one response, at most")
    health_timeout_s: float = option(20.0, "seconds /health_generate waits for a sign of life")
    health_generates: bool = option(
        False, "/health asks the model for a token, as /health_generate does; otherwise it only answers"
    )
    enable_metrics: bool = option(True, "serve /metrics")
    metrics_need_key: bool = option(False, "/metrics asks for the API key like everything else")
    access_log: bool = option(False, "log one line for each HTTP request")
    log_level: str = option("info", "the least important lines that are logged", choices=LOG_LEVELS)
    log_file: str | None = option(None, "log to this file too; one that cannot be written is done without")
    drain_timeout_s: float = option(
        30.0, "seconds requests in hand may take to finish when the server is told to end (SIGTERM, Ctrl-C)"
    )
    restart: bool = option(False, "when a process dies, start the processes again instead of ending")
    restart_limit: int = option(10, "failures in a row after which starting again is given up")
    ready_file: str | None = option(
        None, "write a JSON object with the server's url and pid to this file once it is ready"
    )
    end_with_stdin: bool = option(False, "end in order when stdin is closed, as with SIGTERM")
    keep_alive_s: float = option(75.0, "seconds an idle HTTP connection is kept open")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ServerConfig:
        """The config with these options. Raises BadRequest: an unknown name (lists the known ones), a value
        of the wrong type or out of range."""
        return read(cls, options, "server").verify()

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Option -> what it is for."""
        return {one.name: help_of(one) for one in options_of(cls)}

    def verify(self) -> ServerConfig:
        """Return self, or raise BadRequest naming the option and its rule."""
        if not 0 <= self.port <= 65535:
            raise BadRequest(f"must be in 0 to 65535, got {self.port}", where="port")
        if not self.host:
            raise BadRequest("must not be empty", where="host", hint="127.0.0.1 is this machine only")
        for name, least in (
            ("http_workers", 1),
            ("max_body_bytes", 1),
            ("max_batch_items", 1),
            ("max_concurrent_requests", 1),
            ("max_body_depth", 1),
            ("restart_limit", 0),
            ("max_tool_calls", 1),
        ):
            if getattr(self, name) < least:
                raise BadRequest(f"must be at least {least}, got {getattr(self, name)}", where=name)
        for name in (
            "health_timeout_s",
            "keep_alive_s",
            "request_timeout_s",
            "header_timeout_s",
            "body_timeout_s",
            "stall_timeout_s",
            "control_timeout_s",
            "tool_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise BadRequest(f"must be a positive number, got {value}", where=name)
        for name in ("drain_timeout_s", "stream_comment_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadRequest(f"must be a number of at least 0, got {getattr(self, name)}", where=name)
        if self.api_key is not None and not self.api_key.strip():
            raise BadRequest("is empty", where="api_key", hint="leave it out to serve without a key")
        if self.tool_server is not None and not self.tool_server.strip(", "):
            raise BadRequest("is empty", where="tool_server", hint="demo, or addresses of MCP servers")
        if self.tool_documents is not None and self.tool_server != "demo":
            raise BadRequest("goes with --tool-server demo only", where="tool_documents")
        if self.api_key is not None and self.api_key_file is not None:
            raise BadRequest("give either this or api_key", where="api_key_file")
        return self
