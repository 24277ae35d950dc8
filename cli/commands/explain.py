"""`baton explain`: where a prompt would run now, and what each place is predicted to cost."""

import argparse

from baton.inference.v1 import cluster_service_pb2, generate_pb2
from cli.connection import connect
from cli.request import set_prompt, text_of
from cli.terminal import output, table

_NUMBERS = ["total ms", "wait", "prefill", "transfer", "decode", "stall", "distance", "load", "cached", "uncached"]


async def run(arguments: argparse.Namespace) -> int:
    """Prints the candidates, the best first, and what is said of each worker."""
    request = generate_pb2.GenerateRequest(model=text_of("model", arguments.model))
    set_prompt(request, arguments)
    async with connect(arguments) as client:
        response = await client.explain_route(request)
    print(f"policy {response.policy}, {response.prompt_tokens} prompt tokens")
    if response.candidates:
        columns = ["prefill", "decode", *_NUMBERS, "peer", "near", "cache"]
        output().print(table(columns, [_row(each) for each in response.candidates], numbers=_NUMBERS))
    for line in response.workers:
        print(line)
    return 0


def _row(candidate: cluster_service_pb2.RouteCandidate) -> list[str]:
    seconds = (
        candidate.total_seconds,
        candidate.wait_seconds,
        candidate.prefill_seconds,
        candidate.transfer_seconds,
        candidate.decode_seconds,
        candidate.stall_seconds,
        candidate.distance_seconds,
        candidate.load_seconds,
    )
    return [
        candidate.prefill_worker_id or "none",
        candidate.decode_worker_id,
        *(f"{each * 1e3:.1f}" for each in seconds),
        str(candidate.cached_tokens),
        str(candidate.uncached_tokens),
        f"{candidate.peer_tokens} of {candidate.peer_worker_id}" if candidate.peer_tokens else "-",
        candidate.nearness or "-",
        "reported" if candidate.has_kv_events else "estimated",
    ]
