"""DemoToolServer: tools that come with the runtime: Python, and a browser if there are documents."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from runtime.tools.browser_tool import BrowserTool
from runtime.tools.documents import documents_of
from runtime.tools.python_tool import PythonLimits, PythonTool
from runtime.tools.tool_server import ToolNamespace, ToolServer, ToolServerError, ToolSession


class DemoToolServer(ToolServer):
    """documents: for the browser, a folder or a search URL with {query}; None: no browser. timeout_s: of each
    call. Raises BadRequest."""

    def __init__(self, documents: str | None = None, timeout_s: float = 30.0) -> None:
        tools: list[PythonTool | BrowserTool] = [PythonTool(PythonLimits(seconds=timeout_s))]
        if documents is not None:
            tools.append(BrowserTool(documents_of(documents), timeout_s))
        self._tools = {tool.namespace.name: tool for tool in tools}

    def names(self) -> list[str]:
        return list(self._tools)

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def get_tool_description(self, name: str) -> ToolNamespace | None:
        tool = self._tools.get(name)
        return None if tool is None else tool.namespace

    def get_tool_session(self, name: str) -> AbstractAsyncContextManager[ToolSession]:
        tool = self._tools.get(name)
        if tool is None:
            raise ToolServerError(f"there is no tool {name!r}; known: {', '.join(self._tools)}")
        return tool.session()
