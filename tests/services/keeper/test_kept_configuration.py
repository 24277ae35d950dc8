"""Configurations that cannot be kept are refused, and the error names the key."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.cluster.processes import ROOT
from support.keeping import keeper_here

from baton.errors import ConfigError
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.keeping import begin_start

_EMBEDDED = {"kind": "pytorch", "model": "models/demo", "device": "cpu"}
_LIBRARY_ON_A_GPU = {"device": "cuda:1", "execution": "library"}
_SPLIT = {"tensor_parallel_size": 2}
_SEVERAL_HOSTS = {"multi_node": {"leader": "localhost:29500", "rank": 0}}
_SLEEP = {"group": "/nowhere", "group_bytes": 2, "bytes": 1}
_STANDBY = {"kv": True, "weights": True, "standby": True}
_KV = {"keep_memory": {"kv": True}}

_REFUSED = [
    ({**_KV, "engine": {"kind": "simulated"}}, "keep_memory: engine.kind: the engine simulated keeps neither"),
    ({**_KV, "engine": {**_EMBEDDED, **_LIBRARY_ON_A_GPU}}, "keep_memory: engine.execution: library"),
    ({"keep_memory": {"kv": True, "weights": True}, "engine": {**_EMBEDDED, **_SPLIT}}, "keep_memory.weights: those"),
    (
        {**_KV, "engine": {**_EMBEDDED, **_SPLIT, "device": "cuda"}},
        "tensor_parallel_size: only a pool that",
    ),
    (
        {**_KV, "engine": {**_EMBEDDED, **_SPLIT, **_SEVERAL_HOSTS}},
        "tensor_parallel_size: ranks that are started",
    ),
    ({**_KV, "engine": {**_EMBEDDED, "prefix_cache": False}}, "keep_memory: engine.prefix_cache"),
    ({**_KV, "engine": _EMBEDDED, "server": "grpcio"}, "keep_memory: needs server=http2"),
    ({**_KV, "engine": _EMBEDDED, "roles": ["encode"]}, "keep_memory: roles: a worker of encode"),
    ({"keep_memory": {"kv": True, "standby": True}, "engine": _EMBEDDED}, "standby: needs weights and kv"),
    ({"keep_memory": _STANDBY, "engine": _EMBEDDED, "sleep": _SLEEP}, "sleep: keep_memory.standby"),
    ({"keep_memory": {"kv": True, "hang_seconds": 0.1}, "engine": _EMBEDDED}, "hang_seconds"),
    ({"keep_memory": {"kv": True, "hang_seconds": math.inf}, "engine": _EMBEDDED}, "hang_seconds"),
]


@pytest.mark.parametrize(("values", "message"), _REFUSED)
def test_what_cannot_be_kept_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError)) as refused:
        WorkerConfig.model_validate(values)
    assert message in str(refused.value)


def test_weights_are_kept_without_a_prefix_cache() -> None:
    config = WorkerConfig.model_validate(
        {"keep_memory": {"weights": True}, "engine": {**_EMBEDDED, "prefix_cache": False}}
    )
    assert config.keep_memory.is_on


@pytest.mark.parametrize("execution", ["auto", "fused"])
def test_memory_of_a_gpu_is_kept_of_fused_models(execution: str) -> None:
    engine = PyTorchConfig.model_validate({**_EMBEDDED, "device": "cuda:1", "execution": execution})
    assert not engine.why_not_kept(weights=True, kv=True)


def test_nothing_is_kept_by_default() -> None:
    assert not WorkerConfig.model_validate({"engine": _EMBEDDED}).keep_memory.is_on
    assert not PyTorchConfig.model_validate(_EMBEDDED).why_not_kept(weights=True, kv=True)


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ({"keep_memory": {"weights": True, "kv": True}}, ["weights", "kv", "listen"]),
        ({"keep_memory": {"weights": True}}, ["weights", "listen"]),
        ({"keep_memory": {"kv": True}}, ["kv", "listen"]),
        ({"keep_memory": {"kv": True}, "sleep": _SLEEP}, ["kv", "listen", "sleep_group"]),
        ({"sleep": _SLEEP}, []),
        ({}, []),
    ],
)
def test_what_the_configuration_does_not_keep_any_more_is_freed(wanted: dict[str, object], left: list[str]) -> None:
    with keeper_here() as keeper, keeper.memory() as memory:
        for name in ("weights", "kv", "listen", "sleep_group"):
            descriptor = os.memfd_create(name)
            memory.keeper.put(name, "any", [descriptor])
            os.close(descriptor)
        begin_start(memory.keeper, WorkerConfig.model_validate({"engine": _EMBEDDED, **wanted}))
        assert keeper.kept.names == left


def test_an_id_of_digits_stays_a_text_behind_the_keeper(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text('worker_id: "0123"\nregistry: {kind: memory}\nkeep_memory: {kv: true}\n')
    command = [sys.executable, "-m", "services", str(file), f"engine={{kind: pytorch, model: {tmp_path}, device: cpu}}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is not a checkpoint folder" in ended.stderr
