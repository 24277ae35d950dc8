"""Records of requests: what they say, which are kept, who gets them, and what they take."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from grpc.aio import AioRpcError
from support.clients.scraping import since
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, bench, simulated
from support.cluster.recorded import recorded
from support.eventually import PATIENCE_SECONDS

from baton import AsyncClient
from baton.calls import unary
from baton.connection.credentials import RECORD_KEY, RECORDED
from baton.engine.v1 import peer_pb2, peer_pb2_grpc
from baton.errors import BatonError, InvalidRequest, RequestNotFound, Unauthenticated, Unavailable
from baton.inference.v1 import generate_pb2, record_pb2
from baton.records import read_bundle
from router.config import AuthConfig, PeersConfig, RecordsConfig, RouterConfig
from rpc.channels import open_channel

ASKED = RecordsConfig(asked=True)
_SECRETS = ("xylophone", "zeppelin", "quokka", "narwhal", "marzipan", "bassoon")


def _router(records: RecordsConfig, **fields: Any) -> RouterConfig:
    return FAST_ROUTER.model_copy(update={"records": records, **fields})


async def _run(running: Bench, *, metadata: Any = RECORDED, **fields: Any) -> list[generate_pb2.GenerateResponse]:
    request = generate_pb2.GenerateRequest(**{"prompt": "hello", "stopping": {"max_tokens": 20}, **fields})
    return [one async for one in running.stub.Generate(request, timeout=PATIENCE_SECONDS, metadata=metadata)]


async def _records(running: Bench, request_id: str, tenant: str = "") -> list[record_pb2.RequestRecord]:
    async with AsyncClient(running.address, tenant=tenant) as client:
        return await client.records(request_id)


async def test_a_record_says_where_a_request_ran_and_how_long_each_part_took() -> None:
    async with bench(PREFILL, DECODE, router=_router(ASKED)) as running:
        messages = await _run(running, request_id="one", sampling={"seed": 3})
        [record] = await _records(running, "one")
    [answer] = record.answers
    assert [(one.call, one.worker_id, one.outcome) for one in answer.attempts] == [
        ("prefill", "p1", "OK"),
        ("decode", "d1", "OK"),
    ]
    assert [(one.tokens_before, one.tokens_after) for one in answer.attempts] == [(0, 0), (1, 20)]
    assert answer.attempts[0].held_blocks == 1
    transfers = [one for one in answer.attempts[1].stages if one.transport]
    assert [one.num_bytes for one in transfers] == [answer.attempts[0].held_bytes]
    [placed] = answer.placements
    assert (placed.prefill_worker_id, placed.decode_worker_id, placed.workers) == ("p1", "d1", 2)
    assert (record.outcome, record.cause, record.policy) == ("OK", record_pb2.RECORD_CAUSE_ASKED, "least_loaded")
    assert record.finished.timings == messages[-1].finished.timings
    assert (answer.seed, answer.tokens, len(answer.digests)) == (3, 20, 2)


async def test_a_policy_that_predicts_has_its_candidates_in_the_record() -> None:
    routing = FAST_ROUTER.routing.model_copy(update={"policy": "predicted_seconds"})
    workers = [simulated(f"d{number}", "prefill", "decode") for number in range(3)]
    async with bench(*workers, router=_router(ASKED, routing=routing)) as running:
        messages = await _run(running, request_id="one")
        [record] = await _records(running, "one")
    [placement] = record.answers[0].placements
    assert placement.candidates[0].decode_worker_id == messages[0].started.decode_worker_id
    assert 1 < len(placement.candidates) <= 8
    assert {one.worker_id for one in placement.loads} == {"d0", "d1", "d2"}


async def test_a_decode_that_failed_and_went_on_elsewhere_is_in_the_record() -> None:
    workers = [simulated(f"d{number}", "decode", allow_faults=True) for number in range(2)]
    workers = [worker.model_copy(update={"allow_faults": True}) for worker in workers]
    async with bench(*workers, router=_router(ASKED, allow_faults=True)) as running:
        plan = (("x-baton-fault", "drop@decode:5"), *RECORDED)
        await _run(running, request_id="one", metadata=plan)
        [record] = await _records(running, "one")
    first, second = record.answers[0].attempts
    assert (first.outcome, second.outcome) == ("WORKER_UNAVAILABLE", "OK")
    assert first.worker_id != second.worker_id
    assert second.tokens_before == first.tokens_after
    assert record.finished.migrations == 1


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        (RecordsConfig(share=1.0), record_pb2.RECORD_CAUSE_SAMPLED),
        (RecordsConfig(slow_seconds=1e-9), record_pb2.RECORD_CAUSE_SLOW),
        (RecordsConfig(slow_first_token_seconds=1e-9), record_pb2.RECORD_CAUSE_SLOW),
        (RecordsConfig(slow_seconds=1e6, failed=True), None),
        (RecordsConfig(), None),
    ],
    ids=["sampled", "slow", "slow first token", "quick and right", "off"],
)
async def test_a_request_is_recorded_as_the_configuration_says(
    records: RecordsConfig, cause: record_pb2.RecordCause.ValueType | None
) -> None:
    async with bench(PREFILL, DECODE, router=_router(records)) as running:
        await _run(running, request_id="one", metadata=())
        if cause is None:
            with pytest.raises(RequestNotFound):
                await _records(running, "one")
        else:
            [record] = await _records(running, "one")
            assert record.cause == cause


async def test_a_failed_request_is_recorded_with_its_error_and_a_refused_one_is_not() -> None:
    async with bench(PREFILL, DECODE, router=_router(RecordsConfig(failed=True))) as running:
        with pytest.raises(Exception, match="temperature"):
            await _run(running, request_id="wrong", sampling={"temperature": -1.0})
        await running.stop("d1")
        await running.stop("p1")
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await _run(running, request_id="failed", metadata=())
        [record] = await _records(running, "failed")
        assert record.cause == record_pb2.RECORD_CAUSE_FAILED
        assert record.error
        with pytest.raises(RequestNotFound):
            await _records(running, "wrong")


async def test_a_wrong_wish_is_refused_by_its_name() -> None:
    async with bench(PREFILL, DECODE, router=_router(ASKED)) as running:
        with pytest.raises(Exception, match=RECORD_KEY):
            await _run(running, metadata=((RECORD_KEY, "please"),))


async def test_a_tenant_gets_its_own_records_only() -> None:
    async with bench(PREFILL, DECODE, router=_router(ASKED)) as running:
        for tenant in ("acme", "umbrella"):
            await _run(running, request_id="same", metadata=(("x-baton-tenant", tenant), *RECORDED))
        await _run(running, request_id="acme's", metadata=(("x-baton-tenant", "acme"), *RECORDED))
        for tenant in ("acme", "umbrella"):
            assert [one.tenant for one in await _records(running, "same", tenant)] == [tenant]
        for other in ("umbrella", ""):
            with pytest.raises(RequestNotFound, match="is kept for this tenant"):
                await _records(running, "acme's", other)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("request_id", ["../../../etc/passwd", "a/b\\c", "%s%n{}", "naïve ☃", "x" * 128])
async def test_a_strange_request_id_names_no_file_and_is_found(request_id: str, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    records = RecordsConfig(asked=True, folder=str(folder))
    async with bench(PREFILL, DECODE, router=_router(records)) as running:
        await _run(running, request_id=request_id)
        [record] = await _records(running, request_id)
    [file] = _files(tmp_path)
    assert file.parent == folder
    assert file.name == f"record-{record.arrived.ToNanoseconds():020d}-{record.record_id}.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_bundle(file.read_text(), "file") == [record]


@pytest.mark.parametrize("request_id", ["", "x" * 300, "a\nb", "\0"])
async def test_what_is_no_request_id_is_refused(request_id: str) -> None:
    async with bench(PREFILL, DECODE, router=_router(ASKED)) as running:
        with pytest.raises(InvalidRequest, match="request_id"):
            await _records(running, request_id)


def _private() -> dict[str, Any]:
    """A request whose every text has a word of its own."""
    first, second, third, fourth, fifth, sixth = _SECRETS
    schema = {"type": "object", "properties": {third: {"type": "string"}}}
    return {
        "prompt": f"about a {first}",
        "stopping": {"max_tokens": 20, "stop": [second]},
        "guided": {"json_schema": json.dumps(schema)},
        "sampling": {"bad_words": [fourth]},
        "routing": {"session_key": fifth, "cache_salt": sixth},
    }


@pytest.mark.parametrize("fails", ["not", "at once", "with its text"])
async def test_nothing_of_a_prompt_or_an_answer_is_kept_unless_that_is_allowed(fails: str, tmp_path: Path) -> None:
    records = RecordsConfig(asked=True, folder=str(tmp_path))
    fields = _private()
    if fails == "not":
        del fields["guided"]
    if fails == "with its text":
        fields["chat"] = {"messages": [{"role": "user", "parts": [{"text": "x"}]}], "tools": [{"name": "a marzipan"}]}
    async with bench(PREFILL, DECODE, router=_router(records)) as running:
        messages = []
        with nullcontext() if fails == "not" else pytest.raises(AioRpcError):
            messages = await _run(running, request_id="private", **fields)
        [record] = await _records(running, "private")
    answer = "".join(one.token.text for one in messages)
    assert fails != "not" or len(answer) > 5
    kept = record.SerializeToString() + b"".join(file.read_bytes() for file in _files(tmp_path))
    for text in (*_SECRETS, *([answer] if answer else ())):
        assert text.encode() not in kept
        assert json.dumps(text)[1:-1].encode() not in kept
    assert not record.answers or not record.answers[0].token_ids
    assert set(record.redacted) & {"prompt", "chat"}


async def test_prompts_and_answers_are_kept_where_that_is_allowed_but_no_keys_of_caches() -> None:
    fields = _private()
    del fields["guided"]
    async with bench(PREFILL, DECODE, router=_router(RecordsConfig(asked=True, prompts=True))) as running:
        messages = await _run(running, request_id="open", **fields)
        [record] = await _records(running, "open")
    assert record.request.prompt == "about a xylophone"
    assert list(record.answers[0].token_ids) == [id for one in messages for id in one.token.token_ids]
    assert not record.redacted
    assert b"marzipan" not in record.SerializeToString()
    assert b"bassoon" not in record.SerializeToString()


async def test_a_record_is_a_few_kibibytes_and_many_are_bounded_of_a_tenant_and_of_all() -> None:
    dropped = since("baton_router_records_dropped_total", cause="memory")
    records = RecordsConfig(asked=True, max_bytes=40_000, tenant_bytes=20_000)
    async with recorded(PREFILL, DECODE, records=records, routers=1) as cluster:
        [router], [stub] = cluster.routers, cluster.stubs
        assert router.path.recorder is not None
        table = router.path.recorder.table
        for tenant in ("a", "b", "c"):
            for number in range(25):
                request = generate_pb2.GenerateRequest(
                    prompt="hello", request_id=f"{tenant}{number}", stopping={"max_tokens": 200}
                )
                call = stub.Generate(request, metadata=(("x-baton-tenant", tenant), *RECORDED))
                async for _ in call:
                    pass
            async with AsyncClient(router.address, tenant=tenant) as client:
                [record] = await client.records(f"{tenant}24")
                assert record.ByteSize() <= 4096
                with pytest.raises(RequestNotFound):
                    await client.records(f"{tenant}0")
            assert table.of_tenant(tenant) <= 20_000
        assert table.num_bytes <= 40_000
        assert table.num_bytes == sum(map(table.of_tenant, "abc"))
        assert dropped.grown == 75 - len(table)


async def test_a_prompt_that_is_too_long_to_be_kept_leaves_its_digest() -> None:
    records = RecordsConfig(asked=True, prompts=True, max_prompt_bytes=100)
    async with bench(PREFILL, DECODE, router=_router(records)) as running:
        await _run(running, request_id="long", prompt="z" * 300)
        [record] = await _records(running, "long")
    assert list(record.redacted) == ["prompt"]
    assert (len(record.prompt_digest), len(record.content_digest)) == (32, 32)


async def test_any_router_of_the_fleet_finds_a_record() -> None:
    async with recorded(PREFILL, DECODE, records=ASKED) as cluster:
        for router in range(2):
            request = generate_pb2.GenerateRequest(prompt="x", request_id=f"at {router}", stopping={"max_tokens": 3})
            await cluster.run(request, router)
            for asked in range(2):
                assert (await cluster.record(f"at {router}", asked)).tenant == ""


async def test_a_router_that_does_not_answer_is_no_proof_that_there_is_no_record() -> None:
    async with recorded(PREFILL, DECODE, records=ASKED) as cluster:
        [peer] = cluster.routers[0].path.peers.links  # type: ignore[union-attr]

        async def hang(*_: object) -> None:
            raise Unavailable("gone")

        peer.find_records = hang  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="did not answer"):
            await cluster.clients[0].records("unknown")


async def test_who_is_not_registered_as_a_router_gets_no_records_from_one() -> None:
    async with recorded(PREFILL, DECODE, records=ASKED) as cluster:
        await cluster.run(generate_pb2.GenerateRequest(prompt="x", request_id="one", stopping={"max_tokens": 2}))
        [asked, other] = cluster.registry.routers.workers()
        async with open_channel(asked.address) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            found = await unary(
                stub.FindRecords(peer_pb2.FindRecordsRequest(request_id="one", router_id=other.worker_id))
            )
            for router_id in ("", "stranger", asked.worker_id):
                with pytest.raises(Unavailable, match="not registered"):
                    await unary(stub.FindRecords(peer_pb2.FindRecordsRequest(request_id="one", router_id=router_id)))
        assert len(found.records) == (cluster.routers[0].path.peers.own.worker_id == asked.worker_id)  # type: ignore[union-attr]


def test_records_of_authenticated_callers_are_not_lent_to_routers_that_are_not() -> None:
    tokens = AuthConfig(tokens_file=Path("tokens.yaml"))
    for listen, lends in (("", True), ("0.0.0.0:7100", False)):
        assert _router(ASKED, auth=tokens, peers=PeersConfig(listen=listen)).shares_records == lends
    assert _router(ASKED, peers=PeersConfig(listen="0.0.0.0:7100")).shares_records
    assert not _router(RecordsConfig()).shares_records


async def test_requests_that_end_faster_than_records_are_made_are_counted_and_not_waited_for() -> None:
    async with recorded(PREFILL, DECODE, records=RecordsConfig(asked=True, max_bytes=4096), routers=1) as cluster:
        dropped = since("baton_router_records_dropped_total", cause="busy")
        request = generate_pb2.GenerateRequest(prompt="y" * 5000, request_id="large", stopping={"max_tokens": 1})
        call = cluster.stubs[0].Generate(request, metadata=RECORDED)
        assert [one async for one in call]
        with pytest.raises(RequestNotFound):
            await cluster.record("large")
        assert dropped.grown == 1


async def test_a_cancelled_request_is_recorded_up_to_its_end() -> None:
    workers = (PREFILL, simulated("d1", "decode", decode_step_seconds=0.01))
    async with bench(*workers, router=_router(ASKED)) as running:
        task = asyncio.ensure_future(_run(running, request_id="left", stopping={"max_tokens": 400}))
        async with AsyncClient(running.address) as client:
            while True:
                try:
                    await client.cancel("left")
                    break
                except BatonError:
                    await asyncio.sleep(0.01)
            with pytest.raises(Exception, match="CANCELLED"):
                await task
            [record] = await client.records("left")
    assert record.outcome == "CANCELLED"
    assert record.error == "cancelled by CancelGeneration"


async def test_an_operator_sees_the_records_of_all_and_a_client_only_its_own(tmp_path: Path) -> None:
    tokens = {name: name * 7 for name in ("alice", "bobby", "otto7")}
    roles = {"otto7": ", role: operator"}
    rows = [f"{{name: {name}, token: {token}{roles.get(name, '')}}}" for name, token in tokens.items()]
    file = tmp_path / "tokens.yaml"
    file.write_text(f"tokens: [{', '.join(rows)}]")
    callers = (("alice", "", True), ("otto7", "", True), ("bobby", "", False), ("bobby", "alice", False))
    async with bench(PREFILL, DECODE, router=_router(ASKED, auth=AuthConfig(tokens_file=file))) as running:
        bearer = (("authorization", f"Bearer {tokens['alice']}"), *RECORDED)
        await _run(running, request_id="hers", metadata=bearer)
        for name, tenant, sees in callers:
            async with AsyncClient(running.address, token=tokens[name], tenant=tenant) as client:
                if sees:
                    assert [one.tenant for one in await client.records("hers")] == ["alice"]
                else:
                    with pytest.raises(RequestNotFound):
                        await client.records("hers")
        async with AsyncClient(running.address) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.records("hers")
