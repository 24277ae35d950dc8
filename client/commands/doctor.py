"""`baton doctor`: what is wrong with this installation and this cluster, and what to do about it."""

import argparse
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from client.address import find_address
from client.doctor.finding import Finding, Severity, broken


async def run(arguments: argparse.Namespace) -> int:
    """Prints every finding, the remedy below it. Exit code 1 if something is broken."""
    count = 0
    async for finding in _findings(arguments):
        print(f"  {finding.severity.value:<8} {finding.found}")
        if finding.remedy:
            print(f"  {'':<8} -> {finding.remedy}")
        count += finding.severity is Severity.BROKEN
    print(f"\n{count} broken" if count else "\nnothing is broken")
    return 1 if count else 0


async def _findings(arguments: argparse.Namespace) -> AsyncGenerator[Finding, None]:
    """From the inside out, for as long as there is something to look at it with: packages may be missing."""
    try:
        if arguments.config:
            async for finding in _deployment([Path(each) for each in arguments.config]):
                yield finding
            return
        async for finding in _installation():
            yield finding
        async for finding in _surroundings(arguments):
            yield finding
    except ImportError as error:
        yield broken(f"{error}; what needs it was not looked at", "make install protos")


async def _installation() -> AsyncGenerator[Finding, None]:
    from client.doctor import packages, stubs

    for check in (packages.check_python, packages.check_versions, packages.check_names, stubs.check_stubs):
        for finding in check():
            yield finding


async def _surroundings(arguments: argparse.Namespace) -> AsyncGenerator[Finding, None]:
    from client.credentials import find_credentials
    from client.doctor import host
    from client.doctor.cluster import check_cluster

    for check in (host.check_etcd, host.check_ports, host.check_shared_memory, host.check_memory):
        for finding in check():
            yield finding
    async for finding in check_cluster(find_address(arguments.address), find_credentials(arguments)):
        yield finding


async def _deployment(paths: Sequence[Path]) -> AsyncGenerator[Finding, None]:
    """What files say about processes that need not run: those that they start, as if in this folder."""
    from client.doctor.deployment import EnvoyFile, Start, read
    from client.doctor.effective import ask
    from client.doctor.timeouts import check_timeouts
    from rpc.errors import ConfigError

    folder = Path.cwd()
    try:
        found = list(read(paths, folder))
        processes = [await ask(each, folder) for each in found if isinstance(each, Start)]
    except ConfigError as error:
        yield broken(error.message, "mend it")
        return
    if not found:
        yield broken("nothing in these files starts a process of Baton or an Envoy", "name other files, or folders")
    for finding in check_timeouts(processes, [each for each in found if isinstance(each, EnvoyFile)]):
        yield finding
