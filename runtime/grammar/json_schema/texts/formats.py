"""String formats: what `format` asserts, and regular expressions for what is generated.

matches() follows each format's standard. The expressions match whole strings, in the syntax that Python and
Rust share; if a format is not regular, or would be huge, its expression is narrower, as noted beside it.
Formats that are not listed are annotations.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

import idna

from runtime.grammar.json_schema.texts.regex_format import is_regex

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
# Leap seconds only where the zone is UTC itself; matches() knows them in other zones too (RFC 3339, 5.7).
_TIME = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
_CLOCK = r"(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
_DURATION = rf"P(?:(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?){_CLOCK}?|{_CLOCK}|[0-9]+W)"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [
        rf"(?:{_H16}:){{6}}{_LS32}",
        rf"::(?:{_H16}:){{5}}{_LS32}",
        rf"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
        rf"(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}",
        rf"(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}",
        rf"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
        rf"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
        rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
) + ")"  # fmt: skip

# Letters, digits and inner hyphens, no two of them in third and fourth place: A-labels (xn--), whose rules
# are those of idn-hostname, are left to matches().
_A, _L = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = rf"(?:{_A}(?:{_L}?{_A})?|{_A}{_L}(?:{_A}|-){_A}|{_A}{_L}(?:{_A}{_L}|-{_A}){_L}{{0,58}}{_A})"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"

_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_WIDE = r"\x{80}-\x{D7FF}\x{E000}-\x{10FFFF}"


def _email(wide: str) -> str:
    """RFC 5321, or RFC 6531 with the further characters of `wide`."""
    char, inner = rf"[a-zA-Z0-9{wide}]", rf"[a-zA-Z0-9\-{wide}]"
    atext = rf"[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~\-{wide}]"
    label = rf"{char}(?:{inner}{{0,61}}{char})?"
    return rf"(?:{atext}+(?:\.{atext}+)*|{_QUOTED})@(?:{label}(?:\.{label})*|\[{_IPV4}\]|\[IPv6:{_IPV6}\])"


_UCS = (
    r"\x{A0}-\x{D7FF}\x{F900}-\x{FDCF}\x{FDF0}-\x{FFEF}"
    + "".join(rf"\x{{{plane}0000}}-\x{{{plane}FFFD}}" for plane in "123456789ABCD")
    + r"\x{E1000}-\x{EFFFD}"
)
_PRIVATE = r"\x{E000}-\x{F8FF}\x{F0000}-\x{FFFFD}\x{100000}-\x{10FFFD}"


def _uri(wide: str, wide_query: str, *, reference: bool) -> str:
    """RFC 3986, or RFC 3987 with the further characters of `wide`."""
    plain, escape = rf"a-zA-Z0-9\-._~!$&'()*+,;={wide}", r"%[0-9a-fA-F]{2}"
    pchar = rf"(?:[{plain}:@]|{escape})"
    ip = rf"\[(?:{_IPV6}|[vV][0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+)\]"
    authority = rf"(?:(?:[{plain}:]|{escape})*@)?(?:{ip}|(?:[{plain}]|{escape})*)(?::[0-9]*)?"
    tail = rf"(?:/{pchar}*)*"
    rooted = rf"//{authority}{tail}|/(?:{pchar}+{tail})?"
    query = rf"(?:\?(?:[{plain}:@/?{wide_query}]|{escape})*)?(?:\#(?:[{plain}:@/?]|{escape})*)?"
    whole = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{rooted}|{pchar}+{tail}|){query}"
    if not reference:
        return whole
    return rf"(?:{whole}|(?:{rooted}|(?:[{plain}@]|{escape})+{tail}|){query})"


_VARCHAR = r"(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})"
_VARSPEC = rf"{_VARCHAR}(?:\.?{_VARCHAR})*(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE_TEXT = r"[!#$&-;=?-\[\]_a-z~" + _UCS + _PRIVATE + r"]|%[0-9a-fA-F]{2}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _email(""),
    "idn-email": _email(_WIDE),
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _uri("", "", reference=False),
    "uri-reference": _uri("", "", reference=True),
    "iri": _uri(_UCS, _PRIVATE, reference=False),
    "iri-reference": _uri(_UCS, _PRIVATE, reference=True),
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri-template": rf"(?:{_TEMPLATE_TEXT}|\{{[+#./;?&=,!@|]?{_VARSPEC}(?:,{_VARSPEC})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{_POINTER})",
}
MAX_LENGTH = {"hostname": 253}
CHECKED = ("regex", "idn-hostname")
"""Formats without an expression: their strings are validated as they close."""

_LEAP = re.compile(r"(\d\d):(\d\d):60(?:\.\d+)?([+-])(\d\d):(\d\d)", re.ASCII)
_QUOTED_WIDE = re.compile(r'"(?:[ !#-\[\]-~\u0080-\U0010FFFF]|\\[ -~])*"@')
_DOTS = re.compile("[.\u3002\uff0e\uff61]")


@lru_cache(maxsize=64)
def _compiled(name: str) -> re.Pattern[str]:
    python = re.sub(r"\\x\{([0-9A-F]+)\}", lambda point: f"\\U{int(point[1], 16):08X}", FORMATS[name])
    return re.compile(python)


def matches(name: str, text: str) -> bool:
    """Whether `text` has the format `name`, one of FORMATS or CHECKED."""
    if name in CHECKED:
        return _WIDER[name](text)
    if len(text) > MAX_LENGTH.get(name, len(text)):
        return False
    return _compiled(name).fullmatch(text) is not None or (name in _WIDER and _WIDER[name](text))


def _leap_time(text: str) -> bool:
    """A second 60 that is 23:59:60 in UTC."""
    parts = _LEAP.fullmatch(text)
    if parts is None:
        return False
    hour, minute, ahead_hours, ahead_minutes = (int(parts[group]) for group in (1, 2, 4, 5))
    if hour > 23 or minute > 59 or ahead_hours > 23 or ahead_minutes > 59:
        return False
    ahead = ahead_hours * 60 + ahead_minutes
    utc = hour * 60 + minute - (ahead if parts[3] == "+" else -ahead)
    return utc % 1440 == 1439


def _leap_date_time(text: str) -> bool:
    return matches("date", text[:10]) and text[10:11] in ("t", "T") and _leap_time(text[11:])


def _label(label: str, *, ascii_only: bool) -> bool:
    """A label of RFC 5890: letters, digits and hyphens, an A-label, or a U-label."""
    if label.isascii() and label[:4].lower() != "xn--":
        return len(label) <= 63 and _compiled("hostname").fullmatch(label) is not None
    try:
        if label.isascii():
            return idna.alabel(idna.ulabel(label)).decode() == label.lower()
        return not ascii_only and bool(idna.alabel(label))
    except (idna.IDNAError, UnicodeError):
        return False


def _one_direction(labels: list[str]) -> bool:
    """The Bidi rule (RFC 5893): one label from right to left binds all."""
    wide = [idna.ulabel(label) if label[:4].lower() == "xn--" else label for label in labels]
    if not any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for label in wide for char in label):
        return True
    try:
        return all(idna.check_bidi(label, check_ltr=True) for label in wide)
    except idna.IDNAError:
        return False


def _hostname(text: str) -> bool:
    """RFC 1123 with A-labels (RFC 5890)."""
    labels = text.split(".")
    valid = len(text) <= 253 and all(_label(label, ascii_only=True) for label in labels)
    return valid and _one_direction(labels)


def _idn_hostname(text: str) -> bool:
    """RFC 5890: labels of any script; the other full stops of RFC 3490 count as dots."""
    labels = _DOTS.split(text)
    if not all(_label(label, ascii_only=False) for label in labels) or not _one_direction(labels):
        return False
    sizes = [len(label) if label.isascii() else len(idna.alabel(label)) for label in labels]
    return sum(sizes) + len(sizes) - 1 <= 253


def _idn_email(text: str) -> bool:
    """A quoted local part that is not ASCII (RFC 6531)."""
    quoted = _QUOTED_WIDE.match(text)
    return quoted is not None and matches("idn-email", "a@" + text[quoted.end() :])


_WIDER: dict[str, Callable[[str], bool]] = {
    "time": _leap_time, "date-time": _leap_date_time, "hostname": _hostname, "idn-hostname": _idn_hostname,
    "idn-email": _idn_email, "regex": is_regex,
}  # fmt: skip
"""What the expression of a format leaves out."""
