"""The limit of file descriptors, and the connections of clients that stay below it."""

import resource
import subprocess
import sys

import pytest

from baton_http2.sockets.descriptors import OpenConnections, limit

REPORT = """
import logging
from baton_http2.sockets.descriptors import limit, raise_limit
raise_limit()
print(limit())
"""


def with_limits(soft: int, hard: int) -> str:
    """The output of a process that has these limits."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    return done.stdout


def test_the_limit_is_raised_to_what_the_process_may_have() -> None:
    printed = with_limits(128, 512)
    assert printed.splitlines()[-1] == "512"


def test_a_low_limit_is_said_at_the_start() -> None:
    assert "few file descriptors" in with_limits(512, 512)


def test_a_limit_that_is_high_enough_is_not_said() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip("this machine allows fewer")
    assert "few" not in with_limits(1024, hard)


class Idle:
    """A connection that has been idle since a time, or is not."""

    def __init__(self, since: float | None) -> None:
        self.since = since
        self.is_closed = False

    def idle_since(self) -> float | None:
        return self.since

    def close_idle(self) -> None:
        self.is_closed = True


def test_the_longest_idle_connection_is_closed_for_a_new_one() -> None:
    connections = OpenConnections(256)
    held = [Idle(None), Idle(3.0), Idle(1.0), Idle(2.0)]
    for each in held:
        connections.add(each)
    assert connections.has_capacity(connections.most - 1)
    assert not any(each.is_closed for each in held)
    assert connections.has_capacity(connections.most)
    assert [each.is_closed for each in held] == [False, False, True, False]


def test_no_connection_is_taken_when_none_is_idle_and_none_from_the_reserve() -> None:
    connections = OpenConnections(256)
    connections.add(Idle(None))
    assert not connections.has_capacity(connections.most)
    connections.add(Idle(1.0))
    assert not connections.has_capacity(limit() - 1)


def test_descriptors_that_others_hold_keep_no_new_connection_out_while_some_are_idle() -> None:
    connections = OpenConnections(256)
    held = [Idle(float(number)) for number in range(8)]
    for each in held:
        connections.add(each)
    for _ in held:
        # Each time the connection that is closed frees one of the reserve, which the next one gets.
        assert not connections.has_capacity(limit() - 1)
    assert all(each.is_closed for each in held)


def test_a_reserve_is_at_most_a_quarter_of_the_limit() -> None:
    assert OpenConnections(10**9).most == limit() - limit() // 4
