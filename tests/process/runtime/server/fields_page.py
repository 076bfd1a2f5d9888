"""Writes tutorials/fields.md: what becomes here of each field that sglang and vLLM take, read off the OpenAPI
document and the tables of what the routes refuse.

    python -m tests.process.runtime.server.fields_page          says whether the page is up to date
    python -m tests.process.runtime.server.fields_page --write  brings it up to date
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.protocol.requests import generate
from runtime.protocol.sampling import SAMPLING_KEYS
from runtime.server.app import describe
from runtime.server.http.ignored import OTHER_DEFAULTS as ELSEWHERE
from runtime.server.openai import chat, params
from runtime.server.openai.responses import job
from runtime.server.output_format import StructuredOutputs

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[3] / "tutorials" / "fields.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
OTHERS = HERE / "fields_of_others.txt"
SERVERS = ("sglang", "vLLM")
REFUSED: dict[str, Mapping[str, str]] = {
    "/v1/chat/completions": {**params._REFUSED, **chat._REFUSED},
    "/v1/completions": params._REFUSED,
    "/v1/responses": job._REFUSED,
    "/generate": dict(generate._UNSERVED),
    "/api/generate": dict.fromkeys(("template", "context"), "the model's own template is used"),
    "structured_outputs": {"disable_additional_properties": "set additionalProperties: false in the schema"},
}
"""Fields that the document has, and the routes refuse all the same where they say something."""
NO_EFFECT: dict[str, Collection[str]] = {
    "/v1/chat/completions": params.NO_EFFECT,
    "/v1/completions": params.NO_EFFECT,
    "/v1/responses": params.NO_EFFECT - {"store", "metadata"},
    "/v1/embeddings": ("user",),
    "/v1/messages": ("metadata", "service_tier"),
    "/v1/score": ("user",),
    "/v1/rerank": ("user",),
    "/tokenize": ("model",),
    "/detokenize": ("model",),
    "/api/chat": ("keep_alive",),
    "/api/generate": ("keep_alive",),
    "structured_outputs": ("disable_fallback",),
    "sampling_params": ("spaces_between_special_tokens",),
}


def others() -> dict[str, dict[str, list[str]]]:
    """path -> server -> names."""
    found: dict[str, dict[str, list[str]]] = {}
    text = "\n".join(line for line in OTHERS.read_text(encoding="utf-8").splitlines() if line[:1] != ";")
    for line in text.replace("\n    ", " ").splitlines():
        path, server, names = (part.strip() for part in line.split("|"))
        found.setdefault(path, {})[server] = names.split()
    return found


@functools.cache
def known() -> dict[str, frozenset[str]]:
    """path -> the fields that the document has."""
    document: dict[str, Any] = json.loads(msgspec.json.encode(describe()))
    made = {
        "sampling_params": frozenset(SAMPLING_KEYS),
        "structured_outputs": frozenset(StructuredOutputs.__struct_encode_fields__),
    }
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        made[path] = frozenset(schema["properties"])
    return made


def status(path: str, name: str, here: frozenset[str]) -> str:
    if name not in here:
        default = f"; its default {json.dumps(ELSEWHERE[name])} is taken" if name in ELSEWHERE else ""
        return f"refused{default}"
    if name in REFUSED.get(path, {}):
        return f"refused: {REFUSED[path][name]}"
    return "no effect" if name in NO_EFFECT.get(path, ()) else "taken"


def table() -> str:
    """A section for each path."""
    fields, lines = known(), []
    for path, by_server in others().items():
        lines += ["", f"### `{path}`", "", "| field | sglang | vLLM | here |", "|---|---|---|---|"]
        for name in sorted({name for names in by_server.values() for name in names}):
            marks = " | ".join("yes" if name in by_server.get(server, ()) else "" for server in SERVERS)
            lines.append(f"| `{name}` | {marks} | {status(path, name, fields[path])} |")
    return "\n".join([*lines, ""])


def written(page: str) -> str:
    """The page with the table as it is now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    made = written(page)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if made != page:
        print("the page is not up to date", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
