"""ServerConfig: every option of the server that is not the engine's: address, key, limits, processes.

It opens no sockets and knows no HTTP beyond the words.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.config.options import help_of, option, options_of, read
from runtime.protocol.errors import BadRequest


def check_network(text: str) -> None:
    """Raise BadRequest unless it is an address, a network or `*`."""
    try:
        if text != "*":
            ipaddress.ip_network(text)
    except ValueError as error:
        raise BadRequest(
            f"must be an address or a network, got {text!r}",
            where="forwarded_allow_ips",
            hint="10.0.0.0/8, or *",
        ) from error


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
    admin_api_key: str | None = option(
        None,
        "the key of those who run the server, as Authorization: Bearer KEY: with it, orders that change the "
        "server for everybody (/flush_cache, /pause_generation, ...) take this key alone; better given in "
        "SGLANG_DSL_ADMIN_API_KEY than on the command line",
        secret=True,
    )
    api_keys_file: str | None = option(
        None,
        "a YAML or JSON file of several keys, each with a name and limits, `name: {key: KEY, "
        "requests_per_minute: N, tokens_per_minute: N, running_requests: N}` (sha256: HEX instead of key: "
        "the key's digest); it is read again on SIGHUP. Orders take the admin key alone then",
    )
    served_model_name: str | None = option(
        None,
        "the model's names for clients, separated by commas, the first of which answers carry; * lets them "
        "use any name; None: its directory's name",
    )
    unknown_fields: str = option(
        "refuse",
        "what becomes of a body's fields that the server does not know: refuse, by name, or ignore, with a "
        "Warning header; those that are null, false or empty are always taken",
        choices=("refuse", "ignore"),
    )
    http_workers: int = option(
        1, "processes that serve HTTP and tokenise, all on one port; one that dies is replaced alone"
    )
    cors_origins: tuple[str, ...] = option(
        (), "origins whose pages may call the server (separated by commas, * for all); none by default"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names by which clients may address the server, beside IP addresses and names without a dot "
        "(separated by commas, * for all). By default any where other machines are let in or a key is "
        "needed, else none: a page could have its own name lead here",
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed "
        "(separated by commas, * for all); none by default",
    )
    max_body_bytes: int = option(32 << 20, "size of a request's body, at most; more is answered with 413")
    max_batch_items: int = option(1024, "prompts times samples (n) of one request, at most")
    max_body_values: int = option(
        1 << 20, "values (numbers, texts, lists, objects) in a request's body, at most, about"
    )
    max_bodies_bytes: int = option(
        512 << 20, "bytes of the bodies of all requests in hand of one worker, at most; of one client half"
    )
    max_encode_chars: int = option(
        64 << 20, "characters of prompts that wait to be encoded in one worker, at most; of one client half"
    )
    max_concurrent_requests: int = option(
        2048, "HTTP requests in hand of one worker, at most; more are answered with 503"
    )
    max_connections: int = option(
        4096,
        "connections of one worker, at most: for one more the one that was idle for longest is closed. Fewer "
        "where the system's limit of open files cannot be raised so far (the log says so)",
    )
    max_body_depth: int = option(64, "levels of lists and objects in a request's body, at most")
    header_timeout_s: float = option(15.0, "seconds a connection may take to send a request's headers")
    body_timeout_s: float = option(60.0, "seconds a request may take to send its body")
    stall_timeout_s: float = option(
        60.0, "seconds a client may leave what was sent unread before it is cut off"
    )
    stream_comment_s: float = option(
        30.0,
        "seconds of silence after which a stream sends a comment, as proxies close what is silent (nginx and "
        "others after 60 s); 0: it never does. aiohttp gets none: what is written around it reads each line "
        "as an event",
    )
    control_timeout_s: float = option(
        30.0, "seconds the scheduler may take to answer an order, such as /pause_generation"
    )
    session_timeout_s: float | None = option(
        3600.0,
        "seconds after which a session that nobody uses is closed, unless it says so itself; None: never",
    )
    max_kept_responses: int = option(1024, "responses kept for /v1/responses/{id} in one worker, at most")
    max_kept_response_bytes: int = option(
        256 << 20, "bytes of these, at most, half of them of one client; the oldest go first"
    )
    keep_responses_s: float = option(86400.0, "seconds that a response is kept")
    max_answer_bytes: int = option(
        64 << 20, "bytes of log-probabilities and hidden states in one answer, at most, about"
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
    health_timeout_s: float = option(
        20.0,
        "seconds /health_generate waits for a sign of life, and the engine may take to answer before /health "
        "and /ready call it stuck",
    )
    health_generates: bool = option(
        False, "/health asks the model for a token, as /health_generate does; otherwise what /ready asks"
    )
    enable_metrics: bool = option(True, "serve /metrics")
    metric_names: tuple[str, ...] = option(
        ("sglang", "vllm"),
        "other servers under whose names, too, /metrics tells what it tells, so that their dashboards work: "
        "sglang, vllm, or none",
    )
    metrics_need_key: bool = option(False, "/metrics asks for the API key like everything else")
    access_log: bool = option(
        False, "log one line for each HTTP request: client, path, status, duration, bytes, request id"
    )
    log_format: str = option(
        "text", "lines of the log as text, or as a JSON object each", choices=("text", "json")
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of a collector of OpenTelemetry traces over HTTP (OTLP), such as "
        "http://localhost:4318/v1/traces; needs the extra ops. None: no traces",
        secret=True,  # it may hold a key
    )
    log_level: str = option("info", "the least important lines that are logged", choices=LOG_LEVELS)
    log_file: str | None = option(None, "log to this file too; one that cannot be written is done without")
    drain_timeout_s: float = option(
        30.0, "seconds requests in hand may take to finish when the server is told to end (SIGTERM, Ctrl-C)"
    )
    lame_duck_s: float = option(
        0.0,
        "seconds for which a server that is told to end still takes requests, while /health and /ready say "
        "503, so that load balancers find out before connections are refused; a second signal ends this",
    )
    restart: bool = option(
        False,
        "when a process dies, start the processes again instead of ending; HTTP workers are replaced anyway",
    )
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

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of `served_model_name`, without *; empty: the model's own."""
        names = (name.strip() for name in (self.served_model_name or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name and name != "*"))

    @property
    def any_model_name(self) -> bool:
        """Whether clients may call the model what they like."""
        return "*" in (name.strip() for name in (self.served_model_name or "").split(","))

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
            ("max_connections", 1),
            ("max_kept_responses", 0),
            ("max_kept_response_bytes", 0),
            ("max_answer_bytes", 1),
            ("max_body_values", 1),
            ("max_bodies_bytes", 2),
            ("max_encode_chars", 2),
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
            "session_timeout_s",
            "keep_responses_s",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise BadRequest(f"must be a positive number, got {value}", where=name)
        for name in ("drain_timeout_s", "lame_duck_s", "stream_comment_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadRequest(f"must be a number of at least 0, got {getattr(self, name)}", where=name)
        if unknown := set(self.metric_names) - {"sglang", "vllm", "none"}:
            raise BadRequest(f"must be sglang, vllm or none, got {min(unknown)!r}", where="metric_names")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise BadRequest(
                f"must be a URL, got {endpoint!r}",
                where="otlp_traces_endpoint",
                hint="http://HOST:4318/v1/traces",
            )
        for one in self.forwarded_allow_ips:
            check_network(one)
        if self.api_key is not None and not self.api_key.strip():
            raise BadRequest("is empty", where="api_key", hint="leave it out to serve without a key")
        if self.admin_api_key is not None and not self.admin_api_key.strip():
            raise BadRequest("is empty", where="admin_api_key")
        if self.admin_api_key is not None and self.admin_api_key == self.api_key:
            raise BadRequest("must be another key than api_key", where="admin_api_key")
        if self.tool_server is not None and not self.tool_server.strip(", "):
            raise BadRequest("is empty", where="tool_server", hint="demo, or addresses of MCP servers")
        if self.tool_documents is not None and self.tool_server != "demo":
            raise BadRequest("goes with --tool-server demo only", where="tool_documents")
        if self.api_key is not None and self.api_key_file is not None:
            raise BadRequest("give either this or api_key", where="api_key_file")
        return self
