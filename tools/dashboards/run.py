"""A cluster of real processes under load, one of whose decode workers is killed, and the Prometheus that watches it."""

import asyncio
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.cluster.fleet import PATIENT, Fleet, FleetPlan, overrides, shared_fleet
from support.servers.etcd import EtcdServer
from support.servers.prometheus import SCRAPE_SECONDS, PrometheusServer, prometheus

from baton import AsyncClient, BatonError

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules" / "baton.yaml"
ENGINE = {
    "kind": "simulated",
    "prefill_tokens_per_second": 4000.0,
    "decode_step_seconds": 0.02,
    "max_context_tokens": 16384,
}
# Prompt tokens are bytes here: of the classes short, medium and long.
PROMPT_BYTES = (200, 400, 2000, 9000)
CLIENTS = 6
DOWN_SHARE = 0.2
# What Grafana would take for these: four scrapes, and the dashboards' first choices.
VARIABLES = {"$__rate_interval": f"{int(8 * SCRAPE_SECONDS)}s", "$model": "simulated", "$request_class": "short"}
ALL_VARIABLES = {**VARIABLES, "${instance}": ".*", "$instance": ".*", "$__range": "5m", "$__interval": "5s"}
STEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its labels, and values at times, which are seconds since the start of the load."""

    labels: Mapping[str, str]
    times: Sequence[float]
    values: Sequence[float]


class Recording:
    """The load, and what Prometheus has of it."""

    def __init__(self, running: Fleet, server: PrometheusServer, seconds: float) -> None:
        self._running = running
        self._server = server
        self._seconds = seconds
        self._begun = 0.0
        self.fault_seconds = seconds / 2

    async def load(self) -> str:
        """Sends requests, kills a decode worker in the middle and starts it again; says what became of them."""
        self._begun = time.time()
        ended = time.monotonic() + self._seconds
        results = [asyncio.create_task(self._send(number, ended)) for number in range(CLIENTS)]
        victim = self._running.nodes["decode-0"]
        await asyncio.sleep(self.fault_seconds)
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(self._seconds * DOWN_SHARE)
        victim.start()
        counts = await asyncio.gather(*results)
        completed, failed = (sum(each[index] for each in counts) for index in range(2))
        # So that the last scrape is behind the last request.
        await asyncio.sleep(3 * SCRAPE_SECONDS)
        return f"{completed} requests completed, {failed} failed; decode-0 was killed at {self.fault_seconds:.0f} s"

    def query(self, expression: str) -> list[Series]:
        """Prometheus's answer for the time of the load. Raises OSError for an expression that it refuses."""
        for variable, value in ALL_VARIABLES.items():
            expression = expression.replace(variable, value)
        span = {"start": self._begun, "end": self._begun + self._seconds, "step": STEP_SECONDS}
        parameters = urllib.parse.urlencode({"query": expression, **span})
        url = f"http://{self._server.address}/api/v1/query_range?{parameters}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return [
            Series(
                each["metric"],
                [float(at) - self._begun for at, _ in each["values"]],
                [float(value) for _, value in each["values"]],
            )
            for each in found
        ]

    async def _send(self, number: int, ended: float) -> tuple[int, int]:
        """Requests one after the other; how many completed, and failed."""
        completed = failed = 0
        async with AsyncClient(self._running.router.address) as client:
            while time.monotonic() < ended:
                size = PROMPT_BYTES[(number + completed) % len(PROMPT_BYTES)]
                prompt = f"{number} {completed % 5} " + "word " * (size // 5)
                try:
                    await client.generate(prompt, max_tokens=60, timeout_seconds=60).text()
                except BatonError:
                    failed += 1
                else:
                    completed += 1
        return completed, failed


@contextmanager
def record(folder: Path, seconds: float) -> Iterator[Recording]:
    """Starts etcd, two prefill workers, two decode workers, a router and Prometheus; ends them all."""
    etcd = EtcdServer(folder / "etcd")
    etcd.start()
    try:
        plan = FleetPlan(
            namespace="dashboards",
            etcd=etcd.endpoint,
            worker=overrides("engine", ENGINE),
            router=(PATIENT, "routing.policy=predicted_seconds"),
            metrics=True,
        )
        with shared_fleet(plan, folder) as running, prometheus(running.metrics, [RULES], folder) as server:
            server.wait_for(f"count(up == 1) == {len(running.metrics)}")
            yield Recording(running, server, seconds)
    finally:
        etcd.stop()
