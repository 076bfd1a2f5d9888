"""The tree of a grammar: its parts, and what can be known of its shape without an engine.

Which rules can finish, how deep they stand inside of each other, what their counts come to. It knows no way
of writing a grammar down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from runtime.grammar.automata import regex_syntax
from runtime.grammar.automata.charset import SURROGATES, Ranges, difference
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

MAX_DEPTH = 1500
"""Rules and groups inside of each other, from one rule to the next: engines recurse on their stack."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; high None = without end."""

    item: Node
    low: int
    high: int | None


Node = Chars | Ref | Seq | Alt | Repeat
EMPTY = Seq(())


def of_regex(node: regex_syntax.Node) -> Node:
    """A regular expression's tree as one of a grammar. Raises UnsupportedConstraint for a condition on
    neighbouring characters."""
    match node:
        case regex_syntax.Chars(ranges):
            return Chars(difference(ranges, SURROGATES))
        case regex_syntax.Seq(items):
            return Seq(tuple(map(of_regex, items)))
        case regex_syntax.Alt(options):
            return Alt(tuple(map(of_regex, options)))
        case regex_syntax.Repeat(item, low, high):
            return Repeat(of_regex(item), low, high)
        case regex_syntax.At(kind):
            raise UnsupportedConstraint(
                f"a condition on neighbouring characters ({kind}) inside of the pattern is not kept",
                where="regex",
                hint='grammar backend "outlines" keeps it',
            )


def characters_of(node: Node) -> Iterator[Ranges]:
    """The sets of characters in `node`."""
    match node:
        case Chars(ranges):
            yield ranges
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from characters_of(part)
        case Repeat(item):
            yield from characters_of(item)


class Grammar(NamedTuple):
    """`rules` that `root` can reach, each able to finish."""

    rules: Mapping[str, Node]
    root: str = "root"


def positions_of(node: Node) -> int:
    """Characters and names of `node` with its counts written out; no work is done."""
    match node:
        case Chars() | Ref():
            return 1
        case Seq(parts) | Alt(parts):
            return 1 + sum(map(positions_of, parts))
        case Repeat(item, low, high):
            return 1 + positions_of(item) * max(low if high is None else high, 1)


def counted(grammar: Grammar) -> int:
    """How many states the counts of a grammar come to, those of single characters and short strings aside."""
    return sum(_counted(node) for node in grammar.rules.values())


def _counted(node: Node) -> int:
    match node:
        case Chars() | Ref():
            return 0
        case Seq(parts) | Alt(parts):
            return sum(map(_counted, parts))
        case Repeat(item, low, high):
            times = max(low if high is None else high, 1)
            return _counted(item) * times + (positions_of(item) * times if times > 4 else 0)


def written_out(grammar: Grammar) -> int:
    """Characters and names of `root` with every rule that does not come back to itself written in its place:
    forty rules of two names each come to 2**40. No work is done."""
    uses = {name: sorted(names_of(node)) for name, node in grammar.rules.items()}
    sizes: dict[str, int] = {}
    for group in _groups(uses):  # those used come before their users
        sizes.update(dict.fromkeys(group, 1))
        sizes.update({name: _written_out(grammar.rules[name], sizes) for name in group})
    return sizes[grammar.root]


def _written_out(node: Node, sizes: Mapping[str, int]) -> int:
    match node:
        case Chars():
            return 1
        case Ref(name):
            return sizes[name]
        case Seq(parts) | Alt(parts):
            return 1 + sum(_written_out(part, sizes) for part in parts)
        case Repeat(item, low, high):
            return 1 + _written_out(item, sizes) * max(low if high is None else high, 1)


def productive(rules: Mapping[str, Node], where: str) -> Grammar:
    """Without what can never finish (a text that went there could never end), and what root never reaches."""
    done = _fixpoint(rules, _finishes)
    if "root" not in done:
        raise BadConstraint("no finite text matches: every way from 'root' goes on for ever", where=where)
    kept: dict[str, Node] = {}
    ahead = ["root"]
    while ahead:
        name = ahead.pop()
        if name not in kept:
            kept[name] = _pruned(rules[name], done)
            ahead.extend(names_of(kept[name]))
    _check_depth(kept, where)
    return Grammar({name: kept[name] for name in rules if name in kept})


def bottom_up(rules: Mapping[str, Node]) -> list[str]:
    """The rules that do not come to use themselves, nor one that does, each after those it uses."""
    uses = {name: names_of(node) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, used in uses.items():
        for one in used:
            users[one].append(name)
    order = [name for name, used in uses.items() if not used]
    for name in order:
        for user in users[name]:
            uses[user].discard(name)
            if not uses[user]:
                order.append(user)
    return order


def _fixpoint(rules: Mapping[str, Node], test: Callable[[Node, set[str]], bool]) -> set[str]:
    """The least set of rules for which `test` holds, given the set."""
    found: set[str] = set()
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for used in names_of(node):
            users.setdefault(used, []).append(name)
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in found and test(rules[name], found):
            found.add(name)
            queue.extend(users.get(name, ()))
    return found


def names_of(node: Node) -> set[str]:
    match node:
        case Ref(name):
            return {name}
        case Chars():
            return set()
        case Repeat(item):
            return names_of(item)
        case Seq(parts) | Alt(parts):
            return set().union(*map(names_of, parts))


def _finishes(node: Node, done: set[str]) -> bool:
    match node:
        case Chars(ranges):
            return bool(difference(ranges, SURROGATES))
        case Ref(name):
            return name in done
        case Seq(items):
            return all(_finishes(item, done) for item in items)
        case Alt(options):
            return any(_finishes(option, done) for option in options)
        case Repeat(item, low):
            return low == 0 or _finishes(item, done)


def _pruned(node: Node, done: set[str]) -> Node:
    match node:
        case Chars() | Ref():
            return node
        case Seq(items):
            return Seq(tuple(_pruned(item, done) for item in items))
        case Alt(options):
            return Alt(tuple(_pruned(option, done) for option in options if _finishes(option, done)))
        case Repeat(item, low, high):
            return Repeat(_pruned(item, done), low, high) if _finishes(item, done) else EMPTY


def _check_depth(rules: Mapping[str, Node], where: str) -> None:
    """Refuse what may take a reader that follows each rule where it first stands deeper than MAX_DEPTH: the
    longest way down from group to group of rules that use each other, each group taken as a whole."""
    uses = {name: sorted(names_of(node)) for name, node in rules.items()}
    depth: dict[str, int] = {}
    for group in _groups(uses):
        below = max((depth.get(used, 0) for name in group for used in uses[name]), default=0)
        total = below + sum(1 + _nesting(rules[name]) for name in group)
        if total > MAX_DEPTH:
            text = f"rules and groups stand more than {MAX_DEPTH} inside of each other"
            raise BadConstraint(text, where=where, hint="flatten it")
        depth.update(dict.fromkeys(group, total))


def _groups(uses: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Names that reach each other, each group after those it uses (Tarjan 1972, without recursion)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    waiting: dict[str, None] = {}
    path: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        number[name] = low[name] = len(number)
        waiting[name] = None
        path.append((name, iter(uses[name])))

    for start in uses:
        if start not in number:
            enter(start)
        while path:
            name, left = path[-1]
            used = next(left, None)
            if used is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[name])
                if low[name] == number[name]:
                    group: list[str] = []
                    while not group or group[-1] != name:
                        group.append(waiting.popitem()[0])
                    yield group
            elif used not in number:
                enter(used)
            elif used in waiting:
                low[name] = min(low[name], number[used])


def _nesting(node: Node) -> int:
    match node:
        case Chars() | Ref():
            return 0
        case Repeat(item):
            return 1 + _nesting(item)
        case Seq(parts) | Alt(parts):
            return 1 + max(map(_nesting, parts), default=0)


def endless_rule(grammar: Grammar) -> str | None:
    """A rule that can stand for itself with nothing beside it, if there is one: some engines follow it
    without end."""
    empty = empty_rules(grammar.rules)
    alone = {name: sorted(_alone(node, empty)) for name, node in grammar.rules.items()}
    for group in _groups(alone):
        if len(group) > 1 or group[0] in alone[group[0]]:
            return group[0]
    return None


def empty_rules(rules: Mapping[str, Node]) -> set[str]:
    """Those that match the empty text."""
    return _fixpoint(rules, is_empty)


def is_empty(node: Node, empty: Set[str]) -> bool:
    """Whether `node` matches the empty text, as the rules `empty` do."""
    match node:
        case Chars():
            return False
        case Ref(name):
            return name in empty
        case Seq(items):
            return all(is_empty(item, empty) for item in items)
        case Alt(options):
            return any(is_empty(option, empty) for option in options)
        case Repeat(item, low):
            return low == 0 or is_empty(item, empty)


def _alone(node: Node, empty: Set[str]) -> set[str]:
    """The rules that `node` can stand for with nothing beside them."""
    match node:
        case Chars():
            return set()
        case Ref(name):
            return {name}
        case Alt(options):
            return set().union(*(_alone(option, empty) for option in options))
        case Repeat(item, low):
            return _alone(item, empty) if low <= 1 or is_empty(item, empty) else set()
        case Seq(items):
            full = [item for item in items if not is_empty(item, empty)]
            if len(full) > 1:
                return set()
            return set().union(*(_alone(item, empty) for item in full or items))
