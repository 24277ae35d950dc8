"""A real Prometheus that scrapes what a test names, and answers its queries."""

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.ending_with_parent import ending_with_parent
from support.servers.etcd import free_port
from support.servers.promtool import require

SCRAPE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """One series of an answer, as it is now."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """It listens at `address`."""

    address: str

    def query(self, expression: str) -> list[Result]:
        """An instant query's series, those that are no number left out. Raises AssertionError for a wrong one."""
        found = self._get("query", query=expression)["result"]
        results = [Result(each["metric"], float(each["value"][1])) for each in found]
        return [each for each in results if math.isfinite(each.value)]

    def label_values(self, selector: str, label: str) -> list[str]:
        """The values that a label has among these series."""
        values: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return values

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Returns when it answers queries."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("Prometheus did not start")

    def wait_for(self, expression: str, seconds: float = 30.0) -> None:
        """Returns when an expression has a result."""
        deadline = time.monotonic() + seconds
        while not self.query(expression):
            assert time.monotonic() < deadline, f"{expression} had no result for {seconds} s"
            time.sleep(SCRAPE_SECONDS / 2)

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None


@contextmanager
def prometheus(targets: Mapping[str, str], rules: Sequence[Path], folder: Path) -> Iterator[PrometheusServer]:
    """Scrapes each `host:port`, named ROLE-NUMBER, with the label `role` as the files of deploy/ give it."""
    server = PrometheusServer(f"127.0.0.1:{free_port()}")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(targets, rules)))
    command = [
        require("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={server.address}",
        "--log.level=warn",
    ]
    log = (folder / "prometheus.log").open("wb")
    with log, subprocess.Popen(ending_with_parent(command), stdout=log, stderr=log) as process:
        try:
            server.wait_ready()
            yield server
        finally:
            process.terminate()
            process.wait(20)


def _config(targets: Mapping[str, str], rules: Sequence[Path]) -> Mapping[str, object]:
    interval = f"{int(SCRAPE_SECONDS * 1000)}ms"
    static = [{"targets": [address], "labels": {"role": name.partition("-")[0]}} for name, address in targets.items()]
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "baton", "static_configs": static}],
    }
