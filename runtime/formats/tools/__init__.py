"""Tool calls in models' text: parsed whole or as it comes, rendered, and constrained."""

from runtime.formats.tools.base import BaseFormatDetector
from runtime.formats.tools.parser import FunctionCallParser
from runtime.formats.tools.table import FORMATS
from runtime.formats.tools.types import StreamingParseResult, StructureInfo, Tool, ToolCallItem

__all__ = [
    "FORMATS",
    "BaseFormatDetector",
    "FunctionCallParser",
    "StreamingParseResult",
    "StructureInfo",
    "Tool",
    "ToolCallItem",
]
