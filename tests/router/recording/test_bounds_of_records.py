"""The bounds of records: of files, of records that are not made yet, and of one record."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
from grpc.aio import AioRpcError
from support.clients.scraping import since
from support.cluster.in_process import DECODE, PREFILL
from support.cluster.recorded import recorded

from baton.connection.credentials import RECORDED
from baton.errors import RequestNotFound
from baton.inference.v1 import generate_pb2, record_pb2
from router.config import RecordsConfig
from router.recording.recorder import Recorder, RecordFolder
from router.recording.table import RecordTable, latest

_MIB = 2**20


def _record(number: int, padding: int = 0) -> record_pb2.RequestRecord:
    record = record_pb2.RequestRecord(record_id=f"{number:032x}", error="x" * padding)
    record.arrived.FromNanoseconds(number)
    return record


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


@pytest.mark.parametrize("padding", [0, 20_000], ids=["small", "large"])
def test_files_are_bounded_in_bytes_and_in_number_and_the_newest_stay(padding: int, tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, _MIB)
    most = 0
    for number in range(600):
        folder.write(_record(number, padding))
        most = max(most, len(list(tmp_path.iterdir())))
    kept = _numbers(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= _MIB
    assert most <= _MIB // 4096
    assert kept == list(range(600 - len(kept), 600))
    assert len(kept) * max(4096, padding) > _MIB * 3 // 4


def test_files_are_not_listed_for_each_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = 0

    def glob(path: Path, pattern: str) -> list[Path]:
        nonlocal listed
        listed += 1
        return list(path.rglob(pattern))

    monkeypatch.setattr(Path, "glob", glob)
    folder = RecordFolder(tmp_path, 2**30)
    for number in range(200):
        folder.write(_record(number))
    assert listed == 1


def test_files_of_a_process_that_has_ended_while_it_wrote_are_removed_with_the_oldest(tmp_path: Path) -> None:
    (tmp_path / f"record-{0:020d}-left.partial").write_text("x")
    folder = RecordFolder(tmp_path, _MIB)
    for number in range(1, 400):
        folder.write(_record(number))
    assert not list(tmp_path.glob("*.partial"))


async def test_a_folder_that_cannot_be_written_any_more_fails_no_request_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    failed = since("baton_router_records_dropped_total", cause="folder")
    async with recorded(PREFILL, DECODE, records=RecordsConfig(asked=True, folder=str(folder)), routers=1) as cluster:
        folder.rmdir()
        folder.write_text("no folder")
        for number in range(3):
            request = generate_pb2.GenerateRequest(prompt="x", request_id=f"one {number}", stopping={"max_tokens": 2})
            assert (await cluster.run(request)).outcome == "OK"
    assert failed.grown == 3
    assert os.listdir(tmp_path) == ["records"]


def test_a_record_that_could_not_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(_path: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", is_full)
    with pytest.raises(OSError, match="No space"):
        RecordFolder(tmp_path, _MIB).write(_record(1))
    assert not list(tmp_path.iterdir())


def test_the_records_of_one_id_are_few_and_small_together_and_the_latest() -> None:
    sizes = [100, 700_000, 200_000, 200_000, 200_000, 500_000]
    table = RecordTable(RecordsConfig(asked=True))
    records = [_record(number, size) for number, size in enumerate(sizes)]
    for record in records:
        record.request_id = "a"
        assert table.add(record)
    found = [record_pb2.RequestRecord.FromString(one) for one in table.find("a", None)]
    assert [int(one.record_id, 16) for one in found] == [3, 4, 5]
    assert latest(records) == found
    large = _record(9, 2 * _MIB)
    assert latest([*records, large]) == [large]
    assert latest(records[:1] * 5) == records[:1] * 4


async def test_other_work_goes_on_between_the_records_that_are_read() -> None:
    recorder = Recorder(RecordsConfig(asked=True), "router", "automatic", lambda: ())
    for number in range(4):
        record = _record(number)
        record.request_id = "a"
        recorder.table.add(record)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.ensure_future(other())
    assert len(await recorder.find("a", None)) == 4
    working.cancel()
    assert turns >= 4


async def test_long_answers_count_among_what_waits_to_be_recorded() -> None:
    records = RecordsConfig(asked=True, max_bytes=4096)
    async with recorded(PREFILL, DECODE, records=records, routers=1) as cluster:
        dropped = since("baton_router_records_dropped_total", cause="busy")
        request = generate_pb2.GenerateRequest(
            prompt="y", request_id="long", stopping={"max_tokens": 3700, "ignore_eos": True}
        )
        async for _ in cluster.stubs[0].Generate(request, metadata=RECORDED):
            pass
        with pytest.raises(RequestNotFound):
            await cluster.record("long")
        assert dropped.grown == 1


async def test_the_ids_of_all_answers_together_are_bounded() -> None:
    records = RecordsConfig(asked=True, prompts=True, max_prompt_bytes=200)
    async with recorded(PREFILL, DECODE, records=records, routers=1) as cluster:
        request = generate_pb2.GenerateRequest(
            prompt="y", request_id="four", sampling={"n": 4}, stopping={"max_tokens": 20, "ignore_eos": True}
        )
        record = await cluster.run(request)
    assert [len(one.token_ids) for one in record.answers] == [20, 20, 0, 0]
    assert all(one.digests and one.tokens == 20 for one in record.answers)


async def test_each_outcome_is_recorded_once_and_leaves_nothing() -> None:
    async with recorded(
        PREFILL, DECODE, records=RecordsConfig(asked=True, max_bytes=64 * _MIB, tenant_bytes=64 * _MIB), routers=1
    ) as cluster:
        [router], [stub] = cluster.routers, cluster.stubs
        kinds = {
            "right": {"prompt": "x", "stopping": {"max_tokens": 2}},
            "refused": {"prompt": "x", "sampling": {"temperature": -1.0}},
            "two": {"prompt": "x", "sampling": {"n": 2}, "stopping": {"max_tokens": 2}},
            "left": {"prompt": "x", "stopping": {"max_tokens": 1000}},
            "late": {"prompt": "x", "stopping": {"max_tokens": 1000}},
        }

        outcomes = {
            "right": {"OK"},
            "refused": {"INVALID_REQUEST"},
            "two": {"OK"},
            "left": {"CANCELLED"},
            "late": {"DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"},
        }

        async def run(kind: str, number: int) -> None:
            request = generate_pb2.GenerateRequest(request_id=f"{kind} {number}", **kinds[kind])  # type: ignore[arg-type]
            call = stub.Generate(request, metadata=RECORDED, timeout=0.02 if kind == "late" else 60)
            with suppress(AioRpcError, asyncio.CancelledError):
                async for _ in call:
                    if kind == "left":
                        call.cancel()

        for number in range(40):
            await asyncio.gather(*(run(kind, number) for kind in outcomes))
        recorder = router.path.recorder
        assert recorder is not None
        for kind, possible in outcomes.items():
            found = [await recorder.find(f"{kind} {number}", None) for number in range(40)]
            assert all(record.outcome in possible for records in found for record in records)
            # On a busy machine a call may be over before its request has come.
            assert {len(records) for records in found} <= ({0, 1} if kind == "late" else {1})
            assert any(found)
        assert len(router.path.running.table) == 0
