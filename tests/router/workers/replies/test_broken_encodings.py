"""Broken replies of Encode and Embed: another worker runs them again."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.cluster.in_process import bench, simulated
from support.images.simulated_workers import EMBEDDING_BYTES, about, leasing, multimodal
from support.servers.broken_worker import router_for
from support.servers.tampering import SILENCE, Ends, Reply, tampered

from baton.calls import unary
from baton.engine.v1 import embed_pb2, encode_pb2
from baton.inference.v1 import embed_pb2 as inference_pb2
from router.config import EmbeddingsConfig
from runtime.aio import timeout


def reshaped(*shape: int) -> Callable[[Any], Iterable[Reply]]:
    def changed(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
        reply.embeddings[0].shape[:] = shape
        return [reply]

    return changed


def cut(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
    reply.embeddings[0].inline = reply.embeddings[0].inline[:-3]
    return [reply]


def sourceless(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
    reply.embeddings[0].ClearField("inline")
    return [reply]


def embedding(**fields: Any) -> Callable[[Any], Iterable[Reply]]:
    def changed(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
        for name, value in fields.items():
            setattr(reply.embeddings[0], name, value)
        return [reply]

    return changed


def lease(**fields: Any) -> Callable[[Any], Iterable[Reply]]:
    def changed(reply: encode_pb2.EncodeResponse) -> Iterable[Reply]:
        for name, value in fields.items():
            setattr(reply.embeddings[0].lease, name, value)
        return [reply]

    return changed


LEASES = {
    "bytes": lease(num_bytes=2**63),
    "no bytes": lease(num_bytes=0),
    "layout": lease(layout_digest="another"),
    "owner": lease(worker_id="another"),
    "epoch": lease(epoch=7),
}
ENCODES: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "undecodable": lambda _: [b"\xff\xff\xff"],
    "empty": lambda _: [b""],
    "unknown": lambda _: [Ends(2)],
    "invalid argument": lambda _: [Ends(3)],
    "unimplemented": lambda _: [Ends(12)],
    "silence": lambda _: [SILENCE],
    "too long": reshaped(2**31, 64),
    "no shape": reshaped(),
    "two": lambda reply: [encode_pb2.EncodeResponse(embeddings=[reply.embeddings[0]] * 2)],
    "cut": cut,
    "sourceless": sourceless,
    "no digest": embedding(digest=b""),
    "another digest": embedding(digest=b"x" * 32),
    "other bytes": embedding(inline=bytes(EMBEDDING_BYTES)),
    "no type": embedding(dtype=""),
    "another type": embedding(dtype="float8"),
    **LEASES,
}


@pytest.mark.parametrize("name", ENCODES)
async def test_a_broken_encode_is_run_again_elsewhere(name: str) -> None:
    workers = [multimodal("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")]
    uncached = router_for(name).model_copy(update={"embeddings": EmbeddingsConfig(max_bytes=0)})
    async with bench(*workers, router=uncached) as running:
        expected = await running.text_of(**about())
        own = leasing("broken", "encode") if name in LEASES else multimodal("broken", "encode")
        async with tampered(running, own, multiplexed=False) as broken:
            broken.changes["Encode"] = ENCODES[name]
            async with timeout(20):
                while not broken.calls["Encode"]:
                    assert await running.text_of(**about()) == expected


def vectors(change: Callable[[embed_pb2.EmbedResponse], None]) -> Callable[[Any], Iterable[Reply]]:
    def changed(reply: embed_pb2.EmbedResponse) -> Iterable[Reply]:
        change(reply)
        return [reply]

    return changed


EMBEDS: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "undecodable": lambda _: [b"\xff\xff\xff"],
    "empty": lambda _: [b""],
    "unknown": lambda _: [Ends(2)],
    "invalid argument": lambda _: [Ends(3)],
    "unimplemented": lambda _: [Ends(12)],
    "silence": lambda _: [SILENCE],
    "one missing": vectors(lambda reply: reply.embeddings.pop()),
    "short": vectors(lambda reply: reply.embeddings[0].values.pop()),
    "not a number": vectors(lambda reply: reply.embeddings[0].values.__setitem__(3, float("nan"))),
}


@pytest.mark.parametrize("name", EMBEDS)
async def test_a_broken_embed_is_run_again_elsewhere(name: str) -> None:
    request = inference_pb2.EmbedRequest(inputs=[{"text": "one"}, {"text": "another"}])
    async with bench(simulated("e1", "embed"), router=router_for(name)) as running:
        expected = await unary(running.stub.Embed(request, timeout=20))
        async with tampered(running, simulated("broken", "embed"), multiplexed=False) as broken:
            broken.changes["Embed"] = EMBEDS[name]
            async with timeout(20):
                while not broken.calls["Embed"]:
                    found = await unary(running.stub.Embed(request, timeout=20))
                    assert list(found.embeddings) == list(expected.embeddings)
