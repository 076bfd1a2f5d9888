"""What a notebook asks of an object that it shows, and one that is shown while it runs: in a widget that
follows it, beside the code that goes on. Knows pages, no states. ipywidgets is loaded, where it is installed,
when something is shown live.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from runtime.protocol.registry import MissingExtra, Registry
from sglang_dsl.views.diagrams import Graph, mermaid

MERMAID = "text/vnd.mermaid"
REPR_WAIT_S = 0.5
"""How long repr() waits for a program that runs: most have ended by then, and a debugger goes on."""
BETWEEN_S = 0.1
"""How long a page stands before it is shown anew, at least: each time it is sent whole."""
BYTES_PER_S = 2_000_000
BUSY = 0.2
"""How much is sent, and which part of its time is spent on pages, at most: a long one changes seldom."""

_WIDGETS: Registry[Any] = Registry(
    "live view",
    {"HTML": "ipywidgets:HTML", "Button": "ipywidgets:Button", "VBox": "ipywidgets:VBox"},
    extras=dict.fromkeys(("HTML", "Button", "VBox"), "notebook"),
)


class Page(NamedTuple):
    """What is shown of an object now. `graph`: its calls; `running`: whether more is to come."""

    html: str
    graph: Graph | None
    running: bool = False

    def bundle(self) -> dict[str, str]:
        """By MIME type; the plain text is the object's repr()."""
        return {"text/html": self.html} | ({} if self.graph is None else {MERMAID: mermaid(self.graph)})


class Displayed(ABC):
    """An object that notebooks show, and that may still run then. `_waits`: whether they may wait for it."""

    _waits: ClassVar[bool] = True

    @abstractmethod
    def _page(self, timeout_s: float | None) -> Page:
        """It as it stands, at the latest after so many seconds (None: at its end)."""

    @abstractmethod
    def cancel(self) -> None: ...

    def _repr_html_(self) -> str:
        """For a notebook that is executed without anybody before it, and for all that knows HTML only."""
        return self._page(None if self._waits else 0).html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The same and the calls as a diagram, once it has ended. Soon: a shell in a terminal asks too."""
        page = self._page(REPR_WAIT_S if self._waits else 0)
        return {} if page.running else page.bundle()

    def _ipython_display_(self) -> None:
        """Show it live, where it runs and somebody looks on; else what the others give."""
        if self._page(REPR_WAIT_S if self._waits else 0).running:
            if is_watched():
                Live(self).show()
                return
            if self._waits:
                self._page(None)
        raise NotImplementedError  # as IPython wants it


def is_watched() -> bool:
    """Whether this code runs in a notebook that somebody sits in front of, and there are widgets. A program
    that executes a notebook has no use for a page that changes; it says that it takes no input."""
    ipython = sys.modules.get("IPython")  # a kernel has loaded it
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell" or not shell.kernel._allow_stdin:
        return False
    try:
        _WIDGETS.load("HTML")
    except MissingExtra:
        return False
    return True


class Live:
    """A page in a cell's output, replaced while there is more to come, with a button that stops it. At its
    end the widget makes room for the page itself, which the notebook keeps."""

    def __init__(self, shown: Displayed) -> None:
        self._shown = shown
        self._html = _WIDGETS.load("HTML")()
        button = _WIDGETS.load("Button")(description="Stop", icon="stop")
        button.on_click(self._stop)
        self._box = _WIDGETS.load("VBox")([self._html, button])
        self._handle: Any = None

    def show(self) -> None:
        """Put it into the output of the cell that runs, and return."""
        from IPython import display  # whoever shows something in a notebook has it

        page = self._shown._page(0)
        self._html.value = page.html
        # What does not know widgets shows the page as it stands.
        data = {**self._box._repr_mimebundle_(), "text/plain": repr(self._shown), **page.bundle()}
        shows: Any = display.display
        self._handle = shows(data, raw=True, display_id=True)
        threading.Thread(target=self._follow, name="a live view", daemon=True).start()

    def _stop(self, button: Any) -> None:
        button.disabled = True
        self._shown.cancel()

    def _follow(self) -> None:
        page = self._shown._page(0)
        while page.running:
            began = time.monotonic()
            page = self._shown._page(0)
            if page.html != self._html.value:
                self._html.value = page.html
            spent = time.monotonic() - began
            time.sleep(max(BETWEEN_S, len(page.html) / BYTES_PER_S, spent / BUSY) if page.running else 0)
        self._handle.update({"text/plain": repr(self._shown), **page.bundle()}, raw=True)
        self._box.close()
