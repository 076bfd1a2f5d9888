"""What the backends for other people's APIs share: which sampling words they take, how a constraint becomes
structured output, how their HTTP errors become the language's, and how much was used. Knows no API's wire
format.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from runtime.protocol.constraint import JSON_WORDS, Constraint
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import Call, ChoiceCall, ChoiceScore, ChoiceScores, Prompt
from sglang_dsl.backends.common.transport import HttpFault
from sglang_dsl.errors import BackendError, ProgramError, Unsupported
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

ANY_JSON = "$$ANY$$"
"""The json_schema that stands for any JSON value."""
RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504, 529})


def spoken(params: SamplingParams, takes: Mapping[str, str], backend: str) -> dict[str, Any]:
    """The sampling words that differ from their defaults, under the names of `takes` (ours -> the API's).
    Raises Unsupported for those that are not in it."""
    said: dict[str, Any] = msgspec.to_builtins(params)
    said.pop("max_new_tokens", None)
    if unknown := sorted(set(said) - set(takes)):
        raise Unsupported(
            f"{backend} does not take {', '.join(unknown)}",
            backend=backend,
            hint=f"it supports {', '.join(sorted(takes))}; leave the others out for this backend",
        )
    return {takes[word]: value for word, value in said.items()}


# -- constraints as structured output ------------------------------------------------------------------------

# What the language's own dtypes mean, for APIs that know JSON schemas and no regular expressions.
_BY_PATTERN: dict[str, dict[str, Any]] = {
    REGEX_INT: {"type": "integer"},
    REGEX_FLOAT: {"type": "number"},
    REGEX_BOOL: {"type": "string", "enum": ["True", "False"]},
    REGEX_STR: {"type": "string"},
}
_FIELD = "value"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A constraint as the JSON schema of an object, the only root that most APIs take.

    schema   what is asked for
    wrapped  whether the value stands in the object's field "value", because it is no object itself
    plain    whether that value is a string whose text, without quotes, is what was wanted
    strict   whether every object of the schema names all its properties as required and allows no others,
             which is what "strict" structured output takes
    """

    schema: dict[str, Any]
    wrapped: bool
    plain: bool
    strict: bool

    def read(self, text: str, constraint: Constraint) -> str:
        """The text wanted, from the reply. Raises BackendError where the reply is not what was asked for."""
        try:
            value = json.loads(text)
            if self.wrapped:
                value = value[_FIELD]
        except (ValueError, TypeError, KeyError) as error:
            raise broken_promise(constraint, text) from error
        if not self.wrapped:
            wanted = text
        elif self.plain:
            wanted = str(value)
        else:
            wanted = json.dumps(value, ensure_ascii=False)
        if not holds(constraint, wanted):
            raise broken_promise(constraint, text)
        return wanted


def json_form(constraint: Constraint) -> JsonForm | None:
    """None for what no JSON schema says: other regexes, grammars, structural tags."""
    match constraint.kind:
        case "json_schema":
            schema: Any = {} if constraint.spec == ANY_JSON else json.loads(constraint.spec)
            if not isinstance(schema, dict):
                return None if schema is False else _form({}, wrapped=True, plain=False)
            return _form(schema, wrapped=schema.get("type") != "object", plain=False)
        case "choices":
            return _form({"type": "string", "enum": json.loads(constraint.spec)}, wrapped=True, plain=True)
        case "regex" if constraint.spec in _BY_PATTERN:
            plain = constraint.spec == REGEX_BOOL
            return _form(_BY_PATTERN[constraint.spec], wrapped=True, plain=plain)
        case _:
            return None


def _form(schema: dict[str, Any], *, wrapped: bool, plain: bool) -> JsonForm:
    if wrapped:
        # References into the schema ("#/$defs/...") keep their meaning: definitions move to the new root.
        own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        held: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        schema = {
            "type": "object",
            "properties": {_FIELD: own},
            "required": [_FIELD],
            "additionalProperties": False,
            **held,
        }
    return JsonForm(schema, wrapped, plain, is_strict(schema))


def is_strict(schema: Any) -> bool:
    """Whether every object in it requires all the properties it names and allows no others."""
    if isinstance(schema, list):
        return all(map(is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is not False or not isinstance(properties, dict):
            return False
        if set(schema.get("required", ())) != set(properties):
            return False
    return all(map(is_strict, schema.values()))


def holds(constraint: Constraint, text: str) -> bool:
    """Whether `text` is what the constraint wants, as far as can be said without the runtime: schemas are
    looked at with jsonschema where it is installed."""
    match constraint.kind:
        case "regex":
            return re.fullmatch(constraint.spec, text) is not None
        case "choices":
            return text in json.loads(constraint.spec)
        case "json_schema":
            return _fits(constraint.spec, text)
        case _:
            return True


def can_check_schemas() -> bool:
    """Whether jsonschema is installed."""
    return importlib.util.find_spec("jsonschema") is not None


def _fits(spec: str, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if spec == ANY_JSON or not can_check_schemas():
        return True
    schema = json.loads(spec)
    validators: Any = importlib.import_module("jsonschema.validators")
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


def broken_promise(constraint: Constraint, text: str) -> BackendError:
    return BackendError(
        f"the reply is not what {constraint.kind} {constraint.spec:.80} requires: {text[:200]!r}",
        retryable=True,
        hint="the API did not follow the requested structure; describe it in the prompt",
    )


class Shaped:
    """A reply on its way to the text wanted. What stands inside a wrapper can only be told once it is
    whole."""

    def __init__(self, call: Call, form: JsonForm | None, body: dict[str, Any], stop: str = "stop") -> None:
        self._constraint, self._form = call.constraint, form
        self._held: list[str] = []
        self._stops: tuple[str, ...] = ()
        if form is not None and form.wrapped:
            # They are about the value, not the JSON around it: `body` loses them, the value is cut here.
            self._stops = call.sampling.stop
            body.pop(stop, None)

    def piece(self, text: str) -> str:
        """What of a streamed piece can be told now."""
        if self._form is None or not self._form.wrapped:
            return text
        self._held.append(text)
        return ""

    def rest(self) -> str:
        """What is left to tell when the stream is over. Raises BackendError."""
        return self.whole("".join(self._held)) if self._held else ""

    def whole(self, text: str) -> str:
        """The text wanted, of a whole reply. Raises BackendError where it is not what was asked for."""
        if self._form is None or self._constraint is None:
            return text
        value = self._form.read(text, self._constraint)
        ends = [at for stop in self._stops if (at := value.find(stop)) >= 0]
        return value[: min(ends)] if ends else value


class Leading(Shaped):
    """A number, bool or string read from the begin of what a completion model says, where nothing holds the
    model to one. `body`: a request with "prompt", and maybe "stop", which is changed: a string's opening
    quote is said for the model, and stop texts that end a number before it began are left out."""

    KINDS: ClassVar[frozenset[str]] = frozenset({REGEX_INT, REGEX_FLOAT, REGEX_BOOL, REGEX_STR})

    def __init__(self, call: Call, constraint: Constraint, body: dict[str, Any]) -> None:
        super().__init__(call, None, body)
        self._asked = constraint
        self._quote = constraint.spec == REGEX_STR
        stops = [stop for stop in body.get("stop", ()) if stop.strip()]
        if self._quote:
            body["prompt"] += '"'
            stops = ['"', *stops]
        body.pop("stop", None)
        if stops:
            body["stop"] = stops

    def piece(self, text: str) -> str:
        self._held.append(text)
        return ""

    def rest(self) -> str:
        return self.whole("".join(self._held))

    def whole(self, text: str) -> str:
        if self._quote:
            return _quoted(text)
        found = re.match(self._asked.spec, text.lstrip())
        if found is None:
            raise broken_promise(self._asked, text)
        return found[0].rstrip()


_UP_TO_A_QUOTE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def _quoted(text: str) -> str:
    """The JSON string that `text` is the begin of, its opening quote said already. What no JSON string may
    hold as it is (line breaks, a backslash that escapes nothing) is escaped; a second opening quote is left
    out."""
    lead = text.lstrip()
    found = _UP_TO_A_QUOTE.match(lead[1:] if lead.startswith('"') and len(lead) > 1 else text)
    said = "" if found is None else found[0]
    if re.fullmatch(REGEX_STR, f'"{said}"'):
        return f'"{said}"'
    try:
        value = json.loads(f'"{said}"', strict=False)
    except ValueError:
        value = said
    return json.dumps(value, ensure_ascii=False)


def check_spec_only(constraint: Constraint, backend: str) -> None:
    """Raises Unsupported where the constraint says more than its kind and text, which no API takes."""
    said = [word for word in JSON_WORDS if getattr(constraint, word) is not None]
    if said:
        raise Unsupported(
            f"{backend} does not take {', '.join(said)} together with a constraint",
            backend=backend,
            hint="leave it out for this backend",
        )


def form_for(call: Call, backend: str, hint: str = "use json_schema or choices") -> JsonForm | None:
    """How an API that knows JSON schemas only is asked for the call's constraint; None where there is none.
    Raises Unsupported."""
    if call.constraint is None:
        return None
    check_spec_only(call.constraint, backend)
    form = json_form(call.constraint)
    if form is None:
        raise Unsupported(
            f"{backend} cannot enforce {call.constraint.kind} {call.constraint.spec:.60}",
            backend=backend,
            hint=hint,
        )
    if not form.strict and not can_check_schemas():
        raise Unsupported(
            f"{backend} does not guarantee this schema, and without jsonschema it cannot be checked",
            backend=backend,
            hint="make every property required and additionalProperties false, or pip install jsonschema",
        )
    return form


def options_schema(choices: Sequence[str]) -> dict[str, Any]:
    """The schema of {"choice": one of the options}."""
    return {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(dict.fromkeys(choices))}},
        "required": ["choice"],
        "additionalProperties": False,
    }


def response_format(name: str, schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """A schema as OpenAI's chat API asks for it."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}}


def room_for(choices: Sequence[str]) -> int:
    """Tokens that are enough for any of the options in its JSON object."""
    return 64 + 4 * max(map(len, choices))


def picked(call: ChoiceCall, text: str, meta: Mapping[str, Any], backend: str) -> ChoiceScores:
    """The scores of a reply that was held to options_schema(). The options not chosen are not scored: their
    probability is told as 0, and meta says that this is no measured distribution."""
    try:
        index = call.choices.index(json.loads(text)["choice"])
    except (ValueError, TypeError, KeyError) as error:
        raise BackendError(
            f"the reply {text[:200]!r} is not one of the choices", backend=backend, retryable=True
        ) from error
    scores = (ChoiceScore((0.0 if at == index else -math.inf,)) for at in range(len(call.choices)))
    return ChoiceScores(tuple(scores), {**meta, "exact": False, "how": "structured output"})


# -- prompts and errors --------------------------------------------------------------------------------------


def turns(prompt: Prompt, backend: str) -> tuple[list[Message], Message | None]:
    """A conversation's finished turns, and the assistant's turn that the reply goes on with where it has
    text already. A prompt without turns is one turn of the user. Raises Unsupported for what a chat API
    cannot be sent."""
    whole = _only_text(prompt)
    if whole is not None:
        return [whole], None
    done: list[Message] = []
    for message in prompt.messages:
        if message.role == "raw":
            if isinstance(message.content, str) and not message.content.strip():
                continue
            raise Unsupported(
                f"{backend} supports only turns; the text {str(message.content)[:60]!r} is outside of a turn",
                backend=backend,
                hint="put it into user(...) or system(...)",
            )
        if not message.open:
            done.append(message)
            continue
        if message.role != "assistant":
            raise Unsupported(
                f"{backend} replies as the assistant; a turn of {message.role!r} is open",
                backend=backend,
                hint="generate inside assistant(...)",
            )
        return done, (message if message.content else None)
    raise Unsupported(
        f"{backend} replies only in an assistant turn; none is open",
        backend=backend,
        hint="generate inside assistant(...)",
    )


def _only_text(prompt: Prompt) -> Message | None:
    """A prompt that is text outside of turns, as a turn of the user; None for others."""
    if any(message.role != "raw" for message in prompt.messages):
        return None
    said = [message for message in prompt.messages if message.content]
    if len(said) != 1 or (isinstance(said[0].content, str) and not said[0].content.strip()):
        return None
    return Message("user", said[0].content)


def arguments(call: ToolCall) -> dict[str, Any]:
    """A call's arguments for an API that takes an object; empty where the model wrote none."""
    try:
        data = json.loads(call.arguments)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


@contextmanager
def faults(backend: str) -> Any:
    """An API's error answers as the language's errors."""
    try:
        yield
    except HttpFault as fault:
        raise error_of(fault, backend) from fault


def error_of(fault: HttpFault, backend: str) -> ProgramError:
    match fault.body:
        case {"error": {"message": str(said)}} | {"message": str(said)} | {"error": str(said)}:
            pass
        case other:
            said = str(other)[:500].strip() or "no reason given"
    return BackendError(
        f"the API answered {fault.status}: {said}",
        backend=backend,
        status=fault.status,
        retryable=fault.status in RETRYABLE,
        hint="is the API key right?" if fault.status in (401, 403) else None,
    )


# -- media ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Image:
    """An image part. `data`: base64, None where only its URL is known; `mime`: its media type, "" then."""

    url: str
    mime: str = ""
    data: str | None = None


def image_of(part: Mapping[str, Any]) -> Image:
    """The image of an OpenAI-style part, whose URL may carry the data itself (RFC 2397)."""
    where = part.get("image_url")
    url = where.get("url", "") if isinstance(where, Mapping) else str(where or "")
    found = re.match(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)\Z", url, re.DOTALL)
    return Image(url, found[1], found[2]) if found else Image(url)
