"""Connections between ranks: their messages, strangers, ranks that differ, and peers that fall silent."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from support.engines.checkpoints import DEMO
from support.eventually import eventually
from support.servers.etcd import free_port

from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.parallel.messages import Begin, Loaded, ZeroBlocks
from services.engines.pytorch.parallel.multi_node.leader import gather
from services.engines.pytorch.parallel.multi_node.link import (
    LENGTHS,
    Join,
    Link,
    Refused,
    Welcome,
    decode,
    encode,
    receive_message,
    send_message,
    settings_of,
)
from services.engines.pytorch.runners.fused_runner import Sizes
from services.engines.pytorch.runners.step_tensors import DecodeArrays, StepArrays

PATIENCE_SECONDS = 60.0


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), PATIENCE_SECONDS)
        other, _ = listener.accept()
        with one, other:
            yield one, other


@pytest.mark.parametrize(
    "message",
    [
        Join(1, (("dtype", "auto"), ("model", "ab"))),
        Refused("rank 7 does not exist in a group of 2"),
        Begin(12, Sizes(8, 256, 16, graphs=False), 29501),
        ZeroBlocks((3, 5)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was(message: object) -> None:
    assert round_trip(message) == message


def test_arrays_of_steps_arrive_as_they_were_and_can_be_written() -> None:
    flat, rows = np.arange(7, dtype=np.int32), np.array([4, 2], dtype=np.int64)
    step = round_trip(StepArrays(flat, (1, 1, 3, 0), 1, rows))
    assert (step.flat.tolist(), step.rows.tolist(), step.shape) == (flat.tolist(), rows.tolist(), (1, 1, 3, 0))
    assert step.flat.flags.writeable
    assert round_trip(DecodeArrays(4, flat)).size == 4


@pytest.mark.parametrize("body", [b"", b"GET / HTTP/1.1", b'["Sizes",{},[]]', b'["Join",{"rank":1},[]]', b"[1]", b"[]"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="no message of a rank"):
        decode(bytearray(body), len(body))


def test_a_message_that_is_too_large_is_not_read(connected: tuple[socket.socket, socket.socket]) -> None:
    one, other = connected
    one.sendall(LENGTHS.pack(1 << 30, 10))
    with pytest.raises(ValueError, match="a message of 1073741824 bytes"):
        receive_message(other)


async def test_a_link_ends_when_its_peer_falls_silent(connected: tuple[socket.socket, socket.socket]) -> None:
    reasons: list[str] = []
    link = Link(connected[0], 3, lost_seconds=3)
    link.on_end(reasons.append)
    await eventually(lambda: reasons == ["it has been silent for 3 s"], PATIENCE_SECONDS)
    with pytest.raises(EOFError, match="silent"):
        link.recv(PATIENCE_SECONDS)
    link.close()


async def test_links_last_while_both_sides_beat_and_end_when_one_closes(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    one, other = (Link(each, rank, lost_seconds=30) for rank, each in enumerate(connected))
    one.send(Loaded(9))
    assert other.recv(PATIENCE_SECONDS) == Loaded(9)
    one.close()
    await eventually(lambda: other.ended == "its connection has closed", PATIENCE_SECONDS)
    assert one.ended == ""
    other.close()


async def test_strangers_and_ranks_that_differ_are_refused_and_the_right_one_joins() -> None:
    port = free_port()
    config = config_of(f"127.0.0.1:{port}")
    settings = tuple(settings_of(config).items())
    gathering = asyncio.ensure_future(gather(config))
    refusals = {
        Join(7, settings): "rank 7 does not exist in a group of 2",
        Join(1, (*settings[:-1], ("model", "other"))): "engine.model is other on rank 1 and",
        Join(1, (*settings, ("dtype", "bfloat16"))): "engine.dtype is bfloat16 on rank 1 and auto on rank 0",
    }
    for request, reason in refusals.items():
        answer = await asyncio.to_thread(ask, port, request)
        assert isinstance(answer, Refused)
        assert reason in answer.reason
    await asyncio.to_thread(send_nonsense, port)
    joined = await asyncio.to_thread(dial, port)
    send_message(joined, Join(1, settings))
    assert isinstance(await asyncio.to_thread(receive_message, joined), Welcome)
    followers = await asyncio.wait_for(gathering, PATIENCE_SECONDS)
    assert followers is not None
    assert followers.failure is None
    joined.close()
    await eventually(lambda: followers.failure is not None, PATIENCE_SECONDS)
    assert followers.failure.startswith("rank 1 of the engine has ended: its connection has closed")
    await asyncio.to_thread(followers.close)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("baton-rank-1")] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"leader": "127.0.0.1"}, "multi_node.leader"),
        ({"leader": "a:70000"}, "multi_node.leader"),
        ({"rank": 2}, "multi_node.rank: must be less than tensor_parallel_size, 2"),
        ({"rank": -1}, "multi_node.rank"),
        ({"lost_seconds": 1}, "multi_node.lost_seconds"),
    ],
)
def test_a_group_that_cannot_be_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config_of(**{"leader": "127.0.0.1:1", **options})


def test_a_group_has_more_than_one_rank() -> None:
    with pytest.raises(ValueError, match="multi_node: tensor_parallel_size must be greater than 1"):
        PyTorchConfig.model_validate({"model": DEMO, "multi_node": {"leader": "a:1", "rank": 0}})


def config_of(leader: str, **options: object) -> PyTorchConfig:
    group = {"leader": leader, "rank": 0, "join_seconds": 60, **options}
    return PyTorchConfig.model_validate(
        {"model": DEMO, "device": "cpu", "tensor_parallel_size": 2, "multi_node": group}
    )


def round_trip(message: object) -> object:
    frame = encode(message)
    _, header_bytes = LENGTHS.unpack(frame[: LENGTHS.size])
    return decode(bytearray(frame[LENGTHS.size :]), header_bytes)


def dial(port: int) -> socket.socket:
    """Connects as soon as somebody listens."""
    deadline = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        try:
            return socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        except ConnectionRefusedError:
            deadline.wait(0.05)
    raise AssertionError(f"nothing listens at port {port}")


def ask(port: int, request: Join) -> object:
    with dial(port) as connected:
        send_message(connected, request)
        return receive_message(connected)


def send_nonsense(port: int) -> None:
    with dial(port) as connected:
        connected.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert connected.recv(1) == b""
