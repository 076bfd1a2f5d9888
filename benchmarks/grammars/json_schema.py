"""JSON schemas in the wild: what is kept, what is refused, how fast:
`python -m benchmarks.grammars.json_schema`.

Reads the schema sample and the JSON-Schema-Test-Suite from the folder that SGLANG_DSL_DATA names, feeds every
instance, written as masks offer it, through the backend "auto", and tells by keyword how many were judged
right. Then times compiling and masks over a vocabulary made of the words of this repository. Writes the
tables, dated, to benchmarks/results/. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import collections
import gc
import gzip
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.measuring import HERE, RESULTS, conditions, keep
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint, SchemaFormat
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary
from tests.unit.runtime.grammar.json_schema.spelled import takes_value, written

KEYWORDS = {
    "$dynamicRef", "$ref", "additionalProperties", "allOf", "anyOf", "const", "contains",
    "dependencies", "dependentRequired", "dependentSchemas", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "if", "items", "maxItems", "maxLength", "maxProperties",
    "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf",
    "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required",
    "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip


class Case(NamedTuple):
    """A schema, and (instance, whether it is valid) pairs. `formats`: what `format` does in it."""

    name: str
    schema: Any
    tests: list[tuple[Any, bool]]
    formats: SchemaFormat = "assertion"


def sample(folder: Path) -> Iterator[Case]:
    with gzip.open(folder / "maskbench_sample.jsonl.gz", "rt") as lines:
        for line in lines:
            case = json.loads(line)
            yield Case(
                case["name"], case["schema"], [(test["data"], test["valid"]) for test in case["tests"]]
            )


def suite(folder: Path) -> Iterator[Case]:
    with tarfile.open(folder / "json_schema_test_suite_2020-12.tar.gz") as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            source = archive.extractfile(member) if member.name.endswith(".json") else None
            for group in json.load(source) if source else []:
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                # Its README: format.json is for `format` as an annotation, optional/format for the other.
                formats: SchemaFormat = "annotation" if member.name.endswith("/format.json") else "assertion"
                yield Case(f"{member.name}: {group['description']}", group["schema"], tests, formats)


def keywords(schema: Any) -> set[str]:
    """The keywords that occur anywhere in a schema."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            found |= node.keys() & KEYWORDS
        waiting.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
    return found


def constraint(case: Case) -> Constraint:
    return Constraint("json_schema", json.dumps(case.schema), schema_format=case.formats)


_EMPTY = re.compile("nothing matches|the schema is false|enum is empty")
"""What is said of a schema that no value matches."""


def judge(cases: list[Case], title: str) -> list[str]:
    """Lines of a report: totals, refusals by reason, and a row for each keyword."""
    backend = make_backend("auto", BYTES)
    totals: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in tqdm(cases, desc=title, leave=False):
        words = keywords(case.schema)
        try:
            matcher = backend.compile(constraint(case))
        except BadConstraint as error:
            told = "empty" if _EMPTY.search(str(error)) else "refused"
            counts = collections.Counter({"schemas": 1, told: 1})
            if told == "empty":  # a verdict on every instance: it is invalid
                judged = collections.Counter("valid" if valid else "invalid" for _, valid in case.tests)
                counts += judged + collections.Counter({"valid rejected": judged["valid"]})
                counts["passing"] = int(not judged["valid"])
            reasons[re.sub(r"json_schema( #\S*)?: ", "", str(error)).split("'")[0][:60].strip()] += 1
        else:
            counts = collections.Counter({"schemas": 1, "exact" if matcher.origin.exact else "checked": 1})
            for value, valid in case.tests:
                taken = takes_value(matcher, value, case.schema)
                counts["valid" if valid else "invalid"] += 1
                counts["invalid accepted"] += taken and not valid
                counts["valid rejected"] += valid and not taken
            counts["passing"] = int(not counts["invalid accepted"] + counts["valid rejected"])
        totals += counts
        for word in words:
            rows[word] += counts
    columns = (
        "schemas",
        "exact",
        "checked",
        "empty",
        "refused",
        "passing",
        "valid",
        "valid rejected",
        "invalid",
        "invalid accepted",
    )
    lines = [f"## {title}", "", f"| keyword | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in [("**all**", totals), *sorted(rows.items())]:
        lines.append(f"| {name} | {' | '.join(str(row[column]) for column in columns)} |")
    lines += [
        "",
        "Refused: " + ("; ".join(f"{count} x {why}" for why, count in reasons.most_common()) or "none") + ".",
        "",
    ]
    return lines


def vocabulary(size: int) -> Vocabulary:
    """Single bytes and the commonest pieces of words in this repository's sources."""
    pieces: collections.Counter[str] = collections.Counter()
    for path in sorted(HERE.parent.glob("*/**/*.py"))[:500]:
        for word in re.findall(
            r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+", path.read_text(errors="ignore")
        ):
            for end in range(2, min(len(word), 24) + 1):
                pieces[word[:end]] += 1
    singles = [bytes([value]) for value in range(256)]
    tokens = list(dict.fromkeys([*singles, *(piece.encode() for piece, _ in pieces.most_common(2 * size))]))
    tokens = tokens[: size - 1]
    return Vocabulary((*tokens, b""), frozenset({len(tokens)}), frozenset({len(tokens)}))


def longest_first(vocab: Vocabulary, data: bytes) -> list[int]:
    ids = {token: number for number, token in enumerate(vocab.tokens) if token}
    longest, found, at = max(map(len, ids)), [], 0
    while at < len(data):
        length = next(n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in ids)
        found.append(ids[data[at : at + length]])
        at += length
    return found


def speed(cases: list[Case], size: int) -> list[str]:
    vocab = vocabulary(size)
    backend = make_backend("auto", vocab)
    backend.compile(Constraint("json_schema", "{}"))
    gc.collect()
    gc.freeze()  # as the scheduler's process does after its start
    compiles: list[float] = []
    masks: dict[str, list[float]] = {"exact": [], "checked": []}
    steps: list[float] = []
    for case in tqdm(cases, desc="speed", leave=False):
        start = time.process_time()
        try:
            first = backend.compile(Constraint("json_schema", json.dumps(case.schema)))
        except BadConstraint:
            continue
        compiles.append(time.process_time() - start)
        kind = "exact" if first.origin.exact else "checked"
        for value, _ in (test for test in case.tests if test[1]):
            matcher = first.copy()
            for token in longest_first(vocab, written(first, value, case.schema) or b"")[:2000]:
                start = time.process_time()
                matcher.mask()
                middle = time.process_time()
                masks[kind].append(middle - start)
                if not matcher.advance(token):
                    break
                steps.append(time.process_time() - middle)
    lines = [
        f"## Speed, {len(vocab)} tokens",
        "",
        "| | count | p50 | p90 | p99 | max |",
        "|---|---|---|---|---|---|",
    ]
    named = [("compile and first mask, ms", compiles, 1e3), ("mask where exact, us", masks["exact"], 1e6),
             ("mask where checked, us", masks["checked"], 1e6), ("advance, us", steps, 1e6)]  # fmt: skip
    for name, values, scale in named:
        if values:
            parts = np.percentile(np.array(values) * scale, [50, 90, 99, 100])
            lines.append(f"| {name} | {len(values)} | {' | '.join(f'{part:.1f}' for part in parts)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SGLANG_DSL_DATA", "data")))
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    schemas = list(sample(given.data))
    lines = ["# JSON Schema", "", f"{conditions()}.", ""]
    lines += judge(schemas, "Schema sample")
    lines += judge(list(suite(given.data)), "JSON-Schema-Test-Suite, draft 2020-12 with optional tests")
    lines += [
        "`format` is an annotation in format.json and asserts everywhere else (optional/format), as the",
        "suite's README asks. Empty: schemas that nothing matches, told so when compiled; by that all",
        "instances are invalid. Refused are references to files that are neither in the schema nor in the",
        "archive. The valid one rejected is of vocabulary.json: its metaschema, which leaves out the",
        "validation vocabulary, is such a file, too; one that is not known has all vocabularies (2020-12,",
        "core, 8.1.2).",
        "",
    ]
    lines += speed(schemas, given.vocabulary)
    text = "\n".join(lines)
    print(text)
    keep("json-schema", text, folder=given.results)


if __name__ == "__main__":
    main()
