"""Virtual clocks and seeded randomness in the place of the process's own. Imported before anything of Baton.

The product reads time by `runtime.clock` and makes ids by `runtime.entropy`; what other packages read of the module
`time` is replaced too. Outside of a world the real ones answer, so that imports behave as always.
"""

import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

EPOCH = 1_700_000_000.0
_START = 1000.0

cpu_seconds = time.process_time
real_seconds = time.perf_counter


class Time:
    """The virtual time of this process. `now` is in seconds; `entropy` is behind every secret and id."""

    on = False
    now = _START
    entropy = random.Random(0)


def _clock(name: str, scale: int = 1, offset: float = 0.0) -> Callable[[], Any]:
    actual = getattr(time, name)

    def read_plainly() -> Any:
        return Time.now if Time.on else actual()

    def read() -> Any:
        if not Time.on:
            return actual()
        value = Time.now + offset
        return int(value * scale) if scale != 1 else value

    return read if offset or scale != 1 else read_plainly


def _token_bytes(size: int = 32) -> bytes:
    return Time.entropy.randbytes(size) if Time.on else _real_urandom(size)


def _sleep(seconds: float) -> None:
    # A sleep of 0 yields to other threads, of which there are none.
    if Time.on and seconds:
        raise RuntimeError("a blocking sleep inside the simulation")
    if not Time.on:
        _real_sleep(seconds)


_real_urandom, _real_sleep, _real_hostname = os.urandom, time.sleep, socket.gethostname
time.monotonic = _clock("monotonic")
time.monotonic_ns = _clock("monotonic_ns", 10**9)
time.perf_counter = _clock("perf_counter")
time.perf_counter_ns = _clock("perf_counter_ns", 10**9)
time.time = _clock("time", offset=EPOCH)
time.time_ns = _clock("time_ns", 10**9, EPOCH)
time.process_time = _clock("process_time")
time.thread_time = _clock("thread_time")
time.sleep = _sleep
os.urandom = _token_bytes
random._urandom = _token_bytes  # type: ignore[attr-defined]  # of SystemRandom, which `secrets` uses
socket.gethostname = lambda: "host" if Time.on else _real_hostname()


def enter(seed: int) -> None:
    """Begins a world: from here on everything follows from the seed."""
    Time.now = _START
    Time.entropy = random.Random(f"entropy-{seed}")
    random.seed(f"product-{seed}")
    Time.on = True


def leave() -> None:
    """The real clocks answer again."""
    Time.on = False
