"""DemoToolServer: tools that come with the runtime: Python, and a browser if there are documents."""

from __future__ import annotations

from runtime.tools.browser_tool import BrowserTool
from runtime.tools.documents import documents_of
from runtime.tools.python_tool import PythonLimits, PythonTool
from runtime.tools.tool_server import ToolServer


class DemoToolServer(ToolServer):
    """documents: for the browser, a folder or a search URL with {query}; None: no browser. timeout_s: of each
    call. Raises BadRequest."""

    def __init__(self, documents: str | None = None, timeout_s: float = 30.0) -> None:
        self._tools: dict[str, PythonTool | BrowserTool] = {
            "python": PythonTool(PythonLimits(seconds=timeout_s))
        }
        if documents is not None:
            self._tools["browser"] = BrowserTool(documents_of(documents), timeout_s)
