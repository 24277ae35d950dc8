"""Terminal output: tables, and the consoles for standard output and error."""

import sys
from collections.abc import Sequence

from baton.errors import ConfigError

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise ConfigError("this command needs the extra `cli`: pip install 'baton-serving[cli]'") from error

__all__ = ["Table", "errors", "output", "printable", "table"]

# Output to a pipe or file is not cut at a terminal's width.
PIPE_WIDTH = 200


def output() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False, emoji=False)


def errors() -> Console:
    """Standard error."""
    return Console(
        stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False, markup=False, emoji=False
    )


def printable(text: str) -> str:
    """A text without what moves the cursor or changes colours: a file or a server may have sent it."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> Table:
    """Rows under headings; the columns named in `numbers` are aligned to the right."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        drawn.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn
