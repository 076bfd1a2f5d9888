"""ServerConfig: every option of the server that is not the engine's: address, keys, limits, processes.

It opens no sockets and knows no HTTP beyond the names.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

from runtime.config.options import Config, option
from runtime.protocol.errors import BadRequest


def check_network(text: str) -> None:
    """Raise BadRequest unless `text` is an address, a network or `*`."""
    try:
        if text != "*":
            ipaddress.ip_network(text)
    except ValueError as error:
        raise BadRequest(
            f"must be an address or a network, got {text!r}",
            where="forwarded_allow_ips",
            hint="10.0.0.0/8, or *",
        ) from error


LEAST_HEARTBEAT_S = 2.0
"""Several heartbeats; they are sent twice a second."""
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Config):
    """Options that the server and the router share."""

    host: str = option("127.0.0.1")
    """address to listen on; 0.0.0.0 or :: accepts connections from other machines"""
    port: int = option(30000, within=(0, 65535))
    """port to listen on; 0 picks a free one, which the log shows"""
    api_key: str | None = option(None, secret=True)
    """API key that clients must send as `Authorization: Bearer KEY`. Prefer SGLANG_DSL_API_KEY or a file:
    other users of the machine can read a command line"""
    api_key_file: str | None = option(None)
    """file whose first line is the API key"""
    cors_origins: tuple[str, ...] = option(())
    """origins whose web pages may call the server, separated by commas; * allows all. By default none"""
    allowed_hosts: tuple[str, ...] = option(())
    """host names by which clients may address the server, besides IP addresses and names without a dot;
    separated by commas, * allows all. By default all if the server accepts other machines or needs a key;
    otherwise none, which protects against DNS rebinding"""
    forwarded_allow_ips: tuple[str, ...] = option(())
    """addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto headers are trusted,
    separated by commas; * trusts all. By default none"""
    max_body_bytes: int = option(32 << 20, at_least=1)
    """maximum size of a request body; larger ones get a 413"""
    max_body_values: int = option(1 << 20, at_least=1)
    """approximate maximum number of values (numbers, strings, lists, objects) in a request body"""
    max_body_strings: int = option(1 << 17, at_least=1)
    """approximate maximum number of strings (names of fields included), lists and objects in a request body:
    of all values but numbers, which take less work"""
    max_bodies_bytes: int = option(512 << 20, at_least=2)
    """maximum total size of the bodies of all current requests of one worker; one client may use half of
    it"""
    max_concurrent_requests: int = option(2048, at_least=1)
    """maximum number of concurrent HTTP requests per worker; more get a 503"""
    max_connections: int = option(4096, at_least=1)
    """maximum number of connections per worker. When it is reached, the longest idle connection is closed. It
    is lower if the system's limit of open files cannot be raised far enough; the log then says so"""
    max_body_depth: int = option(64, at_least=1)
    """maximum nesting depth of lists and objects in a request body"""
    header_timeout_s: float = option(15.0, positive=True)
    """seconds in which a connection must send the headers of a request"""
    body_timeout_s: float = option(60.0, positive=True)
    """seconds in which a request must send its body"""
    stall_timeout_s: float = option(60.0, positive=True)
    """seconds after which a client that does not read its response is disconnected"""
    control_timeout_s: float = option(30.0, positive=True)
    """seconds the scheduler has to answer a control request such as /pause_generation"""
    enable_metrics: bool = option(True)
    """serve /metrics"""
    metrics_need_key: bool = option(False)
    """require the API key for /metrics too"""
    access_log: bool = option(False)
    """log one line per HTTP request: client, path, status, duration, bytes, request id"""
    log_format: str = option("text", choices=("text", "json"))
    """write log lines as text, or each as a JSON object"""
    log_level: str = option("info", choices=LOG_LEVELS)
    """lowest level that is logged"""
    log_file: str | None = option(None)
    """also write the log to this file; if it cannot be written, the server runs without it"""
    drain_timeout_s: float = option(30.0, at_least=0)
    """seconds that running requests have to finish after SIGTERM or Ctrl-C"""
    ready_file: str | None = option(None)
    """write a JSON object with the server's url, port and pid to this file when the server is ready"""
    keep_alive_s: float = option(75.0, positive=True)
    """seconds for which an idle HTTP connection is kept open"""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpOptions):
    """Options of the server."""

    label = "server"
    admin_api_key: str | None = option(None, secret=True)
    """API key for admin requests, sent as `Authorization: Bearer KEY`. If set, requests that change the
    server for everybody (/flush_cache, /pause_generation, ...) accept only this key. Prefer
    SGLANG_DSL_ADMIN_API_KEY over the command line"""
    api_keys_file: str | None = option(None)
    """YAML or JSON file of several API keys, each with a name and limits: `name: {key: KEY,
    requests_per_minute: N, tokens_per_minute: N, running_requests: N}` (or sha256: HEX, the key's digest,
    instead of key). It is read again on SIGHUP. Admin requests then accept only the admin key"""
    served_model_name: str | None = option(None)
    """names of the model for clients, separated by commas; responses use the first. * allows any name. By
    default the name of the model's directory"""
    unknown_fields: str = option("refuse", choices=("refuse", "ignore"))
    """what to do with unknown fields of a request body: refuse rejects the request and names them; ignore
    drops them and names them in a Warning header. Fields that are null, false or empty are always accepted"""
    http_workers: int = option(1, at_least=1)
    """number of processes that handle HTTP and tokenisation, all on the same port. If one dies, only that one
    is replaced"""
    max_batch_items: int = option(1024, at_least=1)
    """maximum number of prompts times samples (n) in one request"""
    max_encode_chars: int = option(64 << 20, at_least=2)
    """maximum number of prompt characters that wait to be tokenised in one worker; one client may use half of
    it"""
    stream_comment_s: float = option(30.0, at_least=0)
    """seconds without output after which a stream sends a comment, because proxies close silent connections
    (nginx after 60 s); 0 disables it. Not sent to aiohttp clients, because code written for it often parses
    every line as an event"""
    session_timeout_s: float | None = option(3600.0, positive=True)
    """seconds without use after which a session is closed, unless the session sets its own timeout; none:
    never"""
    max_kept_responses: int = option(1024, at_least=0)
    """maximum number of responses stored for /v1/responses/{id} per worker"""
    max_kept_response_bytes: int = option(256 << 20, at_least=0)
    """maximum total size of the stored responses; one client may use half of it. The oldest are deleted
    first"""
    keep_responses_s: float = option(86400.0, positive=True)
    """seconds for which a response is stored"""
    max_answer_bytes: int = option(64 << 20, at_least=1)
    """approximate maximum size of the log-probabilities and hidden states in one response"""
    incremental_streaming: bool = option(False)
    """streams of /generate send only the new text in each event, instead of the whole text so far"""
    enable_cache_report: bool = option(False)
    """report to OpenAI clients how many prompt tokens came from the cache"""
    request_timeout_s: float | None = option(None, positive=True)
    """seconds a request may take, unless the request sets its own timeout. By default no limit"""
    tool_server: str | None = option(None, secret=True)  # a URL, or a command, may hold a key
    """where tool calls of /v1/responses are executed: demo (Python, and a browser over --tool-documents), or
    MCP servers separated by commas, each as host:port (SSE), a URL (streamable HTTP; SSE if it ends in /sse)
    or stdio:COMMAND. By default the client executes all tools"""
    tool_documents: str | None = option(None, secret=True)
    """what the browser of --tool-server demo reads: a folder of text, Markdown and HTML files, or the URL of
    a search engine with {query}, which must return JSON as SearXNG does"""
    tool_timeout_s: float = option(30.0, positive=True)
    """seconds that a tool call, or connecting to a tool server, may take"""
    max_tool_calls: int = option(32, at_least=1)
    """maximum number of tool calls executed for one response"""
    health_timeout_s: float = option(20.0, positive=True)
    """seconds that /health_generate waits for output, and after which /health and /ready report an engine
    that does not answer as stuck"""
    health_generates: bool = option(False)
    """let /health generate a token, as /health_generate does; otherwise it checks the same as /ready"""
    metric_names: tuple[str, ...] = option(("sglang", "vllm"))
    """other servers under whose metric names /metrics also exports its values, so that their dashboards work:
    sglang, vllm, or none"""
    otlp_traces_endpoint: str | None = option(None, secret=True)  # it may hold a key
    """URL of an OpenTelemetry collector that receives traces over HTTP (OTLP), such as
    http://localhost:4318/v1/traces; needs the extra `ops`. By default no traces are sent"""
    lame_duck_s: float = option(0.0, at_least=0)
    """seconds after SIGTERM during which the server still accepts requests while /health and /ready return
    503, so that load balancers can react before connections are refused. A second signal skips the rest"""
    restart: bool = option(False)
    """restart the processes when one dies, instead of exiting. HTTP workers are always replaced"""
    heartbeat_timeout_s: float = option(20.0, at_least=LEAST_HEARTBEAT_S)
    """seconds without a sign of life after which a process of the server counts as hung: an HTTP worker is
    replaced, another fails the group. A forward pass has a limit of its own, step_timeout_s"""
    restart_limit: int = option(10, at_least=0)
    """number of failures in a row after which the server no longer restarts"""
    end_with_stdin: bool = option(False)
    """shut down gracefully when stdin is closed, as on SIGTERM"""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of `served_model_name`, without *; empty: the model's own."""
        names = (name.strip() for name in (self.served_model_name or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name and name != "*"))

    @property
    def any_model_name(self) -> bool:
        """Whether clients may use any model name."""
        return "*" in (name.strip() for name in (self.served_model_name or "").split(","))

    def verify(self) -> Self:
        """Return self, or raise BadRequest naming the option and its rule."""
        if not self.host:
            raise BadRequest("must not be empty", where="host", hint="127.0.0.1 is this machine only")
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
            raise BadRequest("must differ from api_key", where="admin_api_key")
        if self.tool_server is not None and not self.tool_server.strip(", "):
            raise BadRequest("is empty", where="tool_server", hint="demo, or addresses of MCP servers")
        if self.tool_documents is not None and self.tool_server != "demo":
            raise BadRequest("needs --tool-server demo", where="tool_documents")
        if self.api_key is not None and self.api_key_file is not None:
            raise BadRequest("cannot be combined with api_key", where="api_key_file")
        return self
