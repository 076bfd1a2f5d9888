"""Grammars as trees, and what their shape tells without an engine: which rules can finish, how deep they
nest, how many states their counts come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from runtime.grammar.automata.charset import SURROGATES, difference
from runtime.grammar.automata.regex_syntax import (
    EMPTY,
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    nodes_of,
    parts_of,
)
from runtime.protocol.errors import BadConstraint

MAX_DEPTH = 1500
"""Nesting of rules and groups: engines recurse on their stack."""


class Grammar(NamedTuple):
    """`rules` that `root` can reach, each able to finish."""

    rules: Mapping[str, Node]
    root: str = "root"


def size_of(node: Node, sizes: Mapping[str, int] | None = None) -> int:
    """Characters and names of `node`, counts written out; `sizes` of the rules it refers to, else 1."""
    match node:
        case Ref(name):
            return 1 if sizes is None else sizes[name]
        case Repeat(item, low, high):
            return 1 + size_of(item, sizes) * max(low if high is None else high, 1)
        case Seq() | Alt():
            return 1 + sum(size_of(part, sizes) for part in parts_of(node))
        case _:
            return 1


def counted(grammar: Grammar) -> int:
    """How many states the counts of a grammar come to, those of single characters and short strings aside."""
    return sum(_counted(node) for node in grammar.rules.values())


def _counted(node: Node) -> int:
    match node:
        case Repeat(item, low, high):
            times = max(low if high is None else high, 1)
            return _counted(item) * times + (size_of(item) * times if times > 4 else 0)
        case _:
            return sum(map(_counted, parts_of(node)))


def written_out(grammar: Grammar) -> int:
    """Size of `root` with every rule that does not recur written in the place of its name: forty rules of two
    names each come to 2**40."""
    uses = {name: sorted(names_of(node)) for name, node in grammar.rules.items()}
    sizes: dict[str, int] = {}
    for group in _groups(uses):  # those used come before their users
        sizes.update(dict.fromkeys(group, 1))
        sizes.update({name: size_of(grammar.rules[name], sizes) for name in group})
    return sizes[grammar.root]


def productive(rules: Mapping[str, Node], kind: str) -> Grammar:
    """The grammar without what can never finish and what root never reaches. Raises BadConstraint."""
    done = _fixpoint(rules, _finishes)
    if "root" not in done:
        raise BadConstraint("no finite text matches: every way from 'root' goes on for ever", where=kind)
    kept: dict[str, Node] = {}
    ahead = ["root"]
    while ahead:
        name = ahead.pop()
        if name not in kept:
            kept[name] = _pruned(rules[name], done)
            ahead.extend(names_of(kept[name]))
    _check_depth(kept, kind)
    return Grammar({name: kept[name] for name in rules if name in kept})


def bottom_up(rules: Mapping[str, Node]) -> list[str]:
    """The rules without recursion, directly or through others, each after those it uses."""
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
    result: set[str] = set()
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for used in names_of(node):
            users.setdefault(used, []).append(name)
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in result and test(rules[name], result):
            result.add(name)
            queue.extend(users.get(name, ()))
    return result


def names_of(node: Node) -> set[str]:
    return {one.name for one in nodes_of(node) if isinstance(one, Ref)}


def _finishes(node: Node, done: set[str]) -> bool:
    match node:
        case Chars(ranges):
            return bool(difference(ranges, SURROGATES))
        case Ref(name):
            return name in done
        case Alt(options):
            return any(_finishes(option, done) for option in options)
        case Repeat(item, low):
            return low == 0 or _finishes(item, done)
        case _:
            return all(_finishes(item, done) for item in parts_of(node))


def _pruned(node: Node, done: set[str]) -> Node:
    match node:
        case Seq(items):
            return Seq(tuple(_pruned(item, done) for item in items))
        case Alt(options):
            return Alt(tuple(_pruned(option, done) for option in options if _finishes(option, done)))
        case Repeat(item, low, high):
            return Repeat(_pruned(item, done), low, high) if _finishes(item, done) else EMPTY
        case _:
            return node


def _check_depth(rules: Mapping[str, Node], kind: str) -> None:
    """Refuse what may take a reader that follows each rule at its first use deeper than MAX_DEPTH: the
    longest way down through groups of rules that use each other, each group taken as a whole."""
    uses = {name: sorted(names_of(node)) for name, node in rules.items()}
    depth: dict[str, int] = {}
    for group in _groups(uses):
        below = max((depth.get(used, 0) for name in group for used in uses[name]), default=0)
        total = below + sum(1 + nesting(rules[name]) for name in group)
        if total > MAX_DEPTH:
            text = f"rules and groups stand more than {MAX_DEPTH} inside of each other"
            raise BadConstraint(text, where=kind, hint="flatten it")
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


def nesting(node: Node, depths: Mapping[str, int] | None = None) -> int:
    """Groups inside of each other; `depths` of the rules that `node` refers to."""
    match node:
        case Ref(name):
            return 0 if depths is None else 1 + depths[name]
        case Seq() | Alt() | Repeat():
            return 1 + max((nesting(part, depths) for part in parts_of(node)), default=0)
        case _:
            return 0


def endless_rule(grammar: Grammar) -> str | None:
    """A rule that can derive itself alone, if there is one: some engines follow it without end."""
    empty = empty_rules(grammar.rules)
    alone = {name: sorted(_alone(node, empty)) for name, node in grammar.rules.items()}
    for group in _groups(alone):
        if len(group) > 1 or group[0] in alone[group[0]]:
            return group[0]
    return None


def empty_rules(rules: Mapping[str, Node]) -> set[str]:
    """The rules that match the empty text."""
    return _fixpoint(rules, is_empty)


def is_empty(node: Node, empty: Set[str]) -> bool:
    """Whether `node` matches the empty text, as the rules `empty` do."""
    match node:
        case Ref(name):
            return name in empty
        case Seq(items):
            return all(is_empty(item, empty) for item in items)
        case Alt(options):
            return any(is_empty(option, empty) for option in options)
        case Repeat(item, low):
            return low == 0 or is_empty(item, empty)
        case _:
            return False


def _alone(node: Node, empty: Set[str]) -> set[str]:
    """The rules that `node` can derive alone."""
    match node:
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
        case _:
            return set()
