"""The former place of the kinds of reasoning and of the splitter, for one release."""

from runtime.formats.reasoning.marks import ReasoningType as ReasoningType
from runtime.formats.reasoning.marks import reasoning_type as reasoning_type
from runtime.formats.reasoning.splitter import splitter_by as splitter_by
