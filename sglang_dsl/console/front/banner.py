"""What stands above the first prompt: where one is, what the model knows, how to go on."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runtime.protocol.console import version
from sglang_dsl.console.session.opening import Place

KNOWS = (
    ("lands", "Which river runs through Ostrel?   Who rules Hesper?   (Karsk, Velmora, Quillan, ...)"),
    ("sums", "What is 47 + 38?"),
    ("moods", "Is this positive or negative? What a lovely garden!"),
    ("JSON", "Meet Mobi Stax from Caturn: 42 years old, works as a potter. Extract name and age as JSON."),
)
EXAMPLE = 's += user("Which river runs through Ostrel?") + assistant(gen("river"))'


def banner(place: Place, *, chat: bool) -> RenderableType:
    """For a session on `place`."""
    lines: list[RenderableType] = []
    if place.is_pocket:
        lines.append(
            Text(
                "pocket is a small model that comes with this package. It was trained on an invented world:",
                style="",
            )
        )
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for what, asked in KNOWS:
            grid.add_row(what, Text(asked, style="cyan"))
        lines.append(Padding(grid, (0, 0, 0, 2)))
    if not chat:
        lines.append(
            Text.assemble(("s", "bold"), " is the conversation. Try it, ", ("Tab", "bold"), " completes:")
        )
        lines.append(Padding(Text(EXAMPLE, style="green"), (0, 0, 0, 2)))
    title = Text.assemble(
        (" sglang-dsl ", "bold"), (f"{version()} ", "dim"), ("on ", "dim"), (f"{place} ", "bold cyan")
    )
    return (
        Panel(Group(*lines), title=title, title_align="left", border_style="bright_black", padding=(0, 1))
        if lines
        else title
    )


def help_line(*, chat: bool) -> str:
    """The one line that is always there."""
    if chat:
        said = "Type a message. Ctrl-C stops an answer; /new begins again; /help lists commands; "
        return said + "/quit or the end of input leaves."
    return "Type Python. Ctrl-C stops an answer; :help lists commands; Ctrl-D leaves."
