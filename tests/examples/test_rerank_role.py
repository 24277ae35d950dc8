"""A role of another distribution: its workers register and are called by the router, as those of built-in roles are."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import Bench, bench, simulated

from baton.error_details import from_rpc_error
from baton.errors import ConfigError, InvalidRequest
from baton.inference.v1 import model_pb2
from engine_protocol import fault_injection, roles
from rpc.channels import open_channel
from runtime.config import load
from services.config import WorkerConfig
from services.requests import calls

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extending" / "rerank"
DERIVED = (roles.role_kinds, roles.roles, roles.completing, roles.with_kv, fault_injection.points, calls.first_stages)
MODULES = ("rerank_pb2", "rerank_pb2_grpc", "rerank_role", "rerank_worker", "rerank_router")
DOCUMENTS = ["a pear", "an apple", "a mango", "the answer is here"]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated stubs of the example's proto."""
    folder = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={EXAMPLE}", f"--proto_path={ROOT / 'protos'}"]
    command += [f"--python_out={folder}", f"--grpc_python_out={folder}", "rerank.proto"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, stubs: Path) -> Iterator[None]:
    """The metadata of a distribution that brings the role."""
    for folder in (EXAMPLE, stubs):
        monkeypatch.syspath_prepend(str(folder))
    found = EntryPoints([EntryPoint("rerank", "rerank_role:KIND", roles.ENTRY_POINTS)])
    monkeypatch.setattr(roles, "entry_points", lambda group: found.select(group=group))
    forget()
    yield
    monkeypatch.undo()
    forget()
    for name in MODULES[2:]:
        sys.modules.pop(name, None)


def forget() -> None:
    for derived in DERIVED:
        derived.cache_clear()


@pytest.fixture
async def running() -> AsyncIterator[Bench]:
    async with bench(simulated("r1", "rerank"), simulated("r2", "rerank")) as running:
        yield running


async def rerank(running: Bench, **fields: Any) -> Any:
    pb, stubs = import_module("rerank_pb2"), import_module("rerank_pb2_grpc")
    async with open_channel(running.address) as channel:
        return await stubs.RerankServiceStub(channel).Rerank(pb.RerankRequest(**fields), timeout=20)


async def test_a_router_answers_by_workers_of_the_role(running: Bench) -> None:
    answer = await rerank(running, query="the answer is here", documents=DOCUMENTS, top=2)
    assert answer.results[0].index == 3
    assert len(answer.results) == 2
    assert answer.results[0].score == pytest.approx(1.0)
    assert answer.results[1].score < 1.0


async def test_another_worker_answers_if_one_is_lost(running: Bench) -> None:
    await running.proxies["r1"].cut()
    for _ in range(4):
        answer = await rerank(running, query="a pear", documents=DOCUMENTS)
        assert answer.results[0].index == 0


async def test_a_wrong_field_is_named_as_the_client_knows_it(running: Bench) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await rerank(running, query="", documents=["a pear", ""])
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == ["query", "documents[1]"]


async def test_its_workers_are_counted_and_make_a_model_ready(running: Bench) -> None:
    listed = await running.stub.ListModels(model_pb2.ListModelsRequest())
    assert listed.models[0].workers["rerank"] == 2
    assert running.report()["status"] == "SERVING"


async def test_faults_can_be_injected_at_its_own_point(running: Bench) -> None:
    assert fault_injection.parse("drop@rerank")[0].role == "rerank"
    assert fault_injection.parse("delay=1@queue;role=rerank")[0].role == "rerank"


async def test_a_worker_without_the_role_says_so() -> None:
    pb, stubs = import_module("rerank_pb2"), import_module("rerank_pb2_grpc")
    async with bench(simulated("d1", "decode")) as running:
        worker = running.cluster.workers[0]
        with pytest.raises(aio.AioRpcError) as caught:
            await worker.stub(stubs.ScoreServiceStub).Score(pb.ScoreRequest(request_id="r"), timeout=20)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_a_configuration_may_name_the_role_while_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["roles=[rerank]", "engine={kind: simulated}"]
    assert load(WorkerConfig, "deploy/config/worker.yaml", words).value.roles == ("rerank",)
    monkeypatch.setattr(roles, "entry_points", lambda group: ())
    forget()
    with pytest.raises(ConfigError, match=r"unknown role 'rerank'; expected one of encode, prefill, decode, embed"):
        load(WorkerConfig, "deploy/config/worker.yaml", words)


@pytest.mark.parametrize("value", ["rerank_role:ROLE", "rerank_role:MISSING", "no.such.module:KIND"])
def test_what_is_not_a_role_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    found = EntryPoints([EntryPoint("rerank", value, roles.ENTRY_POINTS)])
    monkeypatch.setattr(roles, "entry_points", lambda group: found.select(group=group))
    forget()
    with pytest.raises(ConfigError, match="role 'rerank'"):
        roles.role_kinds()
