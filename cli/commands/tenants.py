"""`baton tenants`: what each tenant uses and waits for, at all routers of the fleet."""

import argparse

from baton.inference.v1 import cluster_service_pb2
from cli.connection import connect
from cli.terminal import output, table

_NUMBERS = ("running", "waiting", "longest wait", "work/min", "share", "requests left", "tokens left")


async def run(arguments: argparse.Namespace) -> int:
    """Prints a table of tenants."""
    async with connect(arguments) as client:
        response = await client.tenants()
    if response.tenants:
        output().print(table(("tenant", *_NUMBERS), [_row(each) for each in response.tenants], numbers=_NUMBERS))
    else:
        print("no tenant is known: none has sent a request, or admission.fairness is none and there are no quotas")
    for router in response.missing_routers:
        print(f"router {router} did not answer: its part is missing")
    return 0


def _row(usage: cluster_service_pb2.TenantUsage) -> list[str]:
    return [
        usage.tenant or "(default)",
        str(usage.running),
        str(usage.waiting),
        f"{usage.longest_wait.ToNanoseconds() / 1e9:.1f} s" if usage.waiting else "-",
        f"{usage.recent_work:.0f}",
        f"{usage.share:.0%}",
        f"{usage.requests_left:.0f}" if usage.HasField("requests_left") else "-",
        f"{usage.tokens_left:.0f}" if usage.HasField("tokens_left") else "-",
    ]
