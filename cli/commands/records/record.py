"""`baton record`: writes the records of a request to a file, for `baton replay` and `baton why`."""

import argparse
import sys

from baton import records
from cli.connection import connect
from cli.outputs import write_text
from cli.request import text_of


async def run(arguments: argparse.Namespace) -> int:
    """Writes the bundle to a file, or to standard output."""
    request_id = text_of("REQUEST_ID", arguments.request_id)
    async with connect(arguments, arguments.tenant) as client:
        found = await client.records(request_id)
    bundle = records.write_bundle(found)
    if arguments.output == "-":
        sys.stdout.write(bundle)
        return 0
    write_text("--output", arguments.output, bundle)
    print(f"{arguments.output}: {len(found)} {'record' if len(found) == 1 else 'records'} of {request_id}")
    return 0
