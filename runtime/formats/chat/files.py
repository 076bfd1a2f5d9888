"""Chat templates that a user names: a built-in one, a .jinja file, a conversation .json file, or named texts.

It opens the file that it is told and no other; which checkpoint it is for, it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import CHAT_TEMPLATES
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import ModelLoadError

MAX_FILE_BYTES = 4 << 20
_SEPARATORS: Mapping[str, str] = {
    "ADD_COLON_SINGLE": "{name}: |{sep}",
    "ADD_COLON_TWO": "{name}: |{sep}",
    "ADD_COLON_SPACE_SINGLE": "{name}: |{sep}",
    "NO_COLON_SINGLE": "{name}|{sep}",
    "NO_COLON_TWO": "{name}|{sep}",
    "ADD_NEW_LINE_SINGLE": "{name}\n|{sep}",
    "CHATML": "{name}\n|{sep}\n",
    "LLAMA3": "<|start_header_id|>{name}<|end_header_id|>\n\n|<|eot_id|>",
}
"""sep_style -> what stands before and after a turn's text."""


def load_chat_template(
    spec: str | Path | Mapping[str, str],
    *,
    variables: Mapping[str, str] | None = None,
    hf_chat_template_name: str | None = None,
    check: bool = True,
) -> ChatTemplate | JinjaChatTemplate:
    """The template that `spec` says: a built-in name, the path of a .jinja or .json file, or texts by name.

    variables: the tokenizer's special tokens as templates call them (bos_token, eos_token).
    hf_chat_template_name: which of the named texts is the default one.
    check: parse Jinja texts now; else one that cannot be parsed is an error of the first rendering.
    Raises ModelLoadError that names the file or the name: unknown, missing, unreadable, or not of the shape;
    TemplateError for a Jinja text that cannot be parsed.
    """
    if isinstance(spec, Mapping):
        return _checked(named_templates(spec, variables, hf_chat_template_name), check)
    text = str(spec)
    if text in CHAT_TEMPLATES:
        return CHAT_TEMPLATES.load(text)
    path = Path(text).expanduser()
    if not path.is_file():
        raise ModelLoadError(
            f"{text!r} is neither a built-in template ({', '.join(CHAT_TEMPLATES)}) nor a file",
            where="chat_template",
            hint='the way out that fits many models is chat_template="chatml"',
        )
    if path.suffix == ".json":
        return _conversation(path)
    return _checked(JinjaChatTemplate({"default": _jinja_text(path)}, variables), check)


def named_templates(
    sources: Mapping[str, str], variables: Mapping[str, str] | None = None, name: str | None = None
) -> JinjaChatTemplate:
    """Texts by name; the one called `name` becomes the default."""
    if not sources or not all(isinstance(value, str) for value in sources.values()):
        raise ModelLoadError("must be a mapping of names to template texts", where="chat_template")
    if name is None:
        return JinjaChatTemplate(sources, variables)
    if name not in sources:
        raise ModelLoadError(
            f"there is no template called {name!r}; there are: {', '.join(sources)}",
            where="hf_chat_template_name",
        )
    # The one that was asked for is used with tools as well.
    return JinjaChatTemplate({"default": sources[name]}, variables)


def _checked(template: JinjaChatTemplate, check: bool) -> JinjaChatTemplate:
    if check:
        template.check()
    return template


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"has more than {MAX_FILE_BYTES} bytes", where=str(path))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"the chat template cannot be read: {error}", where=str(path)) from error


def _jinja_text(path: Path) -> str:
    r"""A template file: the newlines that end it are none of its text. A file that was written as one line
    with `\n` spelled as two characters outside of any expression means newlines there."""
    text = _read(path).strip("\r\n")
    if "\n" in text:
        return text
    return _spelled_newlines(text)


def _spelled_newlines(text: str) -> str:
    """`\\n` becomes a newline; within a Jinja string it meant one anyway."""
    return text.replace("\\n", "\n")


def _conversation(path: Path) -> ChatTemplate:
    """{"name", "system", "system_message", "user", "assistant", "sep_style", "sep", "sep2", "stop_str",
    "image_token", "audio_token"}: the names of the roles and what separates the turns.
    """
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"is not JSON: {error}", where=str(path)) from error
    if not isinstance(data, dict):
        raise _wrong(path, f"must be an object, got {type(data).__name__}")
    style = _string(path, data, "sep_style", "ADD_COLON_SINGLE").upper()
    if style not in _SEPARATORS:
        raise _wrong(path, f'"sep_style" {style!r} is unknown; known: {", ".join(_SEPARATORS)}')
    sep = _string(path, data, "sep", "<|im_end|>" if style == "CHATML" else "\n")
    ends = {"user": sep, "assistant": _string(path, data, "sep2", sep)}
    roles: dict[str, tuple[str, str]] = {}
    for role in ("user", "assistant"):
        name = _string(path, data, role, None)
        prefix, _, suffix = _SEPARATORS[style].partition("|{sep}")
        if style == "LLAMA3":
            prefix, suffix = "<|start_header_id|>{name}<|end_header_id|>\n\n", "<|eot_id|>"
            roles[role] = (prefix.replace("{name}", name), suffix)
        else:
            roles[role] = (prefix.replace("{name}", name), ends[role] + suffix)
    system = _string(path, data, "system", "")
    before, placed, after = system.partition("{system_message}")
    line = "\n" if style == "CHATML" else ""
    roles["system"] = (before, after + sep + line) if placed else (system + line, sep + line)
    default = data.get("system_message")
    if default is not None and not isinstance(default, str):
        raise _wrong(path, '"system_message" must be a text')
    return ChatTemplate(
        name=_string(path, data, "name", path.stem),
        default_system_prompt=default,
        role_prefix_and_suffix=roles,
        stop_str=_stops(path, data),
        image_token=_string(path, data, "image_token", "<image>"),
        audio_token=_string(path, data, "audio_token", "<audio>"),
    )


def _stops(path: Path, data: Mapping[str, Any]) -> tuple[str, ...]:
    match data.get("stop_str"):
        case None:
            return ()
        case str(text):
            return (text,)
        case [*texts] if all(isinstance(text, str) for text in texts):
            return tuple(texts)
        case _:
            raise _wrong(path, '"stop_str" must be a text or a list of texts')


def _string(path: Path, data: Mapping[str, Any], key: str, default: str | None) -> str:
    value = data.get(key, default)
    if value is None and key not in data:
        raise _wrong(path, f'"{key}" is missing')
    if not isinstance(value, str):
        raise _wrong(path, f'"{key}" must be a text, got {type(value).__name__}')
    return value


def _wrong(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"is not a conversation template: {what}", where=str(path))
