"""Schemas in the wild and the JSON-Schema-Test-Suite, where SGLANG_DSL_DATA names a folder that holds
them."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest

from runtime.protocol.errors import BadConstraint
from tests.unit.runtime.grammar.json_schema.spelled import is_offered, takes_value

DATA = Path(os.environ.get("SGLANG_DSL_DATA", "/nonexistent"))
SAMPLE = DATA / "maskbench_sample.jsonl.gz"
SUITE = DATA / "json_schema_test_suite_2020-12.tar.gz"


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs SGLANG_DSL_DATA")
def test_schema_sample(small):
    passed, schemas, wrong_accepts, wrong_rejects, good = 0, 0, [], [], 0
    with gzip.open(SAMPLE, "rt") as lines:
        for line in lines:
            case = json.loads(line)
            schemas += 1
            try:
                face = small.matcher(case["schema"])
            except BadConstraint:
                continue
            found = [
                (test["valid"], takes_value(face.matcher, test["data"], case["schema"]))
                for test in case["tests"]
            ]
            good += sum(valid for valid, _ in found)
            wrong_accepts += [case["name"] for valid, taken in found if taken and not valid]
            wrong_rejects += [case["name"] for valid, taken in found if valid and not taken]
            passed += all(valid == taken for valid, taken in found)
    assert wrong_accepts == []
    assert len(wrong_rejects) <= 0.002 * good, wrong_rejects
    assert passed >= 0.95 * schemas


NOT_OFFERED = {
    "validation of A-label (punycode) host names",  # masks spell the labels of other scripts in no way
    "validation of an internationalized e-mail addresses",
    "all integers are multiples of 0.5, if overflow is handled",  # 1e308, for an integer
    "float and integers are equal up to 64-bit representation limits",  # 9007199254740992.0 for the integer
    "validation of JSON-pointers (JSON String Representation)",  # a control character in it
}
"""Groups of the suite with values whose texts are valid, and none that masks offer."""


@pytest.mark.skipif(not SUITE.exists(), reason="needs SGLANG_DSL_DATA")
def test_json_schema_test_suite(small):
    wrong_accepts, wrong_rejects, checks, good = [], [], 0, 0
    with tarfile.open(SUITE) as archive:
        for member in archive.getmembers():
            source = archive.extractfile(member) if member.name.endswith(".json") else None
            for group in json.load(source) if source else []:
                # Its README: format.json is for `format` as an annotation, optional/format for the other.
                policy = "annotation" if member.name.endswith("/format.json") else "assertion"
                try:
                    face = small.matcher(group["schema"], schema_format=policy)
                except BadConstraint:
                    continue
                for test in group["tests"]:
                    checks += 1
                    good += test["valid"]
                    taken = takes_value(face.matcher, test["data"], group["schema"])
                    name = (member.name, group["description"], test["description"])
                    if taken and not test["valid"]:
                        wrong_accepts.append(name)
                    offered = is_offered(test["data"]) and group["description"] not in NOT_OFFERED
                    if test["valid"] and not taken and offered:
                        wrong_rejects.append(name)
    assert wrong_accepts == []
    assert checks > 1900
    assert len(wrong_rejects) <= 0.002 * good, wrong_rejects
