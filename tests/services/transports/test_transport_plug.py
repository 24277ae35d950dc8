"""Transports are chosen by name; a transport of another distribution works like the built-in ones."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import Starter

from baton.errors import ConfigError
from runtime.config import load
from services.config import WorkerConfig
from services.transports import registry

EXAMPLE = "in_process_transport:InProcessTransport"
EXAMPLES = Path(__file__).parents[3] / "examples" / "extending"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example can be imported, as a module that is installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("in_process_transport", None)


async def test_a_transport_from_outside_hands_over(start: Starter) -> None:
    async with start("prefill", transports=(EXAMPLE,)) as prefill, start("decode", transports=(EXAMPLE,)) as decode:
        assert (await decode.calls.decode(decode_request(await prefill.calls.prefill()))).transport == "in_process"
    assert not sys.modules["in_process_transport"].POOLS


async def test_a_reader_without_the_transport_takes_the_next(start: Starter) -> None:
    async with start("prefill", transports=(EXAMPLE, "tcp")) as prefill, start("decode", transports=("tcp",)) as decode:
        assert (await decode.calls.decode(decode_request(await prefill.calls.prefill()))).transport == "tcp"


def test_an_entry_point_gives_a_transport_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoints([EntryPoint("in_process", EXAMPLE, registry.ENTRY_POINTS)])
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))
    assert registry.transport_class("in_process").name == "in_process"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "transports=[shm, rdma]",
            r"unknown transport 'rdma'; expected one of cuda_ipc, nixl, shm, tcp, or module:Class",
        ),
        ("transports=['no.such:Transport']", r"transport 'no.such:Transport' cannot be loaded: No module named 'no'"),
        ("transport_options.tcp.port=1", r"transport_options.tcp.port: Extra inputs are not permitted"),
        ("transport_options.nixl.devices=[lo]", r"transport_options.nixl: the transport is not in transports"),
    ],
)
def test_a_wrong_transport_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(WorkerConfig, "deploy/config/worker.yaml", [override])
    assert message in refused.value.message
