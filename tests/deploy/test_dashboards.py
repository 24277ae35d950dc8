"""Grafana's dashboards, as far as they can be tried without Grafana: every query, asked of a real Prometheus.

It scrapes a cluster of real processes, each a simulated worker with a stand-in for NVML, after requests of all kinds.
"""

import asyncio
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import yaml
from support.clients.scraping import scrape
from support.cluster.fleet import PATIENT, Fleet, FleetPlan, overrides, shared_fleet
from support.images.simulated_workers import about, different
from support.manifests import DEPLOY, ROOT
from support.servers.etcd import EtcdServer
from support.servers.prometheus import SCRAPE_SECONDS, PrometheusServer, prometheus
from support.servers.promtool import promtool, require

from baton.inference.v1 import generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

FOLDER = DEPLOY / "grafana" / "dashboards"
RULES = DEPLOY / "prometheus" / "rules" / "baton.yaml"
WINDOW = "5m"
# Of requests: `make check-all` sends them for a minute.
ROUNDS = int(os.environ.get("BATON_DASHBOARD_ROUNDS", "4"))
SIMULATED = {"kind": "simulated", "image_tokens": 4, "decode_step_seconds": 0.002, "max_context_tokens": 16384}
PROMPTS = ("a short prompt of some length", "m" * 2000, "l" * 9000)
PAGE = (ROOT / "docs" / "metrics.md").read_text()


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel. Grafana's variables are in it yet."""

    dashboard: str
    panel: str
    expression: str
    legend: str


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def panels() -> Iterator[tuple[str, Any]]:
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                yield name, panel


def queries() -> list[Query]:
    return [
        Query(name, panel["title"], target["expr"], target["legendFormat"])
        for name, panel in panels()
        for target in panel["targets"]
    ]


def expressions() -> list[str]:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return [query.expression for query in queries()] + [rule["expr"] for rule in rules]


@pytest.fixture(scope="module")
def running(shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require("prometheus")
    plan = FleetPlan(
        namespace="dashboards",
        etcd=shared_etcd.endpoint,
        worker=(
            *overrides("engine", SIMULATED),
            "encode.inline_bytes=0",
        ),
        # With the policy that predicts, so that its panels have data.
        router=(PATIENT, "routing.policy=predicted_seconds"),
        encode=1,
        prefill=1,
        decode=1,
        metrics=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "fake_nvml"), prepend=os.pathsep)
        with shared_fleet(plan, tmp_path_factory.mktemp("dashboards")) as started:
            yield started


@pytest.fixture(scope="module")
def scraped(running: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """After load, all of which it has seen."""
    with prometheus(running.metrics, [RULES], tmp_path_factory.mktemp("prometheus")) as server:
        server.wait_for(f"count(up == 1) == {len(running.metrics)}")
        asyncio.run(_load(running))
        ended = scrape(running.metrics["router-0"]).sum("baton_router_requests_total")
        server.wait_for(f"sum(baton_router_requests_total) == {ended}")
        server.wait_for("baton_embedding_cache_hits_total > 0 and baton_embedding_cache_misses_total > 0")
        yield server


async def _load(running: Fleet) -> None:
    """For as long as it takes to be scraped several times: counters have to grow in the sight of Prometheus."""
    async with grpc.aio.insecure_channel(running.router.address) as channel:
        stub = InferenceServiceStub(channel)
        for _ in range(ROUNDS):
            texts = [_request(prompt=prompt, stopping={"max_tokens": 20}) for prompt in PROMPTS]
            images = [_request(**about(file)) for file in different(3)]
            await asyncio.gather(*(_run(stub, request) for request in [*texts, *images, _request(prompt="")]))
            await asyncio.sleep(1.1 * SCRAPE_SECONDS)


def _request(**fields: Any) -> generate_pb2.GenerateRequest:
    """A request whose KV is handed over, whatever the policy predicts."""
    routing = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)
    return generate_pb2.GenerateRequest(routing=routing, **fields)


async def _run(stub: InferenceServiceStub, request: generate_pb2.GenerateRequest) -> None:
    call = stub.Generate(request, timeout=30)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    expected = grpc.StatusCode.OK if request.prompt else grpc.StatusCode.INVALID_ARGUMENT
    assert await call.code() == expected


def filled(server: PrometheusServer, query: Query) -> str:
    """The expression as Grafana sends it: with the first value of each of the dashboard's variables."""
    expression = query.expression.replace("$__rate_interval", WINDOW)
    values: dict[str, str] = {}
    for variable in dashboards()[query.dashboard]["templating"]["list"]:
        if variable["type"] != "query":
            continue
        values[variable["name"]] = variable.get("allValue") or _value_of(server, variable, values)
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    return expression


def _value_of(server: PrometheusServer, variable: Any, known: dict[str, str]) -> str:
    asked = variable["query"]["query"]
    for name, value in known.items():
        asked = asked.replace(f"${name}", value)
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", asked)
    assert found, asked
    values = server.label_values(found[1], found[2])
    assert values, f"the variable {variable['name']} has no values"
    return values[0]


# With Prometheus.


# One test a dashboard, not one a query: processes of tests that divide these among them would each start the cluster.
@pytest.mark.parametrize("name", list(dashboards()))
def test_no_panel_says_no_data(scraped: PrometheusServer, name: str) -> None:
    without = [query for query in queries() if query.dashboard == name and not _has_data(scraped, query)]
    assert without == []


def _has_data(server: PrometheusServer, query: Query) -> bool:
    """True if the query has results, all with the labels of its legend."""
    results = server.query(filled(server, query))
    labels = re.findall(r"{{(\w+)}}", query.legend)
    return bool(results) and all(each.labels.get(label) for each in results for label in labels)


@pytest.mark.parametrize("name", list(dashboards()))
def test_every_variable_has_values(scraped: PrometheusServer, name: str) -> None:
    for query in queries():
        if query.dashboard == name:
            assert "$" not in filled(scraped, query)


def test_what_the_panels_show_is_what_happened(scraped: PrometheusServer) -> None:
    def number(expression: str) -> float:
        (only,) = scraped.query(expression)
        return only.value

    assert number('sum(baton_router_requests_total{outcome="ok", request_class="short"})') == ROUNDS
    assert number('sum(baton_router_requests_total{outcome="ok", request_class="image"})') == 3 * ROUNDS
    assert number('sum(baton_router_requests_total{outcome="refused"})') == ROUNDS
    assert number("baton_embedding_cache_misses_total") == 3
    assert number("baton_embedding_cache_hits_total") == 3 * (ROUNDS - 1)
    assert number("sum(baton_handoff_seconds_count)") == 6 * ROUNDS
    assert number('sum(baton_worker_calls_total{outcome="ok", stage="prefill"})') == 6 * ROUNDS


def test_a_cluster_that_is_well_sets_off_no_alert(scraped: PrometheusServer) -> None:
    # A machine that stands still for a moment, as those of CI do, is not well.
    alerts = scraped.query('ALERTS{alertname!="BatonEventLoopLags"}')
    assert [each.labels["alertname"] for each in alerts] == []


def test_promtool_finds_no_fault_with_what_any_process_serves(running: Fleet, scraped: PrometheusServer) -> None:
    for address in running.metrics.values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            promtool("check", "metrics", stdin=answer.read().decode())


# Without it.


def test_every_dashboard_is_one_to_grafana() -> None:
    found = dashboards()
    assert sorted(found) == ["fleet", "kv", "request_class"]
    assert len({each["uid"] for each in found.values()}) == len({each["title"] for each in found.values()}) == 3
    for dashboard in found.values():
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(numbers)) == len(numbers)


def test_no_two_panels_lie_on_one_another() -> None:
    for name, dashboard in dashboards().items():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, f"{name}: {panel['title']}"
            assert at["x"] + at["w"] <= 24
            taken |= cells


def test_every_panel_asks_the_data_source_that_is_provisioned() -> None:
    sources = DEPLOY / "grafana" / "provisioning" / "datasources" / "datasources.yaml"
    uids = {each["uid"] for each in yaml.safe_load(sources.read_text())["datasources"]}
    for name, dashboard in dashboards().items():
        (variable,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
        assert variable["current"]["value"] in uids, name
    for _, panel in panels():
        assert {panel["datasource"]["uid"], *(t["datasource"]["uid"] for t in panel["targets"])} == {"${datasource}"}


def test_every_panel_has_a_unit_and_a_title() -> None:
    for name, panel in panels():
        assert panel["title"], name
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("expression", expressions())
def test_everything_that_is_asked_for_is_measured(expression: str) -> None:
    rows = set(re.findall(r"^\| `(baton_\w+)`", PAGE, re.M))
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bbaton_\w+", expression)}
    assert asked <= rows | {"baton_build_info"}


def test_every_metric_has_a_panel() -> None:
    text = " ".join(query.expression for query in queries())
    rows = re.findall(r"^\| `(baton_\w+)`", PAGE, re.M)
    # Of engines that only their own environments have, and of ranks, of which this cluster has none.
    elsewhere = ("baton_trtllm_", "baton_vllm_", "baton_sglang_", "baton_rank_")
    assert [name for name in rows if name not in text and not name.startswith(elsewhere)] == []
