"""The configuration of the vLLM engine, and the arguments of three places; without vLLM but for one test."""

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from pydantic import ValidationError
from support.engines.checkpoints import save_qwen3

from baton.errors import ConfigError
from services.engines.external.surroundings import free_ports
from services.engines.registry import describe, read_engine_config
from services.engines.vllm.config import VllmArguments, VllmConfig
from services.engines.vllm.factory import check, check_adapters, check_gpus, resolve
from services.engines.vllm.loading import kv_connectors, together, vllm_facts
from services.engines.vllm.package import VllmPackage, open_vllm_package

FAMILIES = Path(__file__).resolve().parents[4] / "deploy" / "engine_configs"


def _config(**keys: object) -> VllmConfig:
    return VllmConfig.model_validate({"model": "some/folder", **keys})


def test_unknown_keys_are_refused_with_their_path() -> None:
    with pytest.raises(ValidationError, match=r"args\.tensor_paralel_size"):
        _config(args={"tensor_paralel_size": 2})


@pytest.mark.parametrize("size", [0, 16, 48])
def test_block_sizes_that_vllm_does_not_start_with_are_refused(size: int) -> None:
    with pytest.raises(ValidationError, match="block_size"):
        _config(args={"block_size": size})


def test_the_later_place_wins_and_every_value_has_its_source(tmp_path: Path) -> None:
    extra = tmp_path / "more.yaml"
    extra.write_text(
        "max_num_seqs: 8\nmax_model_len: 2048\nspeculative_config: {method: ngram, num_speculative_tokens: 3}\n"
    )
    override = json.dumps(
        {
            "max_model_len": 4096,
            "speculative_config": {"prompt_lookup_max": 4, "method": "ngram", "num_speculative_tokens": 2},
        }
    )
    found = resolve(_config(args={"max_num_seqs": 4}, extra_engine_args=extra, override_engine_args=override))
    assert found.value.max_num_seqs == 8
    assert found.value.max_model_len == 4096
    assert found.value.speculative_config is not None
    assert found.value.speculative_config.num_speculative_tokens == 2
    assert found.source("max_num_seqs") == str(extra)
    assert found.source("max_model_len") == "engine.override_engine_args"
    assert found.source("dtype") == "default"


def test_an_unknown_key_of_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    extra = tmp_path / "more.yaml"
    extra.write_text("gpu_memory: 0.5\n")
    with pytest.raises(ConfigError, match=f"{extra}: gpu_memory: unknown key"):
        resolve(_config(extra_engine_args=extra))


@pytest.mark.parametrize(
    ("keys", "roles", "fault"),
    [
        ({"whole_requests": True}, ("prefill",), "whole_requests"),
        ({"sleep_after_seconds": 60}, ("decode",), "sleep_after_seconds: only with engine.whole_requests"),
        (
            {"sleep_after_seconds": 60, "whole_requests": True, "lora": {"folder": "/nowhere"}},
            ("decode",),
            "sleep_after_seconds: not with engine.lora",
        ),
        ({"handoff": {"seconds": 5, "fetch_seconds": 5}}, ("prefill",), "handoff.seconds"),
        (
            {"args": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}},
            ("decode",),
            "speculative",
        ),
        ({"lora": {"folder": "some/adapters", "max_rank": 1000}}, ("decode",), "max_rank"),
        ({"args": {"pipeline_parallel_size": 2}}, ("prefill",), "pipeline_parallel_size"),
        (
            {"tiers": {"host_bytes": "1GiB"}, "args": {"enable_prefix_caching": False}},
            ("decode",),
            "tiers: needs enable_prefix",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    keys: dict[str, object], roles: tuple[str, ...], fault: str
) -> None:
    config = _config(**keys)
    with pytest.raises(ConfigError, match=fault):
        check(config, resolve(config), roles, lease_seconds=10.0)


def test_a_read_may_not_last_longer_than_the_blocks() -> None:
    with pytest.raises(ValidationError, match="fetch_seconds"):
        _config(handoff={"seconds": 5, "fetch_seconds": 6})


@pytest.mark.parametrize(
    ("keys", "roles", "names"),
    [
        ({}, ("prefill",), ["NixlConnector"]),
        ({"tiers": {"host_bytes": "2GiB"}}, ("prefill",), ["NixlConnector", "OffloadingConnector"]),
        ({"tiers": {"host_bytes": "2GiB"}, "whole_requests": True}, ("decode",), ["OffloadingConnector"]),
        ({"whole_requests": True}, ("decode",), []),
    ],
)
def test_the_connectors_are_those_that_roles_and_tiers_need(
    keys: dict[str, object], roles: tuple[str, ...], names: list[str]
) -> None:
    found = kv_connectors(_config(**keys), roles, is_cpu=False)
    assert [each["kv_connector"] for each in found] == names
    assert all(each["kv_load_failure_policy"] == "fail" for each in found)
    if "tiers" in keys:
        assert found[-1]["kv_connector_extra_config"] == {
            "cpu_bytes_to_use": 2 << 30,
            "self_describing_kv_events": True,
        }


@pytest.mark.requires_vllm
def test_vllm_accepts_both_connectors_at_once() -> None:
    """Its own classes read the configuration of each."""
    package = open_vllm_package()
    config = _config(tiers={"host_bytes": "2GiB"})
    made = package.kv_transfer_config(**together(kv_connectors(config, ("prefill",), is_cpu=True)))
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    assert made.kv_connector == "MultiConnector"
    for each in made.kv_connector_extra_config["connectors"]:
        child = package.kv_transfer_config(**each)
        assert each["kv_connector"].removesuffix("Connector") in factory.get_connector_class(child).__name__
    assert factory.get_connector_class(made).all_children_support_hma(made)


@pytest.mark.parametrize("size", [0, "some"])
def test_a_tier_of_no_size_is_refused(size: object) -> None:
    with pytest.raises(ValidationError, match=r"tiers\.host_bytes"):
        _config(tiers={"host_bytes": size})


def test_the_configuration_is_read_by_its_kind_and_described() -> None:
    config = read_engine_config({"kind": "vllm", "model": "some/folder", "args": {"max_num_seqs": 4}})
    assert isinstance(config, VllmConfig)
    assert "vllm max_num_seqs = 4  # engine.args" in describe(config)


SHIPPED = sorted(FAMILIES.glob("*/vllm/*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_the_shipped_arguments_are_valid(path: Path) -> None:
    found = resolve(_config(extra_engine_args=path, whole_requests=path.stem == "agg"))
    assert found.value.max_model_len is not None


def test_there_are_shipped_arguments_for_each_family_and_role() -> None:
    names = {(path.parents[1].name, path.stem) for path in SHIPPED}
    families, roles = ("llama", "qwen3", "deepseek"), ("agg", "prefill", "decode")
    assert names == {(family, role) for family in families for role in roles}


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2, "data_parallel_size": 2}])
def test_more_gpus_than_are_visible_are_refused_with_both_numbers(sizes: dict[str, int]) -> None:
    args = VllmArguments.model_validate(sizes)
    with pytest.raises(ConfigError, match="parallel size is 4, and 2 GPUs are visible"):
        check_gpus(args, 2)
    check_gpus(args, 4)


def test_the_settings_that_operators_ask_for_are_in_the_facts(tmp_path: Path) -> None:
    parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(VllmPackage))
    sets = dict.fromkeys(("engine_arguments", "sampling_arguments", "generate_arguments"), frozenset[str]())
    package = VllmPackage(**{**parts, **sets, "version": Version("0.32.0"), "connector_version": 1})
    given = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 900, "max_num_seqs": 6, "trust_remote_code": True}
    args = VllmArguments.model_validate(given)
    facts = vllm_facts(_config(model=save_qwen3(tmp_path)), args, package, takes_handoffs=False)
    assert dict(facts.settings) == {
        "gpu_memory_utilization": "0.5",
        "max_num_batched_tokens": "900",
        "max_num_seqs": "6",
        "trust_remote_code": "true",
    }


def test_adapters_in_float32_are_refused_on_gpus(tmp_path: Path) -> None:
    config = VllmConfig.model_validate({"model": tmp_path, "lora": {"folder": tmp_path}})
    with pytest.raises(ConfigError, match=r"engine\.lora: .*16 bits only on GPUs, and args\.dtype is float32"):
        check_adapters(config, VllmArguments(dtype="float32"))
    check_adapters(config, VllmArguments(dtype="auto"))
    check_adapters(VllmConfig.model_validate({"model": tmp_path}), VllmArguments(dtype="float32"))


def test_ports_that_are_bound_later_are_none_that_an_outgoing_connection_may_get() -> None:
    found = [free_ports("127.0.0.1", 4) for _ in range(20)]
    assert max(found) + 3 < 32_768  # where Linux begins
    assert len(set(found)) > 15
