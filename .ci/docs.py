"""Writes the pages of the documentation that are made from the code: commands, models, formats, policies,
figures, notebooks, and llms.txt.

    make docs                        # these pages, then the site below build/site; warnings are errors
    python .ci/docs.py               # the pages alone
    python .ci/docs.py --check       # exit code 1 where one of them is stale (a test does this)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import notebooks
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DOCS = ROOT / "tutorials"
MADE = "<!-- Made by .ci/docs.py; edit that, or the code. -->\n\n"


def _cell(text: Any) -> str:
    plain = re.sub(r"\s+", " ", str(text)).strip().replace("|", r"\|")
    return re.sub(r"(?<!`)<([^>`]*)>(?!`)", r"&lt;\1&gt;", plain)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


# -- commands ------------------------------------------------------------------------------------------------


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = ""
    if action.nargs != 0:
        metavar = action.metavar or action.dest.upper()
        value = " " + (metavar if isinstance(metavar, str) else " ".join(metavar))
        value += " ..." if action.nargs in ("+", "*") else ""
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _options(parser: argparse.ArgumentParser) -> str:
    """The options of a parser by its groups; what --help hides is left out."""
    parser.format_help()  # help texts are read when they are shown
    out = []
    for group in parser._action_groups:
        rows = [
            (_spelled(action), action.help or "")
            for action in group._group_actions
            if action.help != argparse.SUPPRESS and action.dest != "help"
        ]
        if rows:
            out.append(
                f"**{(group.title or 'options').capitalize()}**\n\n" + table(("option", "meaning"), rows)
            )
    return "\n".join(out)


def _verbs(parser: argparse.ArgumentParser) -> Iterable[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {one.dest: one.help or "" for one in action._choices_actions}
            yield from ((name, verb, said.get(name, "")) for name, verb in action.choices.items())


def commands() -> str:
    from runtime.config.flags import SERVE, make_parser
    from runtime.config.serving.router import RouterConfig
    from sglang_dsl.__main__ import parser

    out = [
        "# Commands\n\nEvery option of every command. `COMMAND --help` prints the same.\n\n"
        "Two commands: `sglang-dsl` (or `python -m sglang_dsl`) for programs, `python -m runtime` for "
        "servers.\n"
    ]
    for name, verb, said in _verbs(parser()):
        out.append(f"\n## sglang-dsl {name}\n\n{said[:1].upper()}{said[1:]}.\n\n{_options(verb)}")
    out.append(
        "\n## python -m runtime serve\n\nServe a model over HTTP. Without options: the bundled model, for "
        "this machine only, on `http://127.0.0.1:30000`. Each option can also be set in a YAML file "
        "(`--config FILE`) or an environment variable ([more](../serving.md#options)).\n\n"
        + _options(make_parser("python -m runtime serve", groups=SERVE))
    )
    out.append(
        "\n## python -m runtime router\n\nOne address in front of several servers. "
        "[The router](../router.md) explains it.\n\n"
        + _options(make_parser("python -m runtime router", groups=(("router", RouterConfig),)))
    )
    return "".join(out)


# -- what is supported ---------------------------------------------------------------------------------------


def models() -> str:
    from runtime.config.encoder import ENCODERS
    from runtime.config.family import ARCHITECTURES
    from runtime.config.gguf import settings

    def listed(names: Iterable[str]) -> str:
        return table(("`architectures` in config.json",), ((f"`{name}`",) for name in names))

    gguf = ", ".join(f"`{name}`" for name in sorted(settings.ARCHITECTURES))
    return (
        "# Supported models\n\nA model is a Hugging Face directory: `config.json`, safetensors, tokenizer. "
        "Its `architectures` field must be one of these.\n\n"
        f"## Text generation\n\n{listed(ARCHITECTURES.names())}\n"
        f"## Embeddings and classification\n\n{listed(ENCODERS.names())}\n"
        f"## GGUF files\n\nThe architectures {gguf}.\n\n"
        "A model of your own is one file and one entry point, of the group `sglang_dsl.model`.\n"
    )


def formats() -> str:
    from runtime.formats.chat import chat_template_registry
    from runtime.formats.reasoning.marks import REASONING_TYPES
    from runtime.formats.tools.table import FORMATS

    def line(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names) + "\n"

    return (
        "# Supported formats\n\n"
        "## Chat templates\n\nThe checkpoint's own Jinja template is used where it has one. "
        "`--chat-template` names one of these, or a file ([more](../chat_formats.md)).\n\n"
        f"{line(sorted(chat_template_registry))}\n"
        f"## Tool calls\n\n`--tool-call-parser` names one.\n\n{line(FORMATS.names())}\n"
        f"## Reasoning\n\n`--reasoning-parser` names one.\n\n{line(sorted(REASONING_TYPES))}"
    )


def plugins() -> str:
    from runtime.attention.table import ATTENTION
    from runtime.cache.radix import EVICTION
    from runtime.disagg.transfer.kv_manager import KV_TRANSFERS
    from runtime.grammar.table import GRAMMAR_BACKENDS
    from runtime.scheduler.policies import POLICIES
    from runtime.server.router.policies import POLICIES as ROUTER_POLICIES
    from sglang_dsl.backends import BACKENDS

    rows = (
        ("language backends", "--backend", BACKENDS),
        ("grammar backends", "--grammar-backend", GRAMMAR_BACKENDS),
        ("schedule policies", "--schedule-policy", POLICIES),
        ("attention", "--attention", ATTENTION),
        ("eviction of cached prefixes", "--eviction-policy", EVICTION),
        ("KV transfers", "--disaggregation-transfer-backend", KV_TRANSFERS),
        ("router policies", "--policy", ROUTER_POLICIES),
    )
    return (
        "# Backends and policies\n\nEach is chosen by name. A package of your own adds one by an entry "
        "point.\n\n"
        + table(
            ("what", "option", "names", "entry-point group"),
            (
                (what, f"`{flag}`", ", ".join(f"`{name}`" for name in registry.names()),
                 f"`sglang_dsl.{registry.kind.replace(' ', '.')}`")
                for what, flag, registry in rows
            ),
        )
    )  # fmt: skip


# -- figures -------------------------------------------------------------------------------------------------


def performance() -> str:
    """The dated results, each with the line that says how it was measured."""
    out = [
        "# Performance\n\nThe latest figures of each benchmark, as it wrote them, with date, commit and "
        "machine. "
        "Compare ratios within one table: single figures depend on the machine. "
        "`benchmarks/README.md` says how to run them.\n"
    ]
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.md"), key=lambda one: one.name[11:]):
        text = re.sub(
            r"^(#+) ",
            lambda found: "#" + found[1] + " ",
            file.read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        out.append("\n" + text.strip() + "\n")
    return "".join(out)


# -- for language models -------------------------------------------------------------------------------------


def _flat(nav: list[Any], section: str = "") -> Iterable[tuple[str, str, str]]:
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, list):
                yield from _flat(target, title)
            else:
                yield section, title, target


def llms() -> str:
    """https://llmstxt.org: a title, a summary, sections of links."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]
    out = [
        "# sglang-dsl\n\n> A structured-generation programming language with its own inference runtime. "
        "Python functions with `gen`, `select` and `regex=` run against the bundled engine, a server, "
        "or an API.\n"
    ]
    section = None
    for part, title, target in _flat(nav):
        if part != section:
            section = part
            out.append(f"\n## {part or 'Start'}\n\n")
        out.append(f"- [{title}]({target})\n")
    return "".join(out)


PAGES = {
    "reference/commands.md": commands,
    "reference/models.md": models,
    "reference/formats.md": formats,
    "reference/plugins.md": plugins,
}
NOT_KEPT = {"reference/performance.md": performance}
"""Made for the site alone, as the notebooks' pages are: the results are in the repository already."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; say which are stale")
    check = parser.parse_args().check
    made = {name: MADE + make() for name, make in PAGES.items()} | {"llms.txt": llms()}
    if not check:
        made |= {name: MADE + make() for name, make in NOT_KEPT.items()} | notebooks.pages()
    stale = []
    for name, text in made.items():
        file = DOCS / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                file.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"tutorials/{name}: {'stale; run `make docs`' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
