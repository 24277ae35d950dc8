"""`baton doctor --config`: the timeouts of a deployment, in order or not."""

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import ConfigError
from devtools.doctor.deployment import ConfiguredProcess, EnvoyFile, Start, ask, read, seconds
from devtools.doctor.finding import Severity
from devtools.doctor.timeouts import check_timeouts

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
ENVOY = ROOT / "deploy" / "envoy" / "envoy.yaml"


@pytest.fixture(scope="module")
def asked() -> dict[str, ConfiguredProcess]:
    """The router and the prefill worker of deploy/kubernetes, as their programs say that they would run."""

    async def ask_both() -> dict[str, ConfiguredProcess]:
        files = [KUBERNETES / "router.yaml", KUBERNETES / "prefill.yaml"]
        return {start.module: await ask(start, ROOT) for start in read(files, ROOT) if isinstance(start, Start)}

    return asyncio.run(ask_both())


@pytest.fixture
def envoy() -> EnvoyFile:
    return EnvoyFile("envoy.yaml", yaml.safe_load(ENVOY.read_text()))


def with_values(process: ConfiguredProcess, values: Mapping[str, object]) -> ConfiguredProcess:
    return replace(process, values={**process.values, **values})


def problems(*processes: ConfiguredProcess, envoy: EnvoyFile | None = None) -> list[tuple[Severity, str]]:
    found = check_timeouts(processes, [envoy] if envoy else [])
    return [(each.severity, each.found) for each in found if each.severity is not Severity.WELL]


def test_what_is_shipped_is_ordered(asked: dict[str, ConfiguredProcess], envoy: EnvoyFile) -> None:
    assert problems(*asked.values(), envoy=envoy) == []


def test_a_grace_that_ends_before_the_drain_is_broken(asked: dict[str, ConfiguredProcess]) -> None:
    ((severity, found),) = problems(with_values(asked["services"], {"drain_seconds": 85}))
    assert severity is Severity.BROKEN
    assert (
        "drain_seconds + handoff.lease_seconds (95 s) is not under the grace period before it is killed (90 s)" in found
    )


def test_what_passes_before_a_routers_drain_counts_too(asked: dict[str, ConfiguredProcess]) -> None:
    router = replace(asked["router"], start=replace(asked["router"].start, leaving_seconds=40))
    ((_, found),) = problems(router)
    assert "preStop + drain_seconds + announce_seconds (663 s) is not under" in found


def test_a_router_that_drains_for_less_than_a_request_takes_is_a_warning(asked: dict[str, ConfiguredProcess]) -> None:
    ((severity, found),) = problems(with_values(asked["router"], {"drain_seconds": 30}))
    assert severity is Severity.WARNING
    assert found.endswith("is over drain_seconds (30 s): an upgrade cuts the longest streams")


def test_a_hung_worker_that_is_noticed_later_than_its_key_goes_is_broken(asked: dict[str, ConfiguredProcess]) -> None:
    ((_, found),) = problems(with_values(asked["router"], {"probe.hung_seconds": 10}), asked["services"])
    assert "probe.hung_seconds (10 s) is not under registry.lease_ttl_seconds of" in found


def test_a_lease_shorter_than_the_wait_for_its_renewal_is_broken(asked: dict[str, ConfiguredProcess]) -> None:
    ((severity, found),) = problems(with_values(asked["services"], {"handoff.lease_seconds": 2}))
    assert severity is Severity.BROKEN
    assert "the wait for the answer to a renewal (2 s) is not under handoff.lease_seconds (2 s)" in found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine.handoff_deadline_seconds": 600}, "engine.handoff_deadline_seconds (600 s) is not under"),
        ({"handoff.lease_seconds": 600}, "handoff.lease_seconds (600 s) is not under"),
        ({"engine.stall_seconds": 600}, "kv_transfer_timeout_ms (600 s) is not under engine.stall_seconds (600 s)"),
    ],
)
def test_tensorrt_llms_transfer_outlasts_the_lease_and_the_deadline(
    asked: dict[str, ConfiguredProcess], settings: dict[str, object], expected: str
) -> None:
    ours = {"engine.handoff_deadline_seconds": 30, "engine.stall_seconds": 900}
    engine = {"engine.extra_engine_args": "deploy/engine_configs/llama/prefill.yaml", **ours}
    worker = replace(asked["services"], start=replace(asked["services"].start, grace_seconds=1000))
    assert problems(with_values(worker, engine)) == []
    ((_, found),) = problems(with_values(worker, {**engine, **settings}))
    assert expected in found


def manager_of(envoy: EnvoyFile) -> Any:
    return envoy.value["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def route_of(envoy: EnvoyFile) -> Any:
    routes = manager_of(envoy)["route_config"]["virtual_hosts"][0]["routes"]
    return next(
        each["route"] for each in routes if "(Inference|" in each["match"].get("safe_regex", {}).get("regex", "")
    )


def test_an_envoy_that_cuts_idle_streams_before_the_router_ends_them_is_broken(
    asked: dict[str, ConfiguredProcess], envoy: EnvoyFile
) -> None:
    manager_of(envoy)["stream_idle_timeout"] = "600s"
    ((severity, found),) = problems(asked["router"], envoy=envoy)
    assert severity is Severity.BROKEN
    assert found.endswith("is not under stream_idle_timeout (600 s): Envoy cuts streams that are still running")


def test_an_envoy_that_says_nothing_has_its_own_short_timeouts(
    asked: dict[str, ConfiguredProcess], envoy: EnvoyFile
) -> None:
    del manager_of(envoy)["stream_idle_timeout"], route_of(envoy)["timeout"]
    found = " ".join(each for _, each in problems(asked["router"], envoy=envoy))
    assert "stream_idle_timeout (300 s)" in found
    assert "the route's timeout (15 s)" in found


def test_an_envoy_that_pings_too_often_is_broken(asked: dict[str, ConfiguredProcess], envoy: EnvoyFile) -> None:
    (routers,) = [each for each in envoy.value["static_resources"]["clusters"] if each["name"] == "routers"]
    changed = copy.deepcopy(routers)
    (options,) = changed["typed_extension_protocol_options"].values()
    options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]["interval"] = "2s"
    routers.update(changed)
    ((_, found),) = problems(asked["router"], envoy=envoy)
    assert "connection_keepalive.interval (2 s) is under the routers' least ping interval (5 s)" in found


def test_a_router_that_does_not_announce_its_leaving_to_envoy_is_a_warning(
    asked: dict[str, ConfiguredProcess], envoy: EnvoyFile
) -> None:
    ((severity, found),) = problems(with_values(asked["router"], {"announce_seconds": 1}), envoy=envoy)
    assert severity is Severity.WARNING
    assert "Envoy learns from failed requests that a router is leaving" in found


@pytest.mark.parametrize(("text", "expected"), [("660s", 660), ("1m30s", 90), ("0.5s", 0.5), ("250ms", 0.25)])
def test_durations_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "5", "5s later", None])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        seconds(text)


def test_compose_files_are_read_with_their_grace() -> None:
    starts = [each for each in read([ROOT / "deploy" / "compose" / "disagg.yaml"], ROOT) if isinstance(each, Start)]
    assert [(each.name.split()[-1], each.module, each.grace_seconds) for each in starts] == [
        ("(router)", "router", 60),
        ("(prefill)", "services", 60),
        ("(decode)", "services", 60),
    ]


def doctor(*paths: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli", "doctor", "--config", *paths]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_the_command_says_what_is_not_ordered_and_fails(tmp_path: Path) -> None:
    service = {"command": ["python", "-m", "router", "router.yaml", "drain_seconds=700"], "stop_grace_period": "5m"}
    (tmp_path / "router.yaml").write_text("namespace: x\n")
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump({"services": {"router": service}}))
    done = doctor("compose.yaml", folder=tmp_path)
    assert done.returncode == 1
    assert "broken   compose.yaml (router): drain_seconds + announce_seconds (700 s) is not under" in done.stdout
    assert done.stdout.endswith("\n1 broken\n")


def test_a_configuration_that_its_program_refuses_is_broken(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text("registry: {endpoint: [x]}\n")
    done = doctor("router.yaml", folder=tmp_path)
    assert done.returncode == 1
    assert "registry.endpoint" in done.stdout


def test_files_that_start_nothing_of_ours_are_said_to(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("a: 1\n")
    done = doctor("other.yaml", folder=tmp_path)
    assert done.returncode == 1
    assert "these files start no Baton process and no Envoy" in done.stdout
