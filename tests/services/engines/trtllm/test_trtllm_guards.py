"""Settings that TensorRT-LLM accepts and that would harm it are refused at start."""

from copy import deepcopy
from pathlib import Path

import pytest
from packaging.version import Version
from pydantic import ValidationError

from baton.errors import ConfigError
from services.engines.external.argument_places import ArgumentPlace, merge
from services.engines.trtllm.config import EngineArguments, TrtllmConfig
from services.engines.trtllm.model_facts import model_facts
from services.engines.trtllm.package import open_package
from services.engines.trtllm.resolved_args import CheckedArgs, Environment, check

CONFIGS = sorted((Path(__file__).parents[4] / "deploy" / "engine_configs").glob("*/*.yaml"))
ROLES = {"agg": ["decode"], "prefill": ["prefill"], "decode": ["decode"], "encode": ["encode"]}
TRANSCEIVER = {"backend": "NIXL", "max_tokens_in_buffer": 4096, "kv_transfer_timeout_ms": 60_000}


def checked(
    roles: tuple[str, ...] = ("prefill",),
    version: str = "1.3.0rc30",
    backend: str = "pytorch",
    whole_requests: bool = False,
    **flags: object,
) -> CheckedArgs:
    base = {"max_seq_len": 4096, "cache_transceiver_config": TRANSCEIVER}
    args = EngineArguments.model_validate({**base, **flags})
    config = TrtllmConfig.model_validate(
        {"model": "/model", "backend": backend, "args": args, "whole_requests": whole_requests}
    )
    return check(config, Environment(roles, Version(version), gpus=2, lease_seconds=10.0))


def transceiver(**changes: object) -> dict[str, object]:
    return {**TRANSCEIVER, **changes}


def test_a_whole_configuration_is_accepted_without_a_warning() -> None:
    assert checked(disable_overlap_scheduler=True).warnings == ()


@pytest.mark.parametrize("backend", [None, "DEFAULT", "MPI", "MOONCAKE"])
def test_a_transceiver_backend_that_is_not_explicit_is_refused(backend: str | None) -> None:
    with pytest.raises(ConfigError, match="must be NIXL or UCX"):
        checked(cache_transceiver_config=transceiver(backend=backend))


def test_prefill_without_a_transceiver_is_refused() -> None:
    with pytest.raises(ConfigError, match="the role prefill needs it"):
        checked(cache_transceiver_config=None)


def test_decode_without_a_transceiver_runs_whole_requests() -> None:
    found = checked(("decode",), whole_requests=True, cache_transceiver_config=None)
    assert not found.effective.value.can_hand_over


def test_a_decode_worker_that_can_never_take_kv_over_is_refused_unless_that_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"could never take KV over; .* engine\.whole_requests: true"):
        checked(("decode",), cache_transceiver_config=None)


def test_a_transfer_without_a_timeout_is_refused() -> None:
    with pytest.raises(ConfigError, match="held for ever"):
        checked(cache_transceiver_config=transceiver(kv_transfer_timeout_ms=None))


@pytest.mark.parametrize(
    ("timeout", "named"), [(30_000, "handoff_deadline_seconds"), (9_000, "lease_seconds"), (900_000, "stall_seconds")]
)
def test_a_transfer_timeout_out_of_order_is_refused(timeout: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        checked(cache_transceiver_config=transceiver(kv_transfer_timeout_ms=timeout))


def test_a_senders_timeout_over_the_transfers_is_refused() -> None:
    with pytest.raises(ConfigError, match="sender_future_timeout_ms"):
        checked(cache_transceiver_config=transceiver(kv_transfer_sender_future_timeout_ms=60_001))


@pytest.mark.parametrize(("tokens", "why"), [(None, "is unset"), (4064, "under max_seq_len"), (4100, "not a multiple")])
def test_a_buffer_that_does_not_hold_the_longest_context_is_refused(tokens: int | None, why: str) -> None:
    with pytest.raises(ConfigError, match=f"max_tokens_in_buffer: .*{why}"):
        checked(cache_transceiver_config=transceiver(max_tokens_in_buffer=tokens))


def test_a_context_of_unknown_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len: is unset"):
        checked(max_seq_len=None)


def test_beam_search_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_beam_width: is 2"):
        checked(max_beam_width=2)


def test_more_gpus_than_are_visible_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel size is 4, and 2 GPUs are visible"):
        checked(tensor_parallel_size=2, pipeline_parallel_size=2)


def test_events_of_a_cache_without_reuse_are_refused() -> None:
    with pytest.raises(ConfigError, match="KV events need enable_block_reuse"):
        checked(kv_cache_config={"event_buffer_max_size": 1024, "enable_block_reuse": False})


def test_reuse_that_is_left_to_the_models_defaults_is_warned_of_where_events_are_wanted() -> None:
    [warning] = checked(("decode",), kv_cache_config={"event_buffer_max_size": 1024}).warnings
    assert "enable_block_reuse is unset: the model's own defaults may switch it off" in warning
    reuse = {"event_buffer_max_size": 1024, "enable_block_reuse": True}
    assert checked(("decode",), kv_cache_config=reuse).warnings == ()


def test_overlap_is_off_for_prefill_before_1_3_and_says_that_a_guard_did_it() -> None:
    effective = checked(version="1.2.0").effective
    assert effective.value.disable_overlap_scheduler
    assert effective.source("disable_overlap_scheduler") == "guard"


def test_overlap_that_was_asked_for_is_refused_for_prefill_before_1_3() -> None:
    with pytest.raises(ConfigError, match="disable_overlap_scheduler: must be true"):
        checked(version="1.2.0", disable_overlap_scheduler=False)


def test_overlap_stays_on_for_decode_and_for_later_versions() -> None:
    assert not checked(("decode",), version="1.2.0").effective.value.disable_overlap_scheduler
    assert not checked(version="1.3.0rc5").effective.value.disable_overlap_scheduler


def test_overlap_and_block_reuse_on_prefill_are_warned_of_from_1_3_on() -> None:
    [warning] = checked().warnings
    assert warning.startswith("disable_overlap_scheduler is false")
    assert checked(kv_cache_config={"enable_block_reuse": False}).warnings == ()
    assert checked(("decode",)).warnings == ()


def test_block_reuse_on_prefill_before_1_3_is_warned_of() -> None:
    assert any("evicted while it is sent" in warning for warning in checked(version="1.2.0").warnings)


@pytest.mark.parametrize("role", ["prefill", "encode"])
def test_autodeploy_serves_no_other_worker(role: str) -> None:
    with pytest.raises(ConfigError, match=f"AutoDeploy cannot {role}"):
        checked((role,), backend="autodeploy", cache_transceiver_config=None)


def test_autodeploy_cannot_take_kv_over() -> None:
    with pytest.raises(ConfigError, match="AutoDeploy runs whole requests only"):
        checked(("decode",), backend="autodeploy")


def test_every_argument_that_autodeploy_does_not_take_is_warned_of() -> None:
    scheduler = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    flags = {"tensor_parallel_size": 2, "scheduler_config": scheduler, "cache_transceiver_config": None}
    warnings = checked(("decode",), backend="autodeploy", **flags).warnings
    assert warnings == (
        "AutoDeploy does not take scheduler_config; it is left out",
        "AutoDeploy does not take tensor_parallel_size; it is left out",
    )


PRUNED = {
    "build_config": {"max_batch_size": 4},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "context_parallel_size": 2,
    "moe_cluster_parallel_size": 1,
    "moe_tensor_parallel_size": 1,
    "moe_expert_parallel_size": 2,
    "enable_attention_dp": True,
    "cp_config": {"cp_type": "ULYSSES"},
}
"""What TensorRT-LLM's users may have in a file that AutoDeploy's LLM does not take."""


@pytest.mark.parametrize("key", PRUNED)
def test_each_argument_that_autodeploy_does_not_take_gets_one_warning_by_its_name(key: str) -> None:
    found = checked(("decode",), backend="autodeploy", cache_transceiver_config=None, **{key: PRUNED[key]})
    assert found.warnings == (f"AutoDeploy does not take {key}; it is left out",)


def test_arguments_that_are_unset_get_no_warning_from_autodeploy() -> None:
    assert checked(("decode",), backend="autodeploy", cache_transceiver_config=None).warnings == ()


@pytest.mark.parametrize("key", ["build_config", "cp_config"])
def test_arguments_for_autodeploy_alone_are_refused_with_the_other_backend(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: only with backend: autodeploy"):
        checked(("decode",), **{key: PRUNED[key]})


def test_a_backend_that_is_not_one_is_refused_with_the_names_that_are_valid() -> None:
    with pytest.raises(ValidationError, match="Input should be 'pytorch' or 'autodeploy'"):
        TrtllmConfig.model_validate({"model": "/model", "backend": "foo"})


@pytest.mark.parametrize("backend", ["autodeploy", "_autodeploy"])
def test_autodeploy_may_be_spelled_as_upstream_does(backend: str) -> None:
    assert TrtllmConfig.model_validate({"model": "/model", "backend": backend}).backend == "autodeploy"


def test_what_a_caller_gives_is_the_same_afterwards_and_shared_with_nothing(tmp_path: Path) -> None:
    section = {"max_seq_len": 4096, "cache_transceiver_config": dict(TRANSCEIVER), "kv_cache_config": {"dtype": "fp8"}}
    places = [
        ArgumentPlace("first", {"kv_cache_config": {"dtype": "auto"}, "cuda_graph_config": {"batch_sizes": [1, 2]}}),
        ArgumentPlace("second", {"kv_cache_config": {"tokens_per_block": 64}, "build_config": {"a": {"b": [1]}}}),
        ArgumentPlace("third", {"build_config": {"a": {"b": [2]}}}),
    ]
    before = deepcopy((section, places))
    config = TrtllmConfig.model_validate(
        {"model": tmp_path, "args": section, "override_engine_args": '{"dtype": "auto"}'}
    )
    dumped = config.model_dump()
    check(config, Environment(("prefill",), Version("1.2.0"), gpus=2, lease_seconds=10.0))
    merged = merge(EngineArguments, places).value
    assert merged.build_config == {"a": {"b": [2]}}
    assert merged.build_config is not places[2].tree["build_config"]
    assert (section, places) == before
    assert config.model_dump() == dumped


@pytest.mark.parametrize("enabled", [True, False])
def test_autodeploy_has_one_rank_whatever_the_parallel_sizes(newest: None, checkpoint: Path, enabled: bool) -> None:
    args = EngineArguments.model_validate({"tensor_parallel_size": 4, "enable_attention_dp": enabled})
    ranks = {}
    for backend in ("pytorch", "autodeploy"):
        config = TrtllmConfig.model_validate({"model": checkpoint, "backend": backend, "args": args})
        ranks[backend] = model_facts(config, args, open_package()).data_parallel_ranks
    assert ranks == {"pytorch": 4 if enabled else 1, "autodeploy": 1}


def test_the_settings_that_operators_ask_for_are_in_the_facts(newest: None, checkpoint: Path) -> None:
    args = EngineArguments.model_validate(
        {
            "max_batch_size": 6,
            "max_num_tokens": 900,
            "trust_remote_code": True,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
        }
    )
    facts = model_facts(TrtllmConfig.model_validate({"model": checkpoint, "args": args}), args, open_package())
    assert dict(facts.settings) == {
        "free_gpu_memory_fraction": "0.5",
        "max_batch_size": "6",
        "max_beam_width": "1",
        "max_num_tokens": "900",
        "trust_remote_code": "true",
    }


def test_dynamic_batching_is_passed_on_and_warned_of_as_it_has_no_effect() -> None:
    found = checked(("decode",), scheduler_config={"dynamic_batch_config": {}})
    assert found.warnings == ("scheduler_config.dynamic_batch_config has no effect in the PyTorch backend",)
    dynamic = found.effective.value.scheduler_config.dynamic_batch_config
    assert dynamic is not None
    assert dynamic.dynamic_batch_moving_average_window == 128


def test_autodeploy_tells_no_kv_events_and_is_not_asked_to() -> None:
    cache = {"event_buffer_max_size": 1000}
    found = checked(("decode",), backend="autodeploy", cache_transceiver_config=None, kv_cache_config=cache)
    assert found.effective.value.kv_cache_config.event_buffer_max_size == 0
    assert found.effective.source("kv_cache_config.event_buffer_max_size") == "guard"
    assert "kv_cache_config.event_buffer_max_size: set to 0, because AutoDeploy reports no KV events" in found.warnings


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="max_beam_width") as refused:
        checked(max_beam_width=2, cache_transceiver_config=transceiver(backend="DEFAULT"))
    assert "NIXL or UCX" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("version", ["1.2.0", "1.3.0rc5", "1.3.0rc29", "1.3.0rc30"])
def test_the_shipped_files_pass(path: Path, version: str) -> None:
    config = TrtllmConfig(model=Path("/model"), extra_engine_args=path, whole_requests=path.stem == "agg")
    check(config, Environment(ROLES[path.stem], Version(version), gpus=8, lease_seconds=10.0))


CONNECTOR = {"connector_module": "kvbm", "connector_scheduler_class": "Leader", "connector_worker_class": "Worker"}


def test_partial_reuse_is_off_under_a_connector() -> None:
    cache = checked(kv_connector_config=CONNECTOR).effective.value.kv_cache_config
    assert (cache.enable_partial_reuse, cache.enable_block_reuse) == (False, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_cache_config": {"enable_partial_reuse": True}}, "enable_partial_reuse: must be false"),
        ({"kv_cache_config": {"enable_block_reuse": False}}, "needs kv_cache_config.enable_block_reuse"),
    ],
)
def test_a_connector_with_settings_that_it_does_not_work_with_is_refused(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(kv_connector_config=CONNECTOR, **flags)


def test_a_connector_without_its_classes_is_refused() -> None:
    with pytest.raises(ValidationError, match="connector_worker_class"):
        checked(kv_connector_config={"connector_module": "kvbm", "connector_scheduler_class": "Leader"})
