"""The scheduler's rooms: guided decoding stands behind one interface, and each component of a request is
written by its owner alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from runtime.scheduler.requests.components import Guide, Logprobs
from runtime.scheduler.requests.request import Request, Timing

ROOT = Path(__file__).resolve().parents[3]
SCHEDULER = ROOT / "runtime" / "scheduler"
GUIDED = SCHEDULER / "guided"
INTERFACE = "runtime.scheduler.guided.decoding"
OWNERS = {
    Guide: GUIDED,
    Logprobs: SCHEDULER / "requests" / "components.py",
    Timing: SCHEDULER / "requests" / "request.py",
}
CHANGES = {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
OWNED = {name: owner for component, owner in OWNERS.items() for name in component.__slots__}


def written(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each attribute of anything but `self` that is assigned, deleted, or changed by a
    method of lists and dicts."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
        ):
            targets = [node.func.value]
        for target in targets:
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            for part in parts:
                while isinstance(part, (ast.Subscript, ast.Starred)):
                    part = part.value
                if isinstance(part, ast.Attribute) and not (
                    isinstance(part.value, ast.Name) and part.value.id == "self"
                ):
                    yield part.lineno, part.attr


def trespasses(path: Path, text: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} writes {name}"
        for line, name in written(ast.parse(text))
        if name in OWNED and path != OWNED[name] and OWNED[name] not in path.parents
    ]


def test_components_have_names_of_their_own() -> None:
    """By which the next test knows them."""
    names = [*Request.__slots__, *(name for component in OWNERS for name in component.__slots__)]
    assert len(names) == len(set(names))


def test_each_component_is_written_by_its_owner_alone() -> None:
    found = [
        one
        for path in sorted(SCHEDULER.rglob("*.py"))
        for one in trespasses(path, path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_trespass_is_found() -> None:
    text = (
        "a.guide.waits = True\nb.pending.pop(0)\ndel c.banned[1]\nx, d.timing.added_at = 1, 2\nself.waits = 1"
    )
    assert len(trespasses(SCHEDULER / "loop.py", text)) == 4
    assert len(trespasses(GUIDED / "masks.py", text)) == 1


def test_guided_decoding_is_entered_by_its_interface() -> None:
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        if GUIDED in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            else:
                continue
            for name in names:
                inside = name.startswith("runtime.scheduler.guided")
                assert not inside or name == INTERFACE or name.startswith(f"{INTERFACE}."), f"{path}: {name}"
