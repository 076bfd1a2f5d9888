"""Runtime: the bundled runtime as a server in its own processes, `python -m runtime serve`, used over HTTP.

with Runtime("pocket") as runtime:
    set_default_backend(runtime)
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import subprocess
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.protocol.registry import Registry
from sglang_dsl.backends.endpoint import RuntimeEndpoint
from sglang_dsl.concurrency.loop import background, running
from sglang_dsl.console.server_options import end_process, runtime_options, server_command
from sglang_dsl.errors import BackendError

STOP_S = 20.0
"""Seconds a server has to finish its requests and exit before it is killed."""
CLOSE_S = 5.0
LOG_TAIL = 30
_POLL_S = 0.05

_TOKENIZERS: Registry[Any] = Registry(
    "tokenizer",
    {"auto": "transformers:AutoTokenizer", "config": "transformers:AutoConfig", "bundled": "runtime:BUNDLED"},
    extras=dict.fromkeys(("auto", "config", "bundled"), "runtime"),
)


def get_tokenizer(model_path: str, **kwargs: Any) -> Any:
    """A tokenizer loaded by transformers. `model_path`: a folder, a bundled checkpoint, or a model's name."""
    folder = _TOKENIZERS.load("bundled").get(str(model_path), model_path)
    return _TOKENIZERS.load("auto").from_pretrained(folder, **kwargs)


def get_config(
    model: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    model_override_args: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A configuration loaded by transformers. `model`: a folder, a bundled checkpoint, or a model's name.
    `model_override_args` replace values in it."""
    folder = _TOKENIZERS.load("bundled").get(str(model), model)
    config = _TOKENIZERS.load("config").from_pretrained(
        folder, trust_remote_code=trust_remote_code, revision=revision, **kwargs
    )
    config.update(dict(model_override_args or {}))
    return config


class _Stop:
    """Ends a server's process, once. It holds no Runtime, so that one can be garbage collected."""

    def __init__(self, process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
        self._process, self._folder = process, folder
        self.called = False

    def __call__(self) -> None:
        if self.called:
            return
        self.called = True
        end_process(self._process, STOP_S)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._folder.cleanup()
        atexit.unregister(self)


class Runtime:
    """Starts a server for this program and stops it at the end. A Runtime can be passed wherever a backend is
    expected.

    The constructor returns when the server is ready. If it is not within `launch_timeout` seconds, it raises
    BackendError with the end of the server's log. The server ends with shutdown(), with this process, and
    when neither the Runtime nor its endpoint can be reached any more.

    model_path  a checkpoint's directory, or the name of a bundled checkpoint
    port        0: any free port
    api_key     the key that the server requires; passed to it in a file that only this user can read
    options     any option of `python -m runtime serve` (see its --help), with underscores, or the sglang
                option with the same meaning. Raises Unsupported

    It has these attributes:

    endpoint  the RuntimeEndpoint that programs run on
    url       the server's address
    """

    def __init__(
        self,
        model_path: str = "pocket",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        options = runtime_options(options, str(model_path))
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-dsl-", ignore_cleanup_errors=True)
        self._endpoint: RuntimeEndpoint | None = None
        folder = Path(self._folder.name)
        ready, self._log = folder / "ready.json", folder / "server.log"
        config = {
            "model": str(model_path), "host": host, "port": port, "log_level": log_level,
            "ready_file": str(ready), "end_with_stdin": True, **options,
        }  # fmt: skip
        if api_key is not None:
            config["api_key"] = api_key
        (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        command, env = server_command("--config", str(folder / "config.yaml"))
        with self._log.open("wb") as log:
            # However this process ends, the server's stdin is closed then, and it exits.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=env
            )
        self._stop = _Stop(self._process, self._folder)
        atexit.register(self._stop)
        try:
            self.url: str = self._wait(ready, launch_timeout)
        except BaseException:
            self.shutdown()
            raise
        self.endpoint = self._endpoint = RuntimeEndpoint(self.url, api_key, timeout=timeout, lazy=True)
        # Programs may hold the endpoint alone. The finalizer can run in code that holds any lock, so that it
        # must not wait: a thread does.
        weakref.finalize(self.endpoint, _thread.start_new_thread, self._stop, ()).atexit = False

    @property
    def pid(self) -> int:
        """The process id of the server's first process."""
        return self._process.pid

    def shutdown(self) -> None:
        """Stop the server. May be called again. Running requests have STOP_S seconds to finish."""
        if not self._stop.called:
            loop = running()
            # Connections of the caller's own event loops are closed with those loops.
            if self._endpoint is not None and loop is not None and loop.alive and not loop.here:
                with contextlib.suppress(TimeoutError):
                    loop.run(self._endpoint.aclose(), CLOSE_S)
            self._stop()

    def log(self) -> str:
        """The last lines of the server's log."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL:])

    # -- direct use, without programs ------------------------------------------------------------------------

    def _post(self, path: str, body: dict[str, Any]) -> str:
        return json.dumps(background().run(self.endpoint.request(path, body)))

    def generate(
        self, prompt: str | Sequence[str], sampling_params: Mapping[str, Any] | None = None, **fields: Any
    ) -> str:
        """The answer of POST /generate as JSON text: an object, or a list for several prompts. `fields`:
        other fields of the request."""
        return self._post(
            "/generate", {"text": prompt, "sampling_params": dict(sampling_params or {}), **fields}
        )

    async def async_generate(
        self, prompt: str, sampling_params: Mapping[str, Any] | None = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Pieces of the text as they are generated, on the caller's event loop."""
        body = {"text": prompt, "sampling_params": dict(sampling_params or {}), **fields}
        async with aclosing(self.endpoint.pieces(body)) as pieces:  # type: ignore[type-var]
            async for delta in pieces:
                if delta.finished:
                    self.endpoint.token_usage.count(delta.meta)
                if delta.text:
                    yield delta.text

    add_request = async_generate

    def encode(self, prompt: str | Sequence[str]) -> str:
        """The answer of POST /encode as JSON text."""
        return self._post("/encode", {"text": prompt})

    def cache_prefix(self, prefix: str) -> None:
        """Compute the start of a prompt now, so that later prompts find it in the cache."""
        self.generate(prefix, {"max_new_tokens": 0})

    def flush_cache(self) -> bool:
        """Drop the server's cached prefixes, and wait for it. Returns False if they are in use."""
        return self.endpoint.flush_cache()

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded by transformers."""
        return get_tokenizer(self.endpoint.model_info["model_path"])

    async def get_server_info(self) -> dict[str, Any]:
        """What the server reports about itself."""
        return await self.endpoint.info()

    def start_profile(self) -> None:
        """Start to write a profile of the server's steps. Waits for the server's answer."""
        self._post("/start_profile", {})

    def stop_profile(self) -> None:
        """Finish the profile that start_profile() began."""
        self._post("/stop_profile", {})

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"Runtime({getattr(self, 'url', 'not ready')!r})"

    def _wait(self, ready: Path, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise BackendError(
                    f"the server ended with code {code} before it was ready:\n{self.log()}", backend="runtime"
                )
            with contextlib.suppress(OSError, ValueError):
                return str(json.loads(ready.read_text(encoding="utf-8"))["url"])
            time.sleep(_POLL_S)
        raise BackendError(
            f"the server was not ready within {timeout:g} s:\n{self.log()}",
            backend="runtime",
            hint="allow more time with launch_timeout=",
        )
