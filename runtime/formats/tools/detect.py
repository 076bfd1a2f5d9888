"""The former place of tool_format_of (runtime.formats.tools.table), for one release."""

from runtime.formats.tools.table import tool_format_of as tool_format_of
