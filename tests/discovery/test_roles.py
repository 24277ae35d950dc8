"""Every place that knows the roles of workers derives them from their declaration."""

from typing import get_args

from baton.engine.v1 import decode_pb2, embed_pb2, encode_pb2, prefill_pb2
from baton.inference.v1 import model_pb2, timing_pb2
from cli.arguments import parse
from cli.commands.local.up import cluster_options
from cli.local.plan import ROOT, ClusterOptions
from discovery.pairing import _OPPOSITE
from discovery.roles import COMPLETING, ROLE_KINDS, ROLES, WITH_KV, Role
from router.telemetry import metrics as router_metrics
from services import server
from services.requests import calls


def test_there_is_one_declaration_for_each_name() -> None:
    assert tuple(kind.name for kind in ROLE_KINDS) == ROLES == get_args(Role)
    assert len({kind.stage for kind in ROLE_KINDS}) == len(ROLE_KINDS)


def test_each_role_has_the_service_that_it_declares() -> None:
    modules = (encode_pb2, prefill_pb2, decode_pb2, embed_pb2)
    services = {name for module in modules for name in module.DESCRIPTOR.services_by_name}
    assert services == {kind.service for kind in ROLE_KINDS}
    assert set(server.ROLE_SERVICES) == {f"baton.engine.v1.{name}" for name in services}


def test_each_role_has_a_stage_and_the_workers_of_a_model_are_counted_by_role() -> None:
    assert {name: calls._FIRST_STAGES[name] for name in ROLES} == {kind.name: kind.stage for kind in ROLE_KINDS}
    assert timing_pb2.STAGE_UNSPECIFIED not in {kind.stage for kind in ROLE_KINDS}
    counted = {field.name for field in model_pb2.Model.DESCRIPTOR.fields if field.name.endswith("_workers")}
    assert counted == {f"{role}_workers" for role in ROLES}
    assert router_metrics.ROLES is ROLES


def test_each_role_can_be_started_and_has_a_configuration_that_ships() -> None:
    assert set(ROLES) <= set(ClusterOptions.model_fields)
    words = [word for role in ROLES for word in (f"--{role}", "2")]
    options = cluster_options(parse(["up", "--engine", "simulated", *words]))
    assert set(options.workers) == {(role, number) for role in ROLES for number in range(2)}
    assert [role for role in ROLES if not (ROOT / "deploy" / "config" / f"{role}.yaml").is_file()] == []


def test_those_that_hand_over_have_kv_and_a_request_ends_on_one_that_completes() -> None:
    assert set(_OPPOSITE) == WITH_KV
    assert set(ROLES) >= COMPLETING
