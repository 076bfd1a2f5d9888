"""Structural tags: free text in which marked parts are constrained, such as the calls of tools.

Two shapes are read. The older lists tags, and what sets them off:

    {"type": "structural_tag", "structures": [{"begin": "<fn=a>", "schema": {...}, "end": "</fn>"}, ...],
     "triggers": ["<fn="], "at_least_one": false, "stop_after_first": false}

The newer nests formats: {"type": "structural_tag", "format": F} with F one of const_string, json_schema,
regex, grammar, any_text, sequence, or, optional, star, plus, repeat, tag, triggered_tags and
tags_with_separator.

What they mean here:
- Free text is UTF-8 up to the first trigger. Then one of the tags whose `begin` starts with that trigger
  follows, `begin`, content and `end`, then free text again.
- at_least_one: the text begins with a tag. stop_after_first: nothing follows the first tag.
- any_text at the end of a tag's content goes up to the first `end` of the tag.
- excludes: strings that the free text does not contain. json_schema: of strings, which the free text keeps,
  without quotes and escapes.
Each constrained part is kept as the backend keeps it alone; the whole is exact if they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from runtime.grammar.base import Matcher, Origin
from runtime.grammar.tags.tag_matcher import TagMatcher, TagProgram
from runtime.grammar.tags.tag_space import tag_space
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
_TAG_KEYS = ("type", "begin", "content", "end")
_DISPATCH_KEYS = ("triggers", "at_least_one", "stop_after_first")

Compile = Callable[[Constraint], Matcher]
SpellText = Callable[[Any, Sequence[str]], tuple[str, list[str]]]
"""A schema of strings, and strings that the text does not contain -> a grammar of such texts, and the
keywords that it does not keep."""
Ends = tuple[bytes, ...]
"""What ends the tag around a format whose free text looks for it; () otherwise."""
Read = Callable[[Mapping[str, Any], str, Ends, int], Part]


class StructuralTags:
    """Compiles structural tags over a backend, called `name`. `compile_part` compiles their parts,
    `spell_text` gives the grammars of texts that keep a schema."""

    def __init__(
        self, vocabulary: Vocabulary, compile_part: Compile, name: str, spell_text: SpellText | None = None
    ) -> None:
        self._vocabulary, self._compile, self._name = vocabulary, compile_part, name
        self._spell_text = spell_text

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher for the structural tag in the constraint, whose other fields count for the JSON in it.
        Raises BadConstraint (path in it, and why) or UnsupportedConstraint."""
        reader = _Reader(self._compile, constraint, self._spell_text)
        part = reader.read(constraint.spec)
        space = tag_space(self._vocabulary)
        # Now, by the compiling thread, rather than at the first mask inside of a tag.
        for word in reader.ends:
            space.ending_in(word)
        for closers in {leaf.closers for leaf in reader.leaves}:
            space.closing(closers)
        checked, ignored = tuple(reader.checked), tuple(reader.ignored)
        origin = Origin(self._name, checked, ignored, literals="".join(reader.literals))
        return TagMatcher.start(TagProgram(part, space, origin))


class _Reader:
    """Reads the specification of one constraint, `around`."""

    def __init__(self, compile_part: Compile, around: Constraint, spell_text: SpellText | None) -> None:
        self._compile, self._around, self._spell_text = compile_part, around, spell_text
        self._leaves: dict[tuple[ConstraintKind, str], Leaf] = {}
        self._formats = 0
        self.ends: set[bytes] = set()
        self.checked: list[str] = []
        self.ignored: list[str] = []
        self.literals: list[str] = []
        self._readers: dict[str, tuple[Read, tuple[str, ...]]] = {
            "const_string": (
                lambda node, path, *_: Literal(_bytes(node, "value", path, empty=True)),
                ("value",),
            ),
            "json_schema": (self._json_schema, ("json_schema", "style")),
            "regex": (partial(self._pattern, "regex", "pattern"), ("pattern",)),
            "grammar": (partial(self._pattern, "ebnf", "grammar"), ("grammar",)),
            "any_text": (self._any_text, ("excludes", "json_schema")),
            "sequence": (self._sequence, ("elements",)),
            "or": (self._or, ("elements",)),
            "optional": (partial(self._loop, 0, 1), ("content",)),
            "star": (partial(self._loop, 0, None), ("content",)),
            "plus": (partial(self._loop, 1, None), ("content",)),
            "repeat": (self._repeat, ("content", "min", "max")),
            "tag": (self._tag, _TAG_KEYS[1:]),
            "triggered_tags": (self._triggered, (*_DISPATCH_KEYS, "tags", "excludes")),
            "tags_with_separator": (self._separated, ("tags", "separator", *_DISPATCH_KEYS[1:])),
        }
        """By type of a format: how it is read, and its keys."""

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
            return self._format(root["format"], f"{KIND} /format", (), 0)
        if "structures" in root:
            return self._older(root)
        raise BadConstraint('has neither "structures" nor "format"', where=KIND)

    def _older(self, root: Mapping[str, Any]) -> Part:
        _only_keys(root, ("type", "structures", *_DISPATCH_KEYS), KIND)
        tags: list[_Tag] = []
        for number, node in enumerate(_list(root, "structures", KIND)):
            path = f"{KIND} /structures/{number}"
            _object(node, path)
            _only_keys(node, ("begin", "schema", "end"), path)
            if "schema" not in node:
                raise BadConstraint("has no schema", where=path)
            content = self._schema_leaf(node["schema"], f"{path}/schema")
            end = Literal(_bytes(node, "end", path, empty=True))
            self.ends.add(end.data)
            tags.append(_Tag(_bytes(node, "begin", path), content, end))
        return self._dispatch(tags, root, KIND, (), ())

    def _format(self, node: Any, path: str, ends: Ends, depth: int) -> Part:
        """The part for one format at `path`."""
        _object(node, path)
        self._formats += 1
        if self._formats > MAX_FORMATS or depth > MAX_NESTING:
            raise BadConstraint(
                f"has more than {MAX_FORMATS} formats, or more than {MAX_NESTING} inside of each other",
                where=path,
            )
        kind = node.get("type")
        read = self._readers.get(kind) if isinstance(kind, str) else None
        if read is None:
            known = ", ".join(self._readers)
            raise UnsupportedConstraint(
                f"the format {kind!r} is not kept", where=path, hint=f"known: {known}"
            )
        _only_keys(node, ("type", *read[1]), path)
        return read[0](node, path, ends, depth + 1)

    def _json_schema(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        if node.get("style", "json") != "json":
            raise UnsupportedConstraint(f"the style {node['style']!r} is not kept", where=path)
        if "json_schema" not in node:
            raise BadConstraint("has no json_schema", where=path)
        return self._schema_leaf(node["json_schema"], f"{path}/json_schema")

    def _schema_leaf(self, schema: Any, path: str) -> Leaf:
        is_object = isinstance(schema, dict) and schema.get("type") == "object"
        return self._leaf("json_schema", json.dumps(schema), path, _OBJECT_ENDS if is_object else _JSON_ENDS)

    def _pattern(
        self, kind: ConstraintKind, key: str, node: Mapping[str, Any], path: str, ends: Ends, depth: int
    ) -> Part:
        return self._leaf(kind, _string(node, key, path), path, None)

    def _leaf(self, kind: ConstraintKind, spec: str, path: str, closers: frozenset[int] | None) -> Leaf:
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
                raise type(error)(f"{inner}{error.message}", where=path, hint=error.hint) from None
            self._leaves[key] = Leaf(matcher, closers)
            self.checked.extend(f"{word} ({path})" for word in matcher.origin.checked)
            self.ignored.extend(f"{word} ({path})" for word in matcher.origin.ignored)
        return self._leaves[key]

    def _any_text(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        excludes = _strings(node, "excludes", path)
        if "json_schema" in node:
            text = self._shaped_text(node["json_schema"], (*excludes, *ends), path)
            return Chain((text, _any_of(ends))) if ends else text
        return Text(tuple(Exit(end, Literal(b"")) for end in ends), excludes, may_end=not ends)

    def _shaped_text(self, schema: Any, excludes: tuple[bytes, ...], path: str) -> Leaf:
        if self._spell_text is None:
            raise UnsupportedConstraint(
                "text with a json_schema is not kept", where=path, hint='use grammar backend "auto"'
            )
        try:
            grammar, ignored = self._spell_text(schema, [string.decode() for string in excludes])
        except BadConstraint as error:
            raise type(error)(error.message, where=f"{path}/json_schema", hint=error.hint) from None
        self.ignored.extend(f"{word} ({path})" for word in ignored)
        self.literals.append(json.dumps(schema, ensure_ascii=False))
        return self._leaf("ebnf", grammar, path, None)

    def _sequence(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        elements = _list(node, "elements", path)
        last = len(elements) - 1
        return Chain(tuple(
            self._format(element, f"{path}/elements/{number}", ends if number == last else (), depth)
            for number, element in enumerate(elements)
        ))  # fmt: skip

    def _or(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        return Choice(tuple(
            self._ended(element, f"{path}/elements/{number}", ends, depth)
            for number, element in enumerate(_list(node, "elements", path))
        ))  # fmt: skip

    def _ended(self, node: Any, path: str, ends: Ends, depth: int) -> Part:
        """A format and, unless it looks for it itself, the end after it."""
        if not ends or _looks_for_end(node):
            return self._format(node, path, ends, depth)
        return Chain((self._format(node, path, (), depth), _any_of(ends)))

    def _loop(
        self, low: int, high: int | None, node: Mapping[str, Any], path: str, ends: Ends, depth: int
    ) -> Part:
        return Loop(self._format(node.get("content"), f"{path}/content", (), depth), low, high)

    def _repeat(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        low, high = node.get("min"), node.get("max")
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= MAX_REPEAT:
            raise BadConstraint(f"min and max must be counts up to {MAX_REPEAT}, min first", where=path)
        return self._loop(low, high, node, path, ends, depth)

    def _tag(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        tag = self._one_tag(node, path, depth)
        return Chain((Literal(tag.begin), tag.content, tag.end))

    def _one_tag(self, node: Any, path: str, depth: int) -> _Tag:
        _object(node, path)
        _only_keys(node, _TAG_KEYS, path)
        begin = _bytes(node, "begin", path, empty=True)
        listed = node["end"] if isinstance(node.get("end"), list) else [node.get("end")]
        ends = tuple(_encoded(end, f"{path}/end") for end in listed)
        if not ends:
            raise BadConstraint("end lists nothing", where=path)
        self.ends.update(ends)
        content = node.get("content")
        if not _looks_for_end(content):
            return _Tag(begin, self._format(content, f"{path}/content", (), depth), _any_of(ends))
        if not all(ends):
            raise BadConstraint("free text at the end of a tag needs an end that is not empty", where=path)
        return _Tag(begin, self._format(content, f"{path}/content", ends, depth), Literal(b""))

    def _triggered(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        return self._dispatch(
            self._tags(node, path, depth), node, path, ends, _strings(node, "excludes", path)
        )

    def _tags(self, node: Mapping[str, Any], path: str, depth: int) -> list[_Tag]:
        return [
            self._one_tag(tag, f"{path}/tags/{number}", depth)
            for number, tag in enumerate(_list(node, "tags", path))
        ]

    def _dispatch(
        self, tags: list[_Tag], node: Mapping[str, Any], path: str, ends: Ends,
        excludes: tuple[bytes, ...],
    ) -> Part:  # fmt: skip
        """Free text with tags in it."""
        triggers = _strings(node, "triggers", path)
        if not triggers:
            raise BadConstraint("has no triggers", where=path)
        for tag in tags:
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                shown = tag.begin.decode()
                raise BadConstraint(f"the tag {shown!r} begins with none of the triggers", where=path)
        ending = _any_of(ends) if ends else Literal(b"")
        once = _flag(node, "stop_after_first", path)
        after = ending if once else Literal(b"")
        exits = [
            Exit(trigger, Chain((_behind(tags, trigger), after)), again=not once) for trigger in triggers
        ] + [Exit(end, Literal(b"")) for end in ends]
        text = Text(tuple(exits), excludes, may_end=not ends)
        if not _flag(node, "at_least_one", path):
            return text
        whole = Choice(tuple(Chain((Literal(tag.begin), tag.content, tag.end)) for tag in tags))
        return Chain((whole, ending if once else text))

    def _separated(self, node: Mapping[str, Any], path: str, ends: Ends, depth: int) -> Part:
        separator = Literal(_bytes(node, "separator", path, empty=True))
        tags = self._tags(node, path, depth)
        tag = Choice(tuple(Chain((Literal(one.begin), one.content, one.end)) for one in tags))
        once = _flag(node, "stop_after_first", path)
        some: Part = tag if once else Chain((tag, Loop(Chain((separator, tag)), 0, None)))
        return some if _flag(node, "at_least_one", path) else Loop(some, 0, 1)


class _Tag(NamedTuple):
    begin: bytes
    content: Part
    end: Part


def _behind(tags: list[_Tag], trigger: bytes) -> Part:
    """The rest of each tag that `trigger` begins."""
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


def _any_of(strings: Ends) -> Part:
    return Literal(strings[0]) if len(strings) == 1 else Choice(tuple(map(Literal, strings)))


def _object(node: Any, path: str) -> None:
    if not isinstance(node, dict):
        raise BadConstraint(f"must be a JSON object, got {_shown(node)}", where=path)


def _only_keys(node: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in node:
        if key not in known:
            raise UnsupportedConstraint(f"{key!r} is not kept", where=path, hint=f"known: {', '.join(known)}")


def _list(node: Mapping[str, Any], key: str, path: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise BadConstraint(f"{key} must be a list that is not empty", where=path)
    return value


def _string(node: Mapping[str, Any], key: str, path: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise BadConstraint(f"{key} must be a string, got {_shown(value)}", where=path)
    return value


def _bytes(node: Mapping[str, Any], key: str, path: str, *, empty: bool = False) -> bytes:
    word = _encoded(_string(node, key, path), f"{path}/{key}")
    if not word and not empty:
        raise BadConstraint(f"{key} is empty", where=path)
    return word


def _strings(node: Mapping[str, Any], key: str, path: str) -> tuple[bytes, ...]:
    value = node.get(key, [])
    if not isinstance(value, list):
        raise BadConstraint(f"{key} must be a list of strings", where=path)
    strings = tuple(_encoded(string, f"{path}/{key}") for string in value)
    if not all(strings):
        raise BadConstraint(f"{key} holds an empty string", where=path)
    return tuple(dict.fromkeys(strings))


def _encoded(word: Any, path: str) -> bytes:
    if not isinstance(word, str):
        raise BadConstraint(f"must be a string, got {_shown(word)}", where=path)
    if len(word) > MAX_WORD:
        raise BadConstraint(f"has {len(word)} characters; at most {MAX_WORD} are taken", where=path)
    try:
        return word.encode()
    except UnicodeEncodeError:
        raise BadConstraint("holds a lone surrogate, which no text has", where=path) from None


def _flag(node: Mapping[str, Any], key: str, path: str) -> bool:
    value = node.get(key, False)
    if not isinstance(value, bool):
        raise BadConstraint(f"{key} must be true or false, got {_shown(value)}", where=path)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
