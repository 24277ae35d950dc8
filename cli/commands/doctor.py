"""`baton doctor`: checks this installation, this cluster or a deployment, and suggests remedies."""

import argparse
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from cli.address import find_address
from devtools.doctor.finding import Finding, Severity, broken


async def run(arguments: argparse.Namespace) -> int:
    """Prints every finding with its remedy. Exit code 1 if something is broken."""
    count = 0
    async for finding in _findings(arguments):
        print(f"  {finding.severity.value:<8} {finding.found}")
        if finding.remedy:
            print(f"  {'':<8} -> {finding.remedy}")
        count += finding.severity is Severity.BROKEN
    print(f"\n{count} broken" if count else "\nnothing is broken")
    return 1 if count else 0


async def _findings(arguments: argparse.Namespace) -> AsyncGenerator[Finding, None]:
    """Checks from the inside out, until a package that a check needs is missing."""
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
        yield broken(f"{error}; the checks that need it were skipped", "make install protos")


async def _installation() -> AsyncGenerator[Finding, None]:
    from devtools.doctor import packages

    for check in (packages.check_python, packages.check_versions, packages.check_names, packages.check_stubs):
        for finding in check():
            yield finding


async def _surroundings(arguments: argparse.Namespace) -> AsyncGenerator[Finding, None]:
    from cli.connection import find_credentials
    from cli.local.plan import etcd_binary
    from cli.local.ports import PREFERRED_ROUTER_PORT
    from cli.local.state import StateFolder
    from devtools.doctor import host
    from devtools.doctor.cluster import RouterTarget, check_cluster
    from runtime.machine import visible_gpus

    state = StateFolder().read()
    for findings in (
        host.check_etcd(etcd_binary),
        host.check_port(PREFERRED_ROUTER_PORT, state.address if state else None),
        host.check_shared_memory(),
        host.check_memory(),
        host.check_gpus(visible_gpus()),
    ):
        for finding in findings:
            yield finding
    address, credentials = find_address(arguments.address), find_credentials(arguments)
    async for finding in check_cluster(RouterTarget(address.value, address.source, credentials.tls, credentials.token)):
        yield finding


async def _deployment(paths: Sequence[Path]) -> AsyncGenerator[Finding, None]:
    """Checks the processes that files would start in this folder; none of them has to run."""
    from baton.errors import ConfigError
    from devtools.doctor.deployment import EnvoyFile, Start, ask, read
    from devtools.doctor.timeouts import check_timeouts

    folder = Path.cwd()
    try:
        found = list(read(paths, folder))
        processes = [await ask(each, folder) for each in found if isinstance(each, Start)]
    except ConfigError as error:
        yield broken(error.message, "fix the file")
        return
    if not found:
        yield broken("these files start no Baton process and no Envoy", "give other files or folders")
    for finding in check_timeouts(processes, [each for each in found if isinstance(each, EnvoyFile)]):
        yield finding
