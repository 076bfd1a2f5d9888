"""Tool servers, which execute a model's tool calls. Knows no model and no request."""

from runtime.tools.demo import DemoToolServer
from runtime.tools.mcp_server import MCPToolServer
from runtime.tools.tool_server import ToolNamespace, ToolResult, ToolServer, ToolServerError, ToolSession

__all__ = [
    "DemoToolServer",
    "MCPToolServer",
    "ToolNamespace",
    "ToolResult",
    "ToolServer",
    "ToolServerError",
    "ToolSession",
]
