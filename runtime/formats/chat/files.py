"""Chat templates in files: a checkpoint's own Jinja texts, and the template that a user names: registered, a
.jinja or .json file, Jinja text, or Jinja texts by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.registry import CHAT_TEMPLATES
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import ModelLoadError

MAX_FILE_BYTES = 4 << 20
_SHOWN = 200
_SEPARATORS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("ADD_COLON_SINGLE", "ADD_COLON_TWO", "ADD_COLON_SPACE_SINGLE"), ("{name}: ", "{sep}")),
    **dict.fromkeys(("NO_COLON_SINGLE", "NO_COLON_TWO"), ("{name}", "{sep}")),
    "ADD_NEW_LINE_SINGLE": ("{name}\n", "{sep}"),
    "CHATML": ("{name}\n", "{sep}\n"),
    "LLAMA3": ("<|start_header_id|>{name}<|end_header_id|>\n\n", "<|eot_id|>"),
}
"""sep_style -> the texts before and after a turn's text."""


def load_chat_template(
    spec: str | Path | Mapping[str, str],
    *,
    variables: Mapping[str, str] | None = None,
    hf_chat_template_name: str | None = None,
    check: bool = True,
) -> ChatTemplate | JinjaChatTemplate:
    """The template for `spec`: a registered name, the path of a .jinja or .json file, Jinja text, or Jinja
    texts by name. A .json file is a conversation template, or has Jinja text (or texts by name) under
    "chat_template", as processors store it.

    variables: the tokenizer's special tokens by their names in templates (bos_token, eos_token).
    hf_chat_template_name: which of the named texts to use; only for texts by name. check: parse Jinja texts
    now; otherwise an invalid one fails at the first rendering.

    Raises ModelLoadError naming the file or name if it is unknown, missing, unreadable, or malformed;
    TemplateError for an invalid Jinja text.
    """
    template = _loaded(spec, variables, hf_chat_template_name)
    if check and isinstance(template, JinjaChatTemplate):
        template.check()
    return template


def _loaded(
    spec: Any, variables: Mapping[str, str] | None, name: str | None
) -> ChatTemplate | JinjaChatTemplate:
    if isinstance(spec, Mapping):
        return named_templates(spec, variables, name)
    if not isinstance(spec, str | Path):
        what = f"is a name, a path, Jinja text or a mapping of names to texts, got {type(spec).__name__}"
        raise ModelLoadError(what, where="chat_template")
    text = str(spec)
    if text in CHAT_TEMPLATES:
        refuse_name(name, f"the registered template {text!r}")
        return CHAT_TEMPLATES.load(text)
    path = Path(text).expanduser() if _exists(text) else None
    if path is None or not path.is_file():
        if not looks_like_jinja(text):
            raise _unknown(text)
        sources = {"default": text}
    elif path.suffix.lower() == ".json":
        data = _object(path)
        if "chat_template" not in data:
            refuse_name(name, f"the conversation file {text}")
            return _conversation(path, data)
        sources = _sources(data, path)
        if not sources:
            raise ModelLoadError('"chat_template" is empty', where=str(path))
    else:
        sources = {"default": _jinja_text(path)}
    return named_templates(sources, variables, name)


def _unknown(text: str) -> ModelLoadError:
    shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
    near = CHAT_TEMPLATES.near(text)
    first = f"did you mean {near!r}? " if near else ""
    hint = f'{first}the way out that fits many models is chat_template="chatml"'
    if _exists(text):
        what = f"{shown} is a directory or no plain file; give the .jinja or .json file itself"
    elif Path(text).suffix.lower() in (".jinja", ".json", ".txt"):
        what = f"there is no file {shown}"
    else:
        known = ", ".join(CHAT_TEMPLATES)
        what = f"{shown} is neither a registered template ({known}) nor a file nor Jinja text"
    return ModelLoadError(what, where="chat_template", hint=hint)


def looks_like_jinja(text: str) -> bool:
    """Whether `text` is the text of a template rather than a name or a path."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def refuse_name(name: str | None, what: str) -> None:
    """Raises ModelLoadError if one of several named texts was asked for, but there are none."""
    if name is not None:
        raise ModelLoadError(
            f"{name!r} was asked for, and {what} has no templates by name", where="hf_chat_template_name"
        )


def read_template_sources(path: Path) -> dict[str, str]:
    """Name -> Jinja text, from a .json file with {"chat_template": text, or texts by name}; {} if it has
    none. Raises ModelLoadError."""
    return _sources(_object(path), path)


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source of the checkpoint's templates; {} if it has none.

    Reads chat_template.jinja and additional_chat_templates/*.jinja, else "chat_template" of
    tokenizer_config.json (text, a mapping, or a list of named texts). Raises ModelLoadError for anything else
    there.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": _read(file), **{path.stem: _read(path) for path in more}}
    return _sources(tokenizer_config, folder / "tokenizer_config.json")


class _Named(msgspec.Struct):
    name: str
    template: str


def _sources(data: Mapping[str, Any], path: Path) -> dict[str, str]:
    try:
        read = msgspec.convert(data.get("chat_template"), str | dict[str, str] | list[_Named] | None)
    except msgspec.ValidationError:
        read = []
    match read:
        case None | "":
            return {}
        case str():
            return {"default": read}
        case dict() if read:
            return read
        case [_, *_]:
            return {one.name: one.template for one in read if isinstance(one, _Named)}
    raise ModelLoadError(
        '"chat_template" is neither a text nor texts by name, nor a list of named texts', where=str(path)
    )


def _exists(text: str) -> bool:
    """False also for a text that cannot be a path: too long, with a NUL, or an unknown user's home."""
    try:
        return bool(text.strip()) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def named_templates(
    sources: Mapping[str, str], variables: Mapping[str, str] | None = None, name: str | None = None
) -> JinjaChatTemplate:
    """Texts by name; the one called `name` becomes the default."""
    if not sources or not all(isinstance(value, str) for value in sources.values()):
        raise ModelLoadError("must be a mapping of names to template texts", where="chat_template")
    for key, value in sources.items():
        if not value.strip():
            raise ModelLoadError(f"the template called {key!r} is empty", where="chat_template")
    if name is None:
        return JinjaChatTemplate(sources, variables)
    if name not in sources:
        raise ModelLoadError(
            f"there is no template called {name!r}; there are: {', '.join(sources)}",
            where="hf_chat_template_name",
        )
    # The requested one is also used for requests with tools.
    return JinjaChatTemplate({"default": sources[name]}, variables)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"has more than {MAX_FILE_BYTES} bytes", where=str(path))
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelLoadError("the chat template is not UTF-8 text", where=str(path)) from error
    except OSError as error:
        raise ModelLoadError(f"the chat template cannot be read: {error}", where=str(path)) from error


def _jinja_text(path: Path) -> str:
    r"""A template file without the newlines at its end. In a file written as one line, `\n` as two characters
    means a newline, within a Jinja string, too."""
    text = _read(path).strip("\r\n")
    if not looks_like_jinja(text):
        raise ModelLoadError(
            "is empty" if not text.strip() else "has no Jinja in it: every prompt would be the same text",
            where=str(path),
            hint="a template loops over `messages` and prints their content",
        )
    return text if "\n" in text else text.replace("\\n", "\n")


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"is not JSON: {error}", where=str(path)) from error
    if not isinstance(data, dict):
        raise _wrong(path, f"must be an object, got {type(data).__name__}")
    return data


class _Conversation(msgspec.Struct):
    """A conversation template as it is written in a file: names of the roles, and separators of turns."""

    user: str
    assistant: str
    name: str | None = None
    system: str = ""
    system_message: str | None = None
    sep_style: str = "ADD_COLON_SINGLE"
    sep: str | None = None
    sep2: str | None = None
    stop_str: str | tuple[str, ...] | None = None
    image_token: str = "<image>"
    audio_token: str = "<audio>"


def _conversation(path: Path, data: Mapping[str, Any]) -> ChatTemplate:
    try:
        read = msgspec.convert(data, _Conversation)
    except msgspec.ValidationError as error:
        raise _wrong(path, str(error)) from error
    style = read.sep_style.upper()
    if style not in _SEPARATORS:
        raise _wrong(path, f'"sep_style" {style!r} is unknown; known: {", ".join(_SEPARATORS)}')
    before, after = _SEPARATORS[style]
    default_sep = "<|im_end|>" if style == "CHATML" else "\n"
    sep = default_sep if read.sep is None else read.sep
    sep2 = sep if read.sep2 is None else read.sep2
    opening, placed, closing = read.system.partition("{system_message}")
    line = "\n" if style == "CHATML" else ""
    stops = read.stop_str or ()
    return ChatTemplate(
        name=read.name or path.stem,
        default_system_prompt=read.system_message,
        role_prefix_and_suffix={
            "user": (before.format(name=read.user), after.format(sep=sep)),
            "assistant": (before.format(name=read.assistant), after.format(sep=sep2)),
            "system": (opening, closing + sep + line) if placed else (read.system + line, sep + line),
        },
        stop_str=(stops,) if isinstance(stops, str) else stops,
        image_token=read.image_token,
        audio_token=read.audio_token,
    )


def _wrong(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"is not a conversation template: {what}",
        where=str(path),
        hint='one has "user" and "assistant", the names of the roles, and may have "system", "sep_style", '
        '"sep" and "stop_str"; a file with Jinja text has it under "chat_template"',
    )
