"""The tests' own etcd: it ends with the process that has started it, also if that is killed."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

STARTS_ONE = """
import sys, time
from pathlib import Path
from support.servers.etcd import EtcdServer
server = EtcdServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(60)
def test_an_etcd_ends_with_a_test_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ONE, str(tmp_path / "etcd")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(sys.path)}) as tests:
        assert tests.stdout is not None
        etcd = psutil.Process(int(tests.stdout.readline()))
        assert etcd.name() == "etcd"
        tests.kill()
    # The process that has adopted it may not have reaped it yet.
    with suppress(psutil.NoSuchProcess):
        while etcd.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
