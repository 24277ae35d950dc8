"""Reads metrics as numbers, of this process or of another's HTTP server, and its health."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from runtime.telemetry.metrics import REGISTRY


def sample(name: str, **labels: str) -> float:
    """A metric of this process; 0 if it was never counted. Tests poll it, so only its own family is collected."""
    found = [each for family in REGISTRY.restricted_registry([name]).collect() for each in family.samples]
    if not found:  # never counted, or of a collector that did not tell its names when it was registered
        return REGISTRY.get_sample_value(name, labels) or 0.0
    return next((each.value for each in found if each.name == name and each.labels == labels), 0.0)


@dataclass(frozen=True, slots=True)
class Since:
    """The growth of a metric of this process."""

    name: str
    labels: Mapping[str, str]
    before: float

    @property
    def grown(self) -> float:
        return sample(self.name, **self.labels) - self.before


def since(name: str, **labels: str) -> Since:
    """From now on."""
    return Since(name, labels, sample(name, **labels))


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics that a process served, by name and labels."""

    samples: Mapping[str, Mapping[frozenset[tuple[str, str]], float]]

    def has(self, name: str, **labels: str) -> bool:
        """True if it was served, with at least these labels."""
        return any(labels.items() <= dict(found).items() for found in self.samples.get(name, {}))

    def sum(self, name: str, **labels: str) -> float:
        """Of all series with at least these labels."""
        found = self.samples.get(name, {})
        return sum(value for each, value in found.items() if labels.items() <= dict(each).items())


def scrape(address: str) -> Scrape:
    """Reads the metrics at `host:port`. Raises OSError."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            samples.setdefault(each.name, {})[frozenset(each.labels.items())] = each.value
    return Scrape(samples)


def get_health(address: str) -> tuple[int, Any]:
    """The answer of /health: the HTTP status, and the JSON."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def counts() -> dict[str, float]:
    """Every counter and histogram of ours and of the engines' own, by name and labels, as a scrape has them.

    Without those of network devices, which are the machine's.
    """
    kinds = ("counter", "histogram", "summary")
    ours = ("baton_", "trtllm_", "vllm:")
    collected = [family for family in REGISTRY.collect() if not family.name.startswith("baton_network_")]
    families = [family for family in collected if family.type in kinds and family.name.startswith(ours)]
    found = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in found}
