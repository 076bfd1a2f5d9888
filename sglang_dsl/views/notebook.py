"""How notebooks show objects: as HTML with a diagram, and live in a widget (ipywidgets)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from sglang_dsl.views.diagrams import Graph, mermaid

MERMAID = "text/vnd.mermaid"
REPR_WAIT_S = 0.5
"""How long repr() waits for a running program."""
BETWEEN_S = 0.1
"""The shortest time between two versions of a page, as each is sent whole."""
BYTES_PER_S = 2_000_000
BUSY = 0.2
"""The most bytes that are sent, and the largest part of the time that is spent on pages."""


class Page(NamedTuple):
    """An object as it is shown now. `graph`: its calls; `running`: whether it will change."""

    html: str
    graph: Graph | None
    running: bool = False

    def bundle(self) -> dict[str, str]:
        """By MIME type; IPython adds the object's repr() as plain text."""
        return {"text/html": self.html} | ({} if self.graph is None else {MERMAID: mermaid(self.graph)})


class Displayed(ABC):
    """An object that notebooks show, and that may still run. `_waits`: whether they may wait for its end."""

    _waits: ClassVar[bool] = True

    @abstractmethod
    def _page(self, timeout_s: float | None) -> Page:
        """Its page, after waiting at most this long for its end. None: until then."""

    @abstractmethod
    def cancel(self) -> None: ...

    def _repr_html_(self) -> str:
        """For notebooks that a program executes, and for frontends that know only HTML."""
        return self._page(None if self._waits else 0).html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """HTML and a diagram, once it has ended; waits briefly, as terminals call this, too."""
        page = self._page(REPR_WAIT_S if self._waits else 0)
        return {} if page.running else page.bundle()

    def _ipython_display_(self) -> None:
        """Show it live if it runs in a notebook with a user; else leave it to the methods above."""
        if self._page(REPR_WAIT_S if self._waits else 0).running:
            if is_watched():
                Live(self).show()
                return
            if self._waits:
                self._page(None)
        raise NotImplementedError  # IPython then calls the others


def is_watched() -> bool:
    """Whether this is a notebook with widgets and a user, who can give input."""
    ipython = sys.modules.get("IPython")  # loaded by every kernel
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell" or not shell.kernel._allow_stdin:
        return False
    return importlib.util.find_spec("ipywidgets") is not None


class Live:
    """The page of a running object in a widget with a stop button; at the end it replaces the widget."""

    def __init__(self, target: Displayed) -> None:
        self._target = target
        widgets: Any = importlib.import_module("ipywidgets")
        self._html = widgets.HTML()
        button = widgets.Button(description="Stop", icon="stop")
        button.on_click(self._stop)
        self._box = widgets.VBox([self._html, button])
        self._handle: Any = None

    def show(self) -> None:
        """Put the widget into the output of the running cell, and return."""
        from IPython import display

        page = self._target._page(0)
        self._html.value = page.html
        # Frontends without widgets show the page as it is now.
        data = {**self._box._repr_mimebundle_(), "text/plain": repr(self._target), **page.bundle()}
        first: Any = display.display
        self._handle = first(data, raw=True, display_id=True)
        threading.Thread(target=self._follow, name="a live view", daemon=True).start()

    def _stop(self, button: Any) -> None:
        button.disabled = True
        self._target.cancel()

    def _follow(self) -> None:
        page = self._target._page(0)
        while page.running:
            began = time.monotonic()
            page = self._target._page(0)
            if page.html != self._html.value:
                self._html.value = page.html
            spent = time.monotonic() - began
            time.sleep(max(BETWEEN_S, len(page.html) / BYTES_PER_S, spent / BUSY) if page.running else 0)
        self._handle.update({"text/plain": repr(self._target), **page.bundle()}, raw=True)
        self._box.close()
