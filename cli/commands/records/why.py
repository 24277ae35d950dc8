"""`baton why`: one page about a request: where its time went, which decision was made why, and what failed."""

import argparse

from baton.errors import InvalidRequest
from cli.commands.records.page import decisions, summary
from cli.commands.records.request import read_records
from cli.connection import connect
from cli.request import text_of
from cli.terminal import output, printable
from cli.timings import timings_table


async def run(arguments: argparse.Namespace) -> int:
    """Prints the page of the latest record, from a router or from a bundle."""
    if bool(arguments.request_id) == bool(arguments.bundle):
        raise InvalidRequest.of("REQUEST_ID", "is needed, unless there is --bundle FILE")
    if arguments.bundle:
        records = read_records(arguments.bundle)
    else:
        async with connect(arguments, arguments.tenant) as client:
            records = await client.records(text_of("REQUEST_ID", arguments.request_id))
    record, console = records[-1], output()
    for line in summary(record, earlier=len(records) - 1):
        console.print(printable(line))
    console.print()
    console.print(timings_table(record.finished.timings, record.finished.usage))
    for line in decisions(record):
        console.print(printable(line))
    return 0
