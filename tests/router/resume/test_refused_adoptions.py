"""Handles that are forged, stale or another tenant's: each is refused, and no reader of a running answer notices.

`BATON_FORGED=10000` makes so many attempts; 500 by default.
"""

import asyncio
import os
import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.clients.resuming import Received
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream, unary
from baton.errors import InvalidRequest, PositionInvalid, StaleAttempt, StreamLost
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.server import host_router
from rpc.channels import open_channel
from runtime.aio import timeout

_ATTEMPTS = int(os.environ.get("BATON_FORGED", "500"))
_AT_ONCE = 16
# The readers' own attempts are above those of the attackers that have their handles.
_READERS_ATTEMPT = 1000
_ANOTHER = (("x-baton-tenant", "another"),)
_REFUSALS = (StreamLost, InvalidRequest, PositionInvalid, StaleAttempt)
_PREFIX = len("b1.")
_OF_ID, _OF_SECRET = range(16), range(16, 32)


@dataclass
class Attack:
    """Two routers, the answers that are read at the first, and what attempts at the second came to."""

    running: Bench
    second: inference_service_pb2_grpc.InferenceServiceStub
    readers: list[Received] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    is_over: bool = False


@asynccontextmanager
async def _attack() -> AsyncIterator[Attack]:
    workers = [simulated(f"worker-{number}", "prefill", "decode", decode_step_seconds=0.004) for number in range(2)]
    async with (
        timeout(60 + _ATTEMPTS / 20),
        bench(*workers, router=PATIENT, proxied=False) as running,
        host_router(PATIENT, running.registry) as other,
    ):
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == 2)
        async with open_channel(other.address) as channel:
            yield Attack(running, inference_service_pb2_grpc.InferenceServiceStub(channel))
            await eventually(lambda: running.used_blocks() == 0, 8.0)


def _request(seed: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        prompt="read me",
        sampling={"seed": seed, "temperature": 0.8},  # type: ignore[arg-type]
        stopping={"max_tokens": 250, "ignore_eos": True},  # type: ignore[arg-type]
        response={"keep": {"seconds": 5}},  # type: ignore[arg-type]
    )


async def _read(attack: Attack, seed: int) -> Received:
    """An answer that is read to its end, taken over by its own client once."""
    received = Received(_request(seed))
    async with aclosing(stream(attack.running.stub.Generate(received.request, timeout=PATIENCE_SECONDS))) as messages:
        async for message in messages:
            received.add(message)
            if received.tokens >= 5:
                break
    received.attempt = _READERS_ATTEMPT - 1
    attack.readers.append(received)
    async for message in stream(attack.running.stub.ResumeGeneration(received.resume(), timeout=PATIENCE_SECONDS)):
        received.add(message)
    attack.readers.remove(received)
    return received


async def _keep_reading(attack: Attack, seed: int) -> int:
    """Reads the same answer again and again, at least once more than the first time. Returns how often."""
    expected, count = (await _read(attack, seed)).whole, 0
    while not count or not attack.is_over:
        assert (await _read(attack, seed)).whole == expected
        count += 1
    return count


def _forged(chosen: random.Random, handle: str, place: range) -> str:
    """The handle with some bits of one part flipped."""
    found = bytearray(urlsafe_b64decode(handle[_PREFIX:]))
    for _ in range(chosen.choice((1, 1, 2, 8))):
        found[chosen.choice(place)] ^= 1 << chosen.randrange(8)
    text = handle[:_PREFIX] + urlsafe_b64encode(found).decode()
    return text if text != handle else _forged(chosen, handle, place)


def _garbled(chosen: random.Random, handle: str) -> str:
    """Text that is no handle."""
    cut = chosen.randrange(len(handle))
    not_base64 = handle[:cut] + "\u00e9" + handle[cut + 1 :]
    return chosen.choice((handle[: max(1, cut)], not_base64, "b2" + handle[2:], handle + "A", "b1."))


async def _attempt(attack: Attack, chosen: random.Random) -> None:
    received = chosen.choice(attack.readers)
    kind = chosen.choice(("id", "secret", "garbled", "tenant", "stale", "beyond"))
    handle, metadata = received.handle, None
    match kind:
        case "id":
            handle = _forged(chosen, handle, _OF_ID)
        case "secret":
            handle = _forged(chosen, handle, _OF_SECRET)
        case "garbled":
            handle = _garbled(chosen, handle)
        case "tenant":
            metadata = _ANOTHER
    attempt = chosen.randrange(1, _READERS_ATTEMPT) if kind == "stale" else _READERS_ATTEMPT + chosen.randrange(1, 9)
    asked = generate_pb2.ResumeGenerationRequest(handle=handle, attempt=attempt)
    if kind == "beyond":
        asked.have.add(tokens=chosen.randrange(251, 2**31))
    way = "ResumeGeneration" if kind in ("stale", "beyond") else chosen.choice(_WAYS)
    # An answer may have ended, and gone, meanwhile: then it is lost for those that had its handle, too.
    with pytest.raises(_REFUSALS) as refusal:
        await _call(attack, way, asked, metadata)
    attack.refused[f"{kind} {way} {refusal.type.__name__}"] += 1


_WAYS = ("ResumeGeneration", "ResumeGeneration", "CancelGeneration", "GetGenerationProgress")


async def _call(
    attack: Attack, way: str, asked: generate_pb2.ResumeGenerationRequest, metadata: tuple[tuple[str, str], ...] | None
) -> None:
    stub = attack.second
    match way:
        case "ResumeGeneration":
            async for _ in stream(stub.ResumeGeneration(asked, timeout=PATIENCE_SECONDS, metadata=metadata)):
                break
        case "CancelGeneration":
            message = generate_pb2.CancelGenerationRequest(handle=asked.handle)
            await unary(stub.CancelGeneration(message, timeout=PATIENCE_SECONDS, metadata=metadata))
        case _:
            question = generate_pb2.GetGenerationProgressRequest(handle=asked.handle)
            await unary(stub.GetGenerationProgress(question, timeout=PATIENCE_SECONDS, metadata=metadata))


@pytest.mark.timeout(90 + _ATTEMPTS / 10)
async def test_no_attempt_to_adopt_an_answer_of_others_succeeds_or_disturbs_its_reader() -> None:
    async with _attack() as attack:
        reading = [asyncio.create_task(_keep_reading(attack, seed)) for seed in range(4)]
        left = iter(range(_ATTEMPTS))

        async def attempt_on(number: int) -> None:
            chosen = random.Random(number)
            for _ in left:
                while not attack.readers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await _attempt(attack, chosen)

        try:
            await asyncio.gather(*(attempt_on(number) for number in range(_AT_ONCE)))
        finally:
            attack.is_over = True
        assert sum(await asyncio.gather(*reading)) >= 4
        print(f"\n{attack.refused.total()} refused: {dict(sorted(attack.refused.items()))}")
        assert attack.refused.total() == _ATTEMPTS
