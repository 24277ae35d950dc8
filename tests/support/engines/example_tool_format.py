"""A format of tool calls that is not part of Baton, as docs/extending.md shows it: `<call NAME {...}/>`."""

from router.text.parsing.blocks import BlockParser
from router.text.parsing.formats import ToolFormat


def read(body: str) -> list[tuple[str, str]] | None:
    name, found, arguments = body.strip().partition(" ")
    return [(name, arguments)] if found else None


FORMAT = ToolFormat("xml", ("<call name=",), (), lambda names: BlockParser("<call ", "/>", read))
