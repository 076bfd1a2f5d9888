"""Common regular expressions, as text.

Numbers allow trailing whitespace. A model that wants to continue ("24 hours") can then end the number with a
space instead of being forced to add digits. dtype=int and dtype=float stop at that space, so the value has
none.
"""

from __future__ import annotations

from typing import Final

REGEX_INT: Final = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT: Final = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL: Final = r"(True|False)"
# A JSON string, quotes and escapes included: json.loads reads it.
REGEX_STR: Final = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
REGEX_WORD: Final = r"[A-Za-z]+"
REGEX_DATE: Final = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
REGEX_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]"
REGEX_EMAIL: Final = r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+"
REGEX_IPV4: Final = (
    r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
)
