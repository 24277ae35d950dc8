"""The Compose files' text; `make compose` runs them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import DEPLOY, Command, command_of

COMPOSE = DEPLOY / "compose"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yml"
TOPOLOGIES = {"agg": ["worker"], "disagg": ["prefill", "decode"], "epd": ["encode", "prefill", "decode"]}
FILES = sorted(COMPOSE.glob("*.yaml"))


def read(name: str) -> Any:
    return yaml.safe_load((COMPOSE / f"{name}.yaml").read_text())


def services() -> Iterator[tuple[str, Any]]:
    for path in FILES:
        for name, service in yaml.safe_load(path.read_text())["services"].items():
            yield f"{path.stem}/{name}", service


def commands() -> list[Command]:
    return [
        command_of(where, each["command"]) for where, each in services() if each.get("command", [""])[0] == "python"
    ]


def test_every_file_is_of_the_compose_specification() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, *map(str, FILES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_has_a_router_and_its_workers(name: str) -> None:
    assert list(read(name)["services"]) == ["router", *TOPOLOGIES[name]]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.where)
def test_every_process_of_a_topology_has_a_configuration_that_loads(command: Command) -> None:
    config = command.load()
    assert config.listen == "0.0.0.0:7070"
    assert config.metrics_listen == "0.0.0.0:9464"
    assert config.registry.endpoints == ("etcd:2379",)


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.where)
def test_a_process_is_given_longer_to_stop_than_it_drains(command: Command) -> None:
    topology, _, name = command.where.partition("/")
    grace = float(read(topology)["services"][name]["stop_grace_period"].removesuffix("s"))
    config = command.load()
    lease = 0.0 if command.module == "router" else config.handoff.lease_seconds
    assert grace > config.drain_seconds + lease


def test_every_image_of_others_is_pinned() -> None:
    images = [each["image"] for _, each in services() if not each["image"].startswith("baton:")]
    assert [image for image in images if image.rpartition(":")[2] in ("", "latest")] == []


def test_the_registry_is_a_current_etcd() -> None:
    assert ":v3.6." in read("platform")["services"]["etcd"]["image"]


def test_every_port_is_published_on_this_host_only() -> None:
    ports = [port for _, each in services() for port in each.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_everything_that_is_mounted_or_built_from_exists() -> None:
    mounted = [volume for _, each in services() for volume in each.get("volumes", []) if volume.startswith(".")]
    built = [each["build"] for _, each in services() if "build" in each]
    paths = [COMPOSE / volume.split(":")[0] for volume in mounted]
    paths += [COMPOSE / build["context"] / build["dockerfile"] for build in built]
    assert len(mounted) == 5
    assert [path for path in paths if not path.exists()] == []


def test_every_topology_stands_on_the_platform() -> None:
    assert {name: read(name)["include"] for name in TOPOLOGIES} == {name: ["platform.yaml"] for name in TOPOLOGIES}


def test_prometheus_scrapes_every_service_of_every_topology() -> None:
    (job, *_) = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    scraped = set(job["dns_sd_configs"][0]["names"])
    assert scraped == {name for topology in TOPOLOGIES for name in read(topology)["services"]}


def test_envoy_mounts_what_its_configuration_names_and_is_scraped_where_it_serves_metrics() -> None:
    (envoy,) = read("envoy")["services"].values()
    (mount,) = [volume.split(":")[:2] for volume in envoy["volumes"]]
    config = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
    assert mount == ["../envoy", f"{envoy['working_dir']}/deploy/envoy"]
    assert envoy["command"][-1] == "deploy/envoy/envoy.yaml"
    listeners = config["static_resources"]["listeners"]
    ports = {each["name"]: each["address"]["socket_address"]["port_value"] for each in listeners}
    assert envoy["ports"] == [f"127.0.0.1:${{BATON_ENVOY_PORT:-8080}}:{ports['clients']}"]
    jobs = {job["job_name"]: job for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}
    assert jobs["envoy"]["dns_sd_configs"][0]["names"] == list(read("envoy")["services"])
    assert jobs["envoy"]["dns_sd_configs"][0]["port"] == ports["metrics"]


def test_grafana_reads_dashboards_from_where_they_are_mounted() -> None:
    (provider,) = yaml.safe_load(_provisioning("dashboards").read_text())["providers"]
    mounts = [volume.split(":")[:2] for volume in read("platform")["services"]["grafana"]["volumes"]]
    assert ["../grafana/dashboards", provider["options"]["path"]] in mounts


def test_grafana_asks_the_services_that_are_there() -> None:
    sources = yaml.safe_load(_provisioning("datasources").read_text())["datasources"]
    hosts = {source["url"].split("/")[2].split(":")[0] for source in sources}
    platform = read("platform")["services"]
    assert hosts == {"prometheus", "jaeger"} <= set(platform)
    # The trace viewer has its name, unless Jaeger itself is asked for.
    assert platform["traces"]["networks"]["default"]["aliases"] == platform["jaeger"]["profiles"] == ["jaeger"]


def _provisioning(kind: str) -> Path:
    return DEPLOY / "grafana" / "provisioning" / kind / f"{kind}.yaml"
