"""Checks of this machine: etcd, ports, shared memory, free memory."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.errors import ConfigError
from devtools.doctor.finding import Finding, broken, warning, well
from runtime.network.ports import is_free

MEGABYTE = 2**20
# Enough for two embedded workers with the demonstration model.
COMFORTABLE_MEGABYTES = 2048
PROGRAM_SECONDS = 10

# Holds an anonymous file open until its standard input ends, and prints its descriptor.
_HOLD_MEMORY = """
import os, sys
file = os.memfd_create("baton-doctor")
os.write(file, b"baton")
print(file, flush=True)
sys.stdin.read()
"""


def check_etcd(find_binary: Callable[[], str]) -> Iterator[Finding]:
    """Checks that etcd can run. `find_binary` returns its path, or raises ConfigError."""
    try:
        binary = find_binary()
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        )
    except ConfigError as error:
        yield warning(f"{error.message}; `baton up` needs it", "make install")
    except (OSError, subprocess.SubprocessError) as error:
        yield broken(f"etcd does not run: {error}", "make install, or put an etcd for this machine on the PATH")
    else:
        yield well(done.stdout.partition("\n")[0].replace(" Version:", "") + f" at {binary}")


def check_port(port: int, local_router: str | None) -> Iterator[Finding]:
    """Checks that the router's default port is free. `local_router` is the address of the router of `baton up`."""
    if is_free(port):
        yield well(f"port {port} is free")
    elif local_router == f"127.0.0.1:{port}":
        yield well(f"port {port} is used by the router of `baton up`")
    else:
        yield warning(
            f"port {port} is used by a process that `baton up` did not start from this folder",
            "nothing: `baton up` will choose another port, and `baton generate` will find it",
        )


def check_shared_memory() -> Iterator[Finding]:
    """Checks that one process can open another's anonymous file through /proc, as the shm transport does."""
    slow = "nothing, if intended: KV moves over tcp instead. In a container, do not hide /proc"
    try:
        seen = _read_from_another_process()
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        yield warning(f"processes cannot map each other's memory here ({error}): the shm transport does not work", slow)
        return
    if seen == b"baton":
        yield well("processes can map each other's memory through /proc, which the shm transport needs")
    else:
        yield warning(
            f"reading another process's memory through /proc gave {seen!r}: the shm transport does not work", slow
        )


def check_memory() -> Iterator[Finding]:
    """Checks that there is enough free memory for two small workers."""
    available = _available_megabytes()
    if available is None:
        return
    if available < COMFORTABLE_MEGABYTES:
        yield warning(
            f"only {available} MiB of memory are free", "stop other processes, or run `make up ENGINE=simulated`"
        )
    else:
        yield well(f"{available} MiB of memory are free")


def _read_from_another_process() -> bytes:
    pipe = subprocess.PIPE
    command = [sys.executable, "-I", "-S", "-c", _HOLD_MEMORY]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout is not None
        descriptor = int(holder.stdout.readline())
        file = os.open(f"/proc/{holder.pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            return os.pread(file, 5, 0)
        finally:
            os.close(file)


def _available_megabytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kilobytes is None else int(kilobytes) * 1024 // MEGABYTE
