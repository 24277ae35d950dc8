"""What cannot be kept is refused, and the error names the key."""

import pytest
from pydantic import ValidationError

from baton.errors import ConfigError
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

_EMBEDDED = {"kind": "pytorch", "model": "models/demo", "device": "cpu"}
_KV = {"keep_memory": {"kv": True}}

_REFUSED = [
    ({"keep_memory": {"standby": True}, "engine": _EMBEDDED}, "standby: no engine has a standby yet"),
    ({**_KV, "engine": {"kind": "simulated"}}, "keep_memory: engine.kind: the engine simulated keeps neither"),
    ({**_KV, "engine": {**_EMBEDDED, "device": "cuda:1"}}, "keep_memory: engine.device: cuda:1"),
    ({**_KV, "engine": {**_EMBEDDED, "tensor_parallel_size": 2}}, "keep_memory: engine.tensor_parallel_size"),
    ({**_KV, "engine": {**_EMBEDDED, "prefix_cache": False}}, "keep_memory: engine.prefix_cache"),
    ({**_KV, "engine": _EMBEDDED, "server": "grpcio"}, "keep_memory: needs server=http2"),
    ({**_KV, "engine": _EMBEDDED, "roles": ["encode"]}, "keep_memory: roles: a worker of encode"),
    ({"keep_memory": {"kv": True, "hang_seconds": 0.1}, "engine": _EMBEDDED}, "hang_seconds"),
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


def test_nothing_is_kept_by_default() -> None:
    assert not WorkerConfig.model_validate({"engine": _EMBEDDED}).keep_memory.is_on
    assert not PyTorchConfig.model_validate(_EMBEDDED).why_not_kept(kv=True)
