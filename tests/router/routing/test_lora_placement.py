"""Workers that have an adapter loaded are preferred, and those that cannot have it are left out."""

from dataclasses import dataclass
from typing import Any

import pytest

from baton.errors import InvalidRequest, NoWorker, Unsupported
from baton.inference.v1 import lora_pb2, model_pb2
from discovery.record import WorkerRecord
from router.routing.filters import Constraints, filter_workers
from router.routing.policy import Candidates, KnownLoras
from router.routing.scoring import prefer_loaded
from router.text.served_model import ServedModel
from router.workers.loras import find_lora, split_name

ADAPTER = lora_pb2.LoraAdapter(name="a", digest="1")
OTHER = lora_pb2.LoraAdapter(name="a", digest="2")
MODEL = ServedModel("m", model_pb2.ModelLimits(), model_pb2.ModelCapabilities(), frozenset(), None)


@dataclass(frozen=True)
class Seen:
    """A worker as routing sees it."""

    record: WorkerRecord
    loras: KnownLoras
    requests: int = 0
    problem: str = ""


def worker(
    name: str, *, loaded: Any = (), available: Any = (), requests: int = 0, roles: Any = ("decode",), tells: bool = True
) -> Any:
    record = WorkerRecord(name, 1, "x:1", roles, "m", "pytorch", "layout", 100, capabilities=("lora",))
    told = KnownLoras.of(lora_pb2.LoraInventory(loaded=loaded, available=available))
    return Seen(record, told if tells else KnownLoras(), requests)


def test_a_worker_without_the_adapter_is_rejected_by_its_content() -> None:
    workers = [worker("has", loaded=[ADAPTER]), worker("can", available=[ADAPTER]), worker("old", loaded=[OTHER])]
    found = filter_workers(workers, Constraints("decode", "m", 10, lora=ADAPTER))
    assert [one.record.worker_id for one in found.eligible] == ["has", "can"]
    assert found.reasons() == "old: has no adapter a of content 1"


@pytest.mark.parametrize(("busy", "chosen"), [(8, ["has"]), (9, ["has", "can"])])
def test_a_loaded_adapter_is_worth_eight_requests(busy: int, chosen: list[str]) -> None:
    workers = [worker("has", loaded=[ADAPTER], requests=busy), worker("can", available=[ADAPTER])]
    found = prefer_loaded(Candidates(workers), ADAPTER)
    assert [one.record.worker_id for one in found.decode] == chosen


def test_a_handoff_is_worth_more_than_a_loaded_adapter() -> None:
    both = worker("both", loaded=[ADAPTER], roles=("prefill", "decode"))
    prefill = worker("prefill", available=[ADAPTER], roles=("prefill",))
    found = prefer_loaded(Candidates([both], [both, prefill], requires_prefill=True), ADAPTER)
    assert [one.record.worker_id for one in found.prefill_for(both)] == ["prefill"]


def test_of_two_contents_the_one_that_more_decode_workers_have_loaded_is_taken() -> None:
    workers = [worker("one", loaded=[OTHER]), worker("two", loaded=[ADAPTER]), worker("three", loaded=[ADAPTER])]
    assert find_lora(workers, MODEL, "a") == ADAPTER
    assert find_lora([worker("four", available=[ADAPTER]), *workers[:1]], MODEL, "a") == OTHER


def test_an_unknown_adapter_is_the_request_s_fault_only_if_all_workers_have_told() -> None:
    with pytest.raises(InvalidRequest, match="lora_name: no worker of m has the adapter 'b'; known are a"):
        find_lora([worker("one", loaded=[ADAPTER])], MODEL, "b")
    with pytest.raises(NoWorker):
        find_lora([worker("one", loaded=[ADAPTER]), worker("two", tells=False)], MODEL, "b")
    with pytest.raises(Unsupported):
        find_lora([], MODEL, "b")


def test_a_model_s_name_may_have_colons_itself() -> None:
    assert list(split_name("org:model:adapter")) == [("org", "model:adapter"), ("org:model", "adapter")]
    assert list(split_name(":a:")) == []
