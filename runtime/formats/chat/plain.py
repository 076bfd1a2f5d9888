"""Formats in plain words, of no family in particular: `SYSTEM:`/`USER:`/`ASSISTANT:`, and the one of early
Claude models.
"""

from __future__ import annotations

from runtime.formats.chat.family import Family, Named
from runtime.formats.chat.template import ChatTemplate, turns

DEFAULT = ChatTemplate("default", None, turns(("SYSTEM:", "\n"), ("USER:", "\n"), ("ASSISTANT:", "\n")))
CLAUDE = ChatTemplate("claude", None, turns(("", ""), ("\n\nHuman: ", ""), ("\n\nAssistant:", "")))

FAMILY = Family(names=(Named("claude", r"orion-\d+b.*chat(?![a-z])"),))
