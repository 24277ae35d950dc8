"""`baton doctor`: what is wrong with this installation and this cluster, and what to do about it."""

import argparse
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

from client.address import find_address
from client.doctor.finding import Finding, Severity
from client.doctor.host import check_etcd, check_memory, check_ports, check_shared_memory
from client.doctor.packages import check_names, check_python, check_versions
from client.doctor.stubs import check_stubs

INSTALLATION: tuple[Callable[[], Iterator[Finding]], ...] = (check_python, check_versions, check_names, check_stubs)
MACHINE: tuple[Callable[[], Iterator[Finding]], ...] = (check_etcd, check_ports, check_shared_memory, check_memory)


async def run(arguments: argparse.Namespace) -> int:
    """Prints every finding, the remedy below it. Exit code 1 if something is broken.

    Plain text and late imports: it has to run where packages are missing or do not load.
    """
    broken = 0
    async for finding in _findings(arguments.address):
        print(f"  {finding.severity.value:<8} {finding.found}")
        if finding.remedy:
            print(f"  {'':<8} -> {finding.remedy}")
        broken += finding.severity is Severity.BROKEN
    print(f"\n{broken} broken" if broken else "\nnothing is broken")
    return 1 if broken else 0


async def _findings(address: str | None) -> AsyncGenerator[Finding, None]:
    """Everything is looked at; what needs a sound installation only if it is one."""
    sound = True
    for finding in _all(INSTALLATION):
        sound = sound and finding.severity is not Severity.BROKEN
        yield finding
    if not sound:
        return
    for finding in _all(MACHINE):
        yield finding
    from client.doctor.cluster import check_cluster

    async for finding in check_cluster(find_address(address)):
        yield finding


def _all(checks: Iterable[Callable[[], Iterator[Finding]]]) -> Iterator[Finding]:
    for check in checks:
        yield from check()
