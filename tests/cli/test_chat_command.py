"""`baton chat` against a real router."""

import asyncio
import signal
import sys
from pathlib import Path

from support.clients.baton_command import Baton, SmallCluster
from support.clients.generation import generate
from support.eventually import eventually

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel
from runtime.aio import timeout

OPTIONS = ["--seed", "7", "--temperature", "1", "--max-tokens", "9"]


def turn(role: str, text: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, parts=[pb.ContentPart(text=text)])


async def expected(cluster: SmallCluster, *turns: pb.ChatMessage) -> str:
    request = pb.GenerateRequest(chat=pb.ChatInput(messages=turns))
    request.sampling.seed, request.sampling.temperature, request.stopping.max_tokens = 7, 1.0, 9
    async with open_channel(cluster.address) as channel:
        return (await generate(InferenceServiceStub(channel), request)).text


async def test_each_message_is_sent_with_the_conversation_so_far(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("chat", *OPTIONS, "--address", cluster.address, stdin=b"hello\n\nagain\n")
    first = await expected(cluster, turn("user", "hello"))
    second = await expected(cluster, turn("user", "hello"), turn("assistant", first), turn("user", "again"))
    assert (outcome.code, outcome.out) == (0, f"{first}\n{second}\n")


async def test_clear_begins_anew_and_exit_ends(baton: Baton, cluster: SmallCluster) -> None:
    lines = b"hello\n/clear\nhello\n/exit\nhello\n"
    outcome = await baton("chat", *OPTIONS, "--address", cluster.address, stdin=lines)
    first = await expected(cluster, turn("user", "hello"))
    assert outcome.out == f"{first}\n" * 2


async def test_timings_are_shown_on_request(baton: Baton, cluster: SmallCluster) -> None:
    outcome = await baton("chat", *OPTIONS, "--address", cluster.address, stdin=b"hello\n/timing\nhello\n")
    assert outcome.err.count("to first token") == 1


async def test_a_mistyped_image_or_command_loses_no_message(baton: Baton, cluster: SmallCluster) -> None:
    lines = b"/image /no/such/file\nhello\n/unheard\n/image\nagain\n"
    outcome = await baton("chat", *OPTIONS, "--address", cluster.address, stdin=lines)
    assert "image /no/such/file: cannot be read" in outcome.err
    assert "no image was added" in outcome.err
    assert "unknown command /unheard" in outcome.err
    assert "/image needs a FILE or a URI" in outcome.err
    first = await expected(cluster, turn("user", "hello"))
    second = await expected(cluster, turn("user", "hello"), turn("assistant", first), turn("user", "again"))
    assert (outcome.code, outcome.out) == (0, f"{first}\n{second}\n")


async def test_an_image_that_has_no_end_is_refused_and_the_conversation_goes_on(
    baton: Baton, cluster: SmallCluster, tmp_path: Path
) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**36)
    names = ["/dev/zero", str(tmp_path), str(tmp_path / "large"), "a\0b"]
    lines = "".join(f"/image {name}\n" for name in names) + "hello\n"
    outcome = await baton("chat", *OPTIONS, "--address", cluster.address, stdin=lines.encode())
    assert "image /dev/zero: cannot be read: is neither a file nor a pipe" in outcome.err
    assert "large: cannot be read: has more than 67108864 bytes" in outcome.err
    assert outcome.err.count("no image was added") == len(names)
    assert (outcome.code, outcome.out) == (0, f"{await expected(cluster, turn('user', 'hello'))}\n")


async def test_a_message_that_failed_is_kept_and_sent_again(
    baton: Baton, cluster: SmallCluster, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"no picture")
    # The model of this cluster has no vision: the message is refused each time it has its image.
    lines = f"/retry\n/image {picture}\nhello\n/retry\n/retry all\n/retry text\n/retry\n".encode()
    outcome = await baton("chat", *OPTIONS, "--address", cluster.address, stdin=lines)
    assert outcome.err.count("the message is kept: /retry sends it again") == 2
    assert outcome.err.count("no message has failed") == 2
    assert "expected /retry or /retry text" in outcome.err
    first = await expected(cluster, turn("user", "hello"))
    assert (outcome.code, outcome.out.strip()) == (0, first)


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(cluster: SmallCluster) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "chat", "--address", cluster.address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    async with timeout(60):
        process.stdin.write(b"hello\n")
        await process.stdout.read(1)
        assert cluster.blocks_used
        process.send_signal(signal.SIGINT)
        await eventually(lambda: not cluster.blocks_used)
        _, err = await process.communicate(b"/help\n")
    assert process.returncode == 0
    assert err.startswith(b"(stopped)\n/image")
