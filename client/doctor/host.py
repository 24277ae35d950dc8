"""Checks of this machine: etcd, ports, and whether processes can map one another's memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from client.doctor.finding import Finding, broken, warning, well
from client.local.plan import etcd_binary
from client.local.ports import PREFERRED_ROUTER_PORT, is_free
from client.local.state import StateFolder
from rpc.errors import ConfigError

MEGABYTE = 2**20
# Two embedded workers with the demo checkpoint.
COMFORTABLE_MEGABYTES = 2048
PROGRAM_SECONDS = 10

# Holds an anonymous file open until its standard input ends, and says which descriptor it is.
_HOLD_MEMORY = """
import os, sys
file = os.memfd_create("baton-doctor")
os.write(file, b"baton")
print(file, flush=True)
sys.stdin.read()
"""


def check_etcd() -> Iterator[Finding]:
    """Whether there is an etcd that can be run."""
    try:
        binary = etcd_binary()
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        )
    except ConfigError as error:
        yield warning(f"{error.message}; `baton up` needs it", "make install")
    except (OSError, subprocess.SubprocessError) as error:
        yield broken(f"etcd cannot be run: {error}", "make install, or put an etcd for this machine on the PATH")
    else:
        yield well(done.stdout.partition("\n")[0].replace(" Version:", "") + f" at {binary}")


def check_ports() -> Iterator[Finding]:
    """Whether the router's usual port is free, or our own cluster's."""
    address = f"127.0.0.1:{PREFERRED_ROUTER_PORT}"
    state = StateFolder().read()
    if is_free(PREFERRED_ROUTER_PORT):
        yield well(f"port {PREFERRED_ROUTER_PORT} is free")
    elif state is not None and state.address == address:
        yield well(f"port {PREFERRED_ROUTER_PORT} is taken by the router of `baton up`")
    else:
        yield warning(
            f"port {PREFERRED_ROUTER_PORT} is taken by a process that `baton up` did not start from this folder",
            "nothing: `baton up` will choose another port, and `baton generate` will find it",
        )


def check_shared_memory() -> Iterator[Finding]:
    """Whether one process can open another's anonymous file through /proc, as the shm transport does."""
    slow = "nothing, if that is meant: KV moves over tcp instead. In a container, do not hide /proc"
    try:
        seen = _read_from_another_process()
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        yield warning(f"processes here cannot map one another's memory ({error}): the shm transport is off", slow)
        return
    if seen == b"baton":
        yield well("processes can map one another's memory through /proc, as the shm transport does")
    else:
        yield warning(f"another process's memory reads {seen!r} through /proc: the shm transport is off", slow)


def check_memory() -> Iterator[Finding]:
    """Whether there is room for two small workers."""
    available = _available_megabytes()
    if available is None:
        return
    if available < COMFORTABLE_MEGABYTES:
        yield warning(f"only {available} MiB of memory are free", "end something, or make up ENGINE=simulated")
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
