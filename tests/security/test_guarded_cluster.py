"""A cluster with mutual TLS on every port, and tokens: it works, and unauthorized callers get nothing."""

import io
import logging
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from support.certificates import Authority
from support.clients.worker_calls import WorkerCalls, prompt, sampling
from support.cluster.in_process import PLACED_BY_LOAD, PROBE
from support.eventually import eventually
from support.lifetimes import in_one_task
from support.restored_logging import restored_logging

from baton.connection.credentials import TENANT_KEY
from baton.engine.v1 import decode_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2, worker_pb2_grpc
from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from discovery.memory import MemoryRegistry
from router.config import RouterConfig
from router.server import Router, host_router
from rpc.auth.access import AuthConfig
from rpc.auth.tls import TlsConfig, TlsSection
from rpc.channels import open_channel
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.monitor import serve_monitor
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import Worker, host_worker

__all__ = ["restored_logging"]

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@dataclass
class Guarded:
    """A router, a prefill and a decode worker, and the authority that all of them trust."""

    authority: Authority
    router: Router
    prefill: Worker
    decode: Worker
    registry: MemoryRegistry

    def tls(self, uri: str, authority: Authority | None = None) -> TlsConfig:
        """The certificate of somebody with that URI."""
        pair = (authority or self.authority).issue(uri.rpartition("/")[2], uris=[uri])
        return TlsConfig(ca=self.authority.ca, cert=pair.cert, key=pair.key)

    @property
    def blocks_used(self) -> int:
        return self.prefill.engine.load().blocks_used + self.decode.engine.load().blocks_used


def _section(authority: Authority, name: str) -> TlsSection:
    pair = authority.issue(name, uris=[f"baton://worker/{name}"])
    tls = TlsConfig(ca=authority.ca, cert=pair.cert, key=pair.key)
    return TlsSection(listen=tls, call=tls)


def _worker(authority: Authority, role: str, name: str = "") -> WorkerConfig:
    return WorkerConfig(
        worker_id=name or role,
        roles=(role,),  # type: ignore[arg-type]
        tls=_section(authority, name or role),
        engine=SimulatedConfig(decode_step_seconds=0.01),
        transports=("tcp",),
        drain_seconds=0,
    )


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Guarded]:
    authority = Authority(folder, "ours")

    tokens = folder / "tokens.yaml"
    tokens.write_text(f"tokens: [{{name: alice, token: {ALICE}}}, {{name: bob, token: {BOB}}}]")
    config = RouterConfig(
        listen="127.0.0.1:0",
        probe=PROBE,
        drain_seconds=0,
        tls=_section(authority, "router"),
        auth=AuthConfig(tokens_file=tokens, proxies=("gateway",)),
        routing=PLACED_BY_LOAD,
    )
    registry = MemoryRegistry("test")
    async with (
        host_worker(_worker(authority, "prefill"), registry) as prefill,
        host_worker(_worker(authority, "decode"), registry) as decode,
        host_router(config, registry) as router,
    ):
        await eventually(lambda: sum(not each.problem for each in router.cluster.workers) == 2)
        yield Guarded(authority, router, prefill, decode, registry)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with in_one_task(cluster(tmp_path)) as running:
        yield running
        await eventually(lambda: running.blocks_used == 0)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def request(**fields: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 5}, **fields)  # type: ignore[arg-type]


async def generate(guarded: Guarded, uri: str, token: str = "") -> generate_pb2.Finished:
    async with open_channel(guarded.router.address, guarded.tls(uri)) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        call = stub.GenerateUnary(
            generate_pb2.GenerateUnaryRequest(request=request()), metadata=bearer(token) if token else (), timeout=60
        )
        return (await call).finished


async def test_a_request_runs_from_worker_to_worker(guarded: Guarded) -> None:
    finished = await generate(guarded, "baton://client/carol")
    assert (finished.prefill_worker_id, finished.decode_worker_id) == ("prefill", "decode")
    assert finished.topology == generate_pb2.TOPOLOGY_DISAGGREGATED
    assert finished.migrations == 0
    assert finished.usage.completion_tokens == 5


async def test_the_kv_went_over_tls(guarded: Guarded) -> None:
    finished = await generate(guarded, "baton://client/carol")
    assert "tcp" in [timing.transport for timing in finished.timings]


async def test_a_running_decode_is_moved_and_only_by_an_operator(guarded: Guarded) -> None:
    move = cluster_service_pb2.MoveStreamsRequest(worker_id="decode")
    long = generate_pb2.GenerateRequest(prompt="hello " * 20, stopping={"max_tokens": 200, "ignore_eos": True})  # type: ignore[arg-type]
    another = _worker(guarded.authority, "decode", "decode-2")
    async with open_channel(guarded.router.address, guarded.tls("baton://client/carol")) as carol:
        call = inference_service_pb2_grpc.InferenceServiceStub(carol).Generate(long, timeout=60)
        messages = [await anext(events := aiter(call)), await anext(events)]
        async with host_worker(another, guarded.registry) as target:
            await eventually(lambda: sum(not each.problem for each in guarded.router.cluster.workers) == 3)
            with pytest.raises(aio.AioRpcError) as refused:
                await cluster_service_pb2_grpc.ClusterServiceStub(carol).MoveStreams(move, timeout=60)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            async with open_channel(guarded.router.address, guarded.tls("baton://operator/otto")) as otto:
                await cluster_service_pb2_grpc.ClusterServiceStub(otto).MoveStreams(move, timeout=60)
            messages += [message async for message in events]
            assert (messages[-1].finished.moves, messages[-1].finished.migrations) == (1, 0)
            assert messages[-1].finished.decode_worker_id == "decode-2"
            assert target.engine.load().blocks_used == 0


async def test_only_a_worker_gets_anything_from_a_worker(guarded: Guarded) -> None:
    """Every method, with an empty request: whatever is wrong with that is said only to those who may ask."""
    for uri in ("baton://client/carol", "baton://operator/otto"):
        async with open_channel(guarded.prefill.address, guarded.tls(uri)) as channel:
            for method in _MESSAGES:
                code = await _code(channel, method)
                may = uri.startswith("baton://operator") and method in _OPERATORS
                assert (code is not grpc.StatusCode.PERMISSION_DENIED) == may, (uri, method, code)


async def test_a_stranger_gets_no_connection_to_any_part(guarded: Guarded, tmp_path: Path) -> None:
    stranger = guarded.tls("baton://worker/decode", Authority(tmp_path, "other"))
    anonymous = TlsConfig(ca=guarded.authority.ca)
    for address in (guarded.router.address, guarded.prefill.address, guarded.decode.address):
        for tls in (stranger, anonymous, None):
            async with open_channel(address, tls) as channel:
                for method in ("/grpc.health.v1.Health/Check", "/baton.engine.v1.WorkerService/GetModel"):
                    assert await _code(channel, method) is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_gets_no_answers_meant_for_clients(guarded: Guarded) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(guarded, "baton://worker/decode")
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_only_an_operator_sees_the_workers(guarded: Guarded) -> None:
    codes = []
    for uri in ("baton://client/carol", "baton://operator/otto"):
        async with open_channel(guarded.router.address, guarded.tls(uri)) as channel:
            stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
            try:
                codes.append(len((await stub.ListWorkers(cluster_service_pb2.ListWorkersRequest())).workers))
            except aio.AioRpcError as error:
                codes.append(error.code())
    assert codes == [grpc.StatusCode.PERMISSION_DENIED, 2]


async def test_a_worker_is_drained_for_an_operator_by_the_router_and_by_the_operator_itself(guarded: Guarded) -> None:
    drain = cluster_service_pb2.DrainWorkerRequest(worker_id="decode")
    async with (
        open_channel(guarded.router.address, guarded.tls("baton://client/carol")) as carol,
        open_channel(guarded.router.address, guarded.tls("baton://operator/otto")) as otto,
        open_channel(guarded.prefill.address, guarded.tls("baton://operator/otto")) as direct,
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await cluster_service_pb2_grpc.ClusterServiceStub(carol).DrainWorker(drain, timeout=60)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await cluster_service_pb2_grpc.ClusterServiceStub(otto).DrainWorker(drain, timeout=60)
        assert [record.draining for record in guarded.registry.workers()] == [True, False]
        call = worker_pb2_grpc.WorkerServiceStub(direct).Drain(worker_pb2.DrainRequest())
        assert [answer.drained async for answer in call][-1]


async def test_a_handoff_is_for_its_caller_and_the_reader_it_named(guarded: Guarded) -> None:
    async with (
        open_channel(guarded.prefill.address, guarded.tls("baton://worker/router")) as router,
        open_channel(guarded.prefill.address, guarded.tls("baton://worker/decode")) as reader,
        open_channel(guarded.prefill.address, guarded.tls("baton://worker/intruder")) as intruder,
    ):
        answer = await WorkerCalls("", router).prefills.Prefill(
            prefill_pb2.PrefillRequest(
                request_id="r", prompt=prompt(), sampling=sampling(), reader="baton://worker/decode"
            )
        )
        for denied in (WorkerCalls("", intruder).renew, WorkerCalls("", intruder).release):
            with pytest.raises(Exception, match="baton://worker/intruder is not authorized"):
                await denied(answer.handoff)
        assert (await WorkerCalls("", router).renew(answer.handoff)).still_valid
        assert (await WorkerCalls("", reader).renew(answer.handoff)).still_valid
        assert (await WorkerCalls("", reader).release(answer.handoff)).still_valid


async def test_a_client_cancels_only_what_is_its_own(guarded: Guarded) -> None:
    async with open_channel(guarded.router.address, guarded.tls("baton://client/proxy")) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        long = request(request_id="mine")
        long.stopping.max_tokens = 1000
        call = stub.Generate(long, metadata=bearer(ALICE))
        for _ in range(3):  # Started, the first token, and one that shows that it is decoded
            await call.read()
        cancel = generate_pb2.CancelGenerationRequest(request_id="mine")
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.CancelGeneration(cancel, metadata=bearer(BOB))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.CancelGeneration(cancel, metadata=bearer(ALICE))).receipts


async def _begun(stub: Any, **metadata: str) -> Any:
    long = request(request_id="mine")
    long.stopping.max_tokens = 1000
    call = stub.Generate(long, metadata=tuple(metadata.items()))
    for _ in range(3):
        await call.read()
    return call


async def _read_all(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass


async def _is_cancelled(call: Any) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _read_all(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_a_client_cancels_by_a_certificate_what_it_began_by_a_token(guarded: Guarded) -> None:
    cancel = generate_pb2.CancelGenerationRequest(request_id="mine")
    async with (
        open_channel(guarded.router.address, guarded.tls("baton://client/proxy")) as channel,
        open_channel(guarded.router.address, guarded.tls("baton://client/alice")) as own,
    ):
        call = await _begun(inference_service_pb2_grpc.InferenceServiceStub(channel), authorization=f"Bearer {ALICE}")
        assert (await inference_service_pb2_grpc.InferenceServiceStub(own).CancelGeneration(cancel)).receipts
        await _is_cancelled(call)


async def test_a_proxy_cancels_for_the_tenant_that_it_names_alone(guarded: Guarded) -> None:
    cancel = generate_pb2.CancelGenerationRequest(request_id="mine")
    async with open_channel(guarded.router.address, guarded.tls("baton://client/gateway")) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        call = await _begun(stub, **{TENANT_KEY: "shop"})
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.CancelGeneration(cancel, metadata=((TENANT_KEY, "mall"),))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.CancelGeneration(cancel, metadata=((TENANT_KEY, "shop"),))).receipts
        await _is_cancelled(call)


async def test_a_run_logs_no_secret(guarded: Guarded, monkeypatch: pytest.MonkeyPatch, restored_logging: None) -> None:
    """Everything at debug, a failure among it: neither tokens nor handoff ids are in any line."""
    handoff_ids: list[str] = []
    hold = guarded.prefill.leases.hold

    def noting(*arguments: object, **options: object) -> object:
        lease = hold(*arguments, **options)  # type: ignore[arg-type]
        handoff_ids.append(lease.handoff_id)
        assert lease.handoff_id not in repr(lease)
        return lease

    monkeypatch.setattr(guarded.prefill.leases, "hold", noting)
    written = io.StringIO()
    with redirect_stderr(written):
        configure_logging("json", "debug")
        logging.getLogger().setLevel(logging.DEBUG)
        await generate(guarded, "baton://client/proxy", ALICE)
        with pytest.raises(aio.AioRpcError):
            await generate(guarded, "baton://client/proxy", "wrong-" + BOB)
        async with open_channel(guarded.prefill.address, guarded.tls("baton://worker/router")) as channel:
            calls = WorkerCalls("", channel)
            handoff = await calls.prefill("left")
            await calls.abort("left")
            assert not (await calls.release(handoff)).still_valid
    text = written.getvalue()
    assert '"caller": "alice"' in text
    assert len(handoff_ids) == 2
    for secret in (ALICE, BOB, *handoff_ids):
        assert secret not in text


async def _code(channel: aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a call with an empty request; of a stream, that of its end or OK after its first message."""
    call = channel.unary_stream(method, request_serializer=bytes)(b"", timeout=60)
    try:
        await call.read()
    except aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


_MESSAGES = [
    f"/{service.full_name}/{method.name}"
    for module in (decode_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_OPERATORS = {
    "/baton.engine.v1.HandoffService/List",
    *(f"/baton.engine.v1.WorkerService/{name}" for name in ("Abort", "Drain", "GetLoad", "GetModel", "WatchLoad")),
    *(
        f"/baton.engine.v1.WorkerService/{name}"
        for name in ("ListLoras", "LoadLora", "UnloadLora", "Shed", "ChangeRole", "Upgrade")
    ),
}


def test_metrics_are_for_those_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    own, scraper = authority.issue("router"), authority.issue("scraper")
    tls = TlsConfig(ca=authority.ca, cert=own.cert, key=own.key)
    trusting = ssl.create_default_context(cafile=authority.ca)
    with serve_monitor(":0", tls.server_context()) as monitor:
        url = f"https://127.0.0.1:{monitor.port}/metrics"
        with pytest.raises(OSError):  # noqa: PT011 - TLS 1.3 says it with whichever read comes next
            urllib.request.urlopen(url, context=trusting, timeout=60).read()
        trusting.load_cert_chain(scraper.cert, scraper.key)
        assert b"baton_build_info" in urllib.request.urlopen(url, context=trusting, timeout=60).read()


def test_a_peer_that_never_shakes_hands_does_not_stop_the_metrics(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    own = authority.issue("router")
    trusting = ssl.create_default_context(cafile=authority.ca)
    with (
        serve_monitor(":0", TlsConfig(cert=own.cert, key=own.key).server_context()) as monitor,
        socket.create_connection(("127.0.0.1", monitor.port), timeout=60),
    ):
        url = f"https://127.0.0.1:{monitor.port}/metrics"
        assert b"baton_build_info" in urllib.request.urlopen(url, context=trusting, timeout=3).read()
