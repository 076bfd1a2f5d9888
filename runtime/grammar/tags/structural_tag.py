"""Structural tags: free text in which marked parts are constrained, such as the calls of tools.

Two shapes are read. The older lists tags, and what sets them off:

    {"type": "structural_tag", "structures": [{"begin": "<fn=a>", "schema": {...}, "end": "</fn>"}, ...],
     "triggers": ["<fn="], "at_least_one": false, "stop_after_first": false}

The newer nests formats: {"type": "structural_tag", "format": F} with F one of const_string, json_schema,
regex, grammar, any_text, sequence, or, optional, star, plus, repeat, tag, triggered_tags and
tags_with_separator.

What they mean here:
- Free text is UTF-8 that holds no trigger. The first place where a trigger ends decides: one of the tags
  whose `begin` starts with that trigger follows, `begin`, content and `end`, then free text again.
- at_least_one: the text begins with a tag. stop_after_first: nothing follows the first tag.
- any_text at the end of a tag's content goes up to the first place where the tag's `end` stands.
- excludes: strings that the free text does not hold. json_schema: of strings, which the free text keeps, as
  it stands there without quotes and escapes.
Each constrained part is kept as the backend keeps it by itself; the whole is exact where they are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from runtime.grammar.base import Matcher, Origin
from runtime.grammar.tags.tag_matcher import TagMatcher, TagProgram
from runtime.grammar.tags.tag_space import TagSpace
from runtime.grammar.tags.tagged_text import Chain, Choice, Exit, Leaf, Literal, Loop, Part, Text
from runtime.protocol.constraint import JSON_KINDS, Constraint, ConstraintKind
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary

KIND = "structural_tag"
MAX_NESTING = 50
MAX_FORMATS = 2000
MAX_REPEAT = 1000
MAX_WORD = 4096
# No engine here takes whitespace after a whole JSON value.
_JSON_ENDS = frozenset(b'}]"el0123456789')
_OBJECT_ENDS = frozenset(b"}")

Compile = Callable[[Constraint], Matcher]
SpellText = Callable[[Any, Sequence[str]], tuple[str, list[str]]]
"""A schema of strings, and strings that the text does not hold -> a grammar of such texts, and what of the
schema it does not keep."""


class StructuralTags:
    """Compiles structural tags over the constraints of a backend. `compile_part` makes the matchers of their
    parts, `spell_text` the grammars of texts that keep a schema, `name` is the backend's."""

    def __init__(
        self, vocabulary: Vocabulary, compile_part: Compile, name: str, spell_text: SpellText | None = None
    ) -> None:
        self._vocabulary, self._compile, self._name = vocabulary, compile_part, name
        self._spell_text = spell_text
        self._space: TagSpace | None = None
        self._lock = threading.Lock()

    def prepare(self) -> TagSpace:
        """Make what structural tags need of the vocabulary, where it is not there yet."""
        with self._lock:
            if self._space is None:
                self._space = TagSpace(self._vocabulary)
            return self._space

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher for the structural tag in the constraint, whose other fields count for the JSON in it.
        Raises BadConstraint (where in it, and why) or UnsupportedConstraint."""
        reader = _Reader(self._compile, constraint, self._spell_text)
        part = reader.read(constraint.spec)
        space = self.prepare()
        # Here, where constraints are compiled, not at the first mask inside of a tag.
        for word in reader.ends:
            space.ending_in(word)
        for closers in {leaf.closers for leaf in reader.leaves}:
            space.closing(closers)
        told = tuple(reader.checked), tuple(reader.ignored)
        origin = Origin(self._name, *told, literals="".join(reader.literals))
        return TagMatcher.start(TagProgram(part, space, origin))


class _End(NamedTuple):
    """What ends the tag around a format: free text at the end of its content looks for it."""

    words: tuple[bytes, ...]


class _Reader:
    """Reads one specification. `where` is the path of a format in it; `around` the constraint it is of."""

    def __init__(self, compile_part: Compile, around: Constraint, spell_text: SpellText | None) -> None:
        self._compile, self._around, self._spell_text = compile_part, around, spell_text
        self._leaves: dict[tuple[ConstraintKind, str], Leaf] = {}
        self._formats = 0
        self.ends: set[bytes] = set()
        self.checked: list[str] = []
        self.ignored: list[str] = []
        self.literals: list[str] = []
        self._readers: dict[str, Callable[[Mapping[str, Any], str, _End | None, int], Part]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda node, where, end, depth: self._loop(node, where, depth, 0, 1),
            "star": lambda node, where, end, depth: self._loop(node, where, depth, 0, None),
            "plus": lambda node, where, end, depth: self._loop(node, where, depth, 1, None),
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    @property
    def leaves(self) -> list[Leaf]:
        return list(self._leaves.values())

    def read(self, spec: str) -> Part:
        try:
            root = json.loads(spec)
        except RecursionError:
            raise BadConstraint("is nested too deeply", where=KIND) from None
        except ValueError as error:
            raise BadConstraint(f"is not JSON: {error}", where=KIND) from None
        if not isinstance(root, dict):
            raise BadConstraint("is not a JSON object", where=KIND)
        if root.get("type", KIND) != KIND:
            raise BadConstraint(f"type must be {KIND!r}, got {root['type']!r}", where=KIND)
        if "format" in root:
            _only_keys(root, ("type", "format"), KIND)
            return self._format(root["format"], f"{KIND} /format", None, 0)
        if "structures" in root:
            return self._older(root)
        raise BadConstraint('has neither "structures" nor "format"', where=KIND)

    def _older(self, root: Mapping[str, Any]) -> Part:
        _only_keys(root, ("type", "structures", "triggers", "at_least_one", "stop_after_first"), KIND)
        tags: list[_Tag] = []
        for number, node in enumerate(_list(root, "structures", KIND)):
            where = f"{KIND} /structures/{number}"
            _object(node, where)
            _only_keys(node, ("begin", "schema", "end"), where)
            if "schema" not in node:
                raise BadConstraint("has no schema", where=where)
            content = self._schema_leaf(node["schema"], f"{where}/schema")
            end = Literal(_word(node, "end", where, empty=True))
            self.ends.add(end.data)
            tags.append(_Tag(_word(node, "begin", where), content, end))
        return self._dispatch(tags, root, KIND, None, ())

    def _format(self, node: Any, where: str, end: _End | None, depth: int) -> Part:
        """The part for one format. `end`: of the tag whose content ends with it."""
        _object(node, where)
        self._formats += 1
        if self._formats > MAX_FORMATS or depth > MAX_NESTING:
            raise BadConstraint(
                f"has more than {MAX_FORMATS} formats, or more than {MAX_NESTING} inside of each other",
                where=where,
            )
        kind = node.get("type")
        read = self._readers.get(kind) if isinstance(kind, str) else None
        if read is None:
            known = ", ".join(self._readers)
            raise UnsupportedConstraint(
                f"the format {kind!r} is not kept", where=where, hint=f"known: {known}"
            )
        return read(node, where, end, depth + 1)

    def _const_string(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "value"), where)
        return Literal(_word(node, "value", where, empty=True))

    def _json_schema(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "json_schema", "style"), where)
        if node.get("style", "json") != "json":
            raise UnsupportedConstraint(f"the style {node['style']!r} is not kept", where=where)
        if "json_schema" not in node:
            raise BadConstraint("has no json_schema", where=where)
        return self._schema_leaf(node["json_schema"], f"{where}/json_schema")

    def _schema_leaf(self, schema: Any, where: str) -> Leaf:
        is_object = isinstance(schema, dict) and schema.get("type") == "object"
        return self._leaf("json_schema", json.dumps(schema), where, _OBJECT_ENDS if is_object else _JSON_ENDS)

    def _regex(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "pattern"), where)
        return self._leaf("regex", _string(node, "pattern", where), where, None)

    def _grammar(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "grammar"), where)
        return self._leaf("ebnf", _string(node, "grammar", where), where, None)

    def _leaf(self, kind: ConstraintKind, spec: str, where: str, closers: frozenset[int] | None) -> Leaf:
        """A matcher for a part; equal parts share one."""
        key = (kind, spec)
        if key not in self._leaves:
            try:
                part = Constraint(kind, spec)
                if kind in JSON_KINDS:
                    part = msgspec.structs.replace(self._around, kind=kind, spec=spec)
                matcher = self._compile(part.verify())
            except BadConstraint as error:
                inner = f"{error.where}: " if error.where and error.where != kind else ""
                raise type(error)(f"{inner}{error.message}", where=where, hint=error.hint) from None
            self._leaves[key] = Leaf(matcher, closers)
            self.checked.extend(f"{word} ({where})" for word in matcher.origin.checked)
            self.ignored.extend(f"{word} ({where})" for word in matcher.origin.ignored)
        return self._leaves[key]

    def _any_text(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "excludes", "json_schema"), where)
        excludes = _words(node, "excludes", where)
        if "json_schema" in node:
            words = (*excludes, *(() if end is None else end.words))
            text = self._shaped_text(node["json_schema"], words, where)
            return text if end is None else Chain((text, _any_of(end.words)))
        if end is None:
            return Text(excludes=excludes)
        return Text(tuple(Exit(word, Literal(b"")) for word in end.words), excludes, may_end=False)

    def _shaped_text(self, schema: Any, excludes: tuple[bytes, ...], where: str) -> Leaf:
        if self._spell_text is None:
            raise UnsupportedConstraint(
                "text with a json_schema is not kept", where=where, hint='use grammar backend "auto"'
            )
        try:
            grammar, ignored = self._spell_text(schema, [word.decode() for word in excludes])
        except BadConstraint as error:
            raise type(error)(error.message, where=f"{where}/json_schema", hint=error.hint) from None
        self.ignored.extend(f"{word} ({where})" for word in ignored)
        self.literals.append(json.dumps(schema, ensure_ascii=False))
        return self._leaf("ebnf", grammar, where, None)

    def _sequence(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "elements"), where)
        elements = _list(node, "elements", where)
        last = len(elements) - 1
        return Chain(tuple(
            self._format(element, f"{where}/elements/{number}", end if number == last else None, depth)
            for number, element in enumerate(elements)
        ))  # fmt: skip

    def _or(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "elements"), where)
        return Choice(tuple(
            self._ended(element, f"{where}/elements/{number}", end, depth)
            for number, element in enumerate(_list(node, "elements", where))
        ))  # fmt: skip

    def _ended(self, node: Any, where: str, end: _End | None, depth: int) -> Part:
        """A format and, where it does not look for it itself, the end after it."""
        if end is None or _looks_for_end(node):
            return self._format(node, where, end, depth)
        return Chain((self._format(node, where, None, depth), _any_of(end.words)))

    def _loop(self, node: Mapping[str, Any], where: str, depth: int, low: int, high: int | None) -> Part:
        _only_keys(node, ("type", "content"), where)
        return Loop(self._format(node.get("content"), f"{where}/content", None, depth), low, high)

    def _repeat(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "content", "min", "max"), where)
        low, high = node.get("min"), node.get("max")
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= MAX_REPEAT:
            raise BadConstraint(f"min and max must be counts up to {MAX_REPEAT}, min first", where=where)
        return Loop(self._format(node.get("content"), f"{where}/content", None, depth), low, high)

    def _tag(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        tag = self._one_tag(node, where, depth)
        return Chain((Literal(tag.begin), tag.content, tag.end))

    def _one_tag(self, node: Any, where: str, depth: int) -> _Tag:
        _object(node, where)
        _only_keys(node, ("type", "begin", "content", "end"), where)
        begin = _word(node, "begin", where, empty=True)
        ends = node.get("end")
        words = tuple(_encoded(word, f"{where}/end") for word in (ends if isinstance(ends, list) else [ends]))
        if not words:
            raise BadConstraint("end lists nothing", where=where)
        self.ends.update(words)
        content = node.get("content")
        if not _looks_for_end(content):
            return _Tag(begin, self._format(content, f"{where}/content", None, depth), _any_of(words))
        if not all(words):
            raise BadConstraint("free text at the end of a tag needs an end that is not empty", where=where)
        return _Tag(begin, self._format(content, f"{where}/content", _End(words), depth), Literal(b""))

    def _triggered(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        allowed = ("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        _only_keys(node, allowed, where)
        return self._dispatch(
            self._tags(node, where, depth), node, where, end, _words(node, "excludes", where)
        )

    def _tags(self, node: Mapping[str, Any], where: str, depth: int) -> list[_Tag]:
        return [
            self._one_tag(tag, f"{where}/tags/{number}", depth)
            for number, tag in enumerate(_list(node, "tags", where))
        ]

    def _dispatch(
        self, tags: list[_Tag], node: Mapping[str, Any], where: str, end: _End | None,
        excludes: tuple[bytes, ...],
    ) -> Part:  # fmt: skip
        """Free text with tags in it."""
        triggers = _words(node, "triggers", where)
        if not triggers:
            raise BadConstraint("has no triggers", where=where)
        for tag in tags:
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                shown = tag.begin.decode()
                raise BadConstraint(f"the tag {shown!r} begins with none of the triggers", where=where)
        leave = () if end is None else end.words
        ending = _any_of(leave) if leave else Literal(b"")
        once = _flag(node, "stop_after_first", where)
        after = ending if once else Literal(b"")
        exits = [
            Exit(trigger, Chain((_behind(tags, trigger), after)), again=not once) for trigger in triggers
        ] + [Exit(word, Literal(b"")) for word in leave]
        text = Text(tuple(exits), excludes, may_end=not leave)
        if not _flag(node, "at_least_one", where):
            return text
        whole = Choice(tuple(Chain((Literal(tag.begin), tag.content, tag.end)) for tag in tags))
        return Chain((whole, ending if once else text))

    def _separated(self, node: Mapping[str, Any], where: str, end: _End | None, depth: int) -> Part:
        _only_keys(node, ("type", "tags", "separator", "at_least_one", "stop_after_first"), where)
        separator = Literal(_word(node, "separator", where, empty=True))
        tags = self._tags(node, where, depth)
        tag = Choice(tuple(Chain((Literal(one.begin), one.content, one.end)) for one in tags))
        once = _flag(node, "stop_after_first", where)
        some: Part = tag if once else Chain((tag, Loop(Chain((separator, tag)), 0, None)))
        return some if _flag(node, "at_least_one", where) else Loop(some, 0, 1)


class _Tag(NamedTuple):
    begin: bytes
    content: Part
    end: Part


def _behind(tags: list[_Tag], trigger: bytes) -> Part:
    """What may come after `trigger`: the rest of each tag that it begins."""
    return Choice(tuple(
        Chain((Literal(tag.begin[len(trigger) :]), tag.content, tag.end))
        for tag in tags if tag.begin.startswith(trigger)
    ))  # fmt: skip


def _looks_for_end(node: Any) -> bool:
    """Whether a format ends in free text, which runs up to the end of the tag around it."""
    match node:
        case {"type": "any_text"} | {"type": "triggered_tags"}:
            return True
        case {"type": "sequence", "elements": [*_, last]}:
            return _looks_for_end(last)
        case {"type": "or", "elements": [*options]}:
            return any(map(_looks_for_end, options))
        case _:
            return False


def _any_of(words: tuple[bytes, ...]) -> Part:
    return Literal(words[0]) if len(words) == 1 else Choice(tuple(Literal(word) for word in words))


def _object(node: Any, where: str) -> None:
    if not isinstance(node, dict):
        raise BadConstraint(f"must be a JSON object, got {_shown(node)}", where=where)


def _only_keys(node: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in node:
        if key not in known:
            raise UnsupportedConstraint(
                f"{key!r} is not kept", where=where, hint=f"known: {', '.join(known)}"
            )


def _list(node: Mapping[str, Any], key: str, where: str) -> list[Any]:
    found = node.get(key)
    if not isinstance(found, list) or not found:
        raise BadConstraint(f"{key} must be a list that is not empty", where=where)
    return found


def _string(node: Mapping[str, Any], key: str, where: str) -> str:
    found = node.get(key)
    if not isinstance(found, str):
        raise BadConstraint(f"{key} must be a string, got {_shown(found)}", where=where)
    return found


def _word(node: Mapping[str, Any], key: str, where: str, *, empty: bool = False) -> bytes:
    word = _encoded(_string(node, key, where), f"{where}/{key}")
    if not word and not empty:
        raise BadConstraint(f"{key} is empty", where=where)
    return word


def _words(node: Mapping[str, Any], key: str, where: str) -> tuple[bytes, ...]:
    found = node.get(key, [])
    if not isinstance(found, list):
        raise BadConstraint(f"{key} must be a list of strings", where=where)
    words = tuple(_encoded(word, f"{where}/{key}") for word in found)
    if not all(words):
        raise BadConstraint(f"{key} holds an empty string", where=where)
    return tuple(dict.fromkeys(words))


def _encoded(word: Any, where: str) -> bytes:
    if not isinstance(word, str):
        raise BadConstraint(f"must be a string, got {_shown(word)}", where=where)
    if len(word) > MAX_WORD:
        raise BadConstraint(f"has {len(word)} characters; at most {MAX_WORD} are taken", where=where)
    try:
        return word.encode()
    except UnicodeEncodeError:
        raise BadConstraint("holds a lone surrogate, which no text has", where=where) from None


def _flag(node: Mapping[str, Any], key: str, where: str) -> bool:
    found = node.get(key, False)
    if not isinstance(found, bool):
        raise BadConstraint(f"{key} must be true or false, got {_shown(found)}", where=where)
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
