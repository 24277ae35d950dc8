"""Every place that knows the roles of workers derives them from their declaration."""

from google.protobuf import descriptor_pool

from baton.inference.v1 import model_pb2, timing_pb2
from cli.arguments import parse
from cli.commands.up import cluster_options
from cli.local.plan import ROOT
from discovery.pairing import _OPPOSITE
from engine_protocol.fault_injection import points
from engine_protocol.roles import completing, load, role_kinds, roles, with_kv
from services.requests.calls import first_stages


def test_each_role_has_the_service_that_it_declares() -> None:
    for kind in role_kinds().values():
        assert callable(load(kind.worker))
        assert descriptor_pool.Default().FindServiceByName(kind.service).full_name == kind.service


def test_each_role_has_a_stage_and_the_workers_of_a_model_are_counted_by_role() -> None:
    stages = {name: timing_pb2.Stage.Value(kind.stage) for name, kind in role_kinds().items()}
    assert {name: first_stages()[name] for name in roles()} == stages
    assert len({*stages.values()} - {timing_pb2.STAGE_UNSPECIFIED}) == len(stages)
    counted = {field.name for field in model_pb2.Model.DESCRIPTOR.fields if field.name.endswith("_workers")}
    assert counted <= {f"{role}_workers" for role in roles()}


def test_faults_can_be_injected_in_each_role() -> None:
    assert {"router", "", *roles()} == set(points().values())


def test_each_role_can_be_started_and_has_a_configuration_that_ships() -> None:
    words = [word for role in roles() for word in (f"--{role}", "2")]
    options = cluster_options(parse(["up", "--engine", "simulated", *words]))
    assert set(options.workers) == {(role, number) for role in roles() for number in range(2)}
    assert [role for role in roles() if not (ROOT / "deploy" / "config" / f"{role}.yaml").is_file()] == []


def test_those_that_hand_over_have_kv_and_a_request_ends_on_one_that_completes() -> None:
    assert set(_OPPOSITE) == with_kv()
    assert set(roles()) >= completing()
