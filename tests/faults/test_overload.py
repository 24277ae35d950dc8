"""At twice its capacity a cluster meets the deadlines of admitted requests: the benchmark overload, with its limits."""

import asyncio
import os
import sys

import pytest
from support.cluster.processes import ROOT

FULL = os.environ.get("BATON_FAULTS") == "full"


@pytest.mark.skipif(not FULL, reason="takes a minute, of a machine that does nothing else")
@pytest.mark.timeout(240)
async def test_at_twice_the_capacity_what_is_admitted_ends_in_time() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.overload", cwd=ROOT)
    assert await process.wait() == 0
