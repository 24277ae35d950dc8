"""TensorRT-LLM's arguments in effect, and their sources."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from services.engines.trtllm.config import EngineArguments, KvCacheArguments, TrtllmConfig
from services.engines.trtllm.resolved_args import resolve

CONFIGS = sorted((Path(__file__).parents[4] / "deploy" / "engine_configs").glob("*/*.yaml"))


def config(extra: Path | None = None, override: str = "", **flags: object) -> TrtllmConfig:
    args = EngineArguments.model_validate(flags)
    return TrtllmConfig(model=Path("/model"), args=args, extra_engine_args=extra, override_engine_args=override)


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    path = tmp_path / "extra.yaml"
    path.write_text(
        "max_batch_size: 8\nkv_cache_config: {dtype: fp8, tokens_per_block: 64}\n"
        "cuda_graph_config: {batch_sizes: [1, 2]}"
    )
    return path


def test_the_file_is_stronger_than_the_flags(extra: Path) -> None:
    assert resolve(config(extra, max_batch_size=4)).value.max_batch_size == 8


def test_json_is_stronger_than_the_file(extra: Path) -> None:
    assert resolve(config(extra, '{"max_batch_size": 16}', max_batch_size=4)).value.max_batch_size == 16


def test_sections_are_merged_key_by_key(extra: Path) -> None:
    effective = resolve(
        config(extra, '{"kv_cache_config": {"tokens_per_block": 128}}', kv_cache_config={"max_tokens": 9})
    )
    assert effective.value.kv_cache_config == KvCacheArguments(dtype="fp8", tokens_per_block=128, max_tokens=9)


def test_lists_are_replaced_whole(extra: Path) -> None:
    graph = resolve(config(extra, '{"cuda_graph_config": {"batch_sizes": [7]}}')).value.cuda_graph_config
    assert graph is not None
    assert graph.batch_sizes == (7,)


_VALUES = st.integers(min_value=1, max_value=2000)
_TREES = st.fixed_dictionaries(
    {},
    optional={
        "max_batch_size": _VALUES,
        "max_num_tokens": _VALUES,
        "kv_cache_config": st.fixed_dictionaries({}, optional={"tokens_per_block": _VALUES, "max_tokens": _VALUES}),
        "cuda_graph_config": st.fixed_dictionaries({}, optional={"batch_sizes": st.lists(_VALUES, max_size=3)}),
    },
)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        found.update(leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags=_TREES, file=_TREES, override=_TREES)
def test_whatever_is_set_anywhere_the_strongest_place_has_its_way(
    extra: Path, flags: dict[str, Any], file: dict[str, Any], override: dict[str, Any]
) -> None:
    extra.write_text(json.dumps(file))
    effective = resolve(config(extra, json.dumps(override), **flags))
    expected = {**leaves(flags), **leaves(file), **leaves(override)}
    in_effect = leaves(effective.value.model_dump(mode="json"))
    assert {key: in_effect[key] for key in expected} == expected
    places = dict.fromkeys(leaves(flags), "engine.args")
    places |= dict.fromkeys(leaves(file), str(extra))
    places |= dict.fromkeys(leaves(override), "engine.override_engine_args")
    assert {key: effective.source(key) for key in expected} == places


def test_every_value_tells_its_source(extra: Path) -> None:
    effective = resolve(config(extra, '{"kv_cache_config": {"tokens_per_block": 128}}', max_seq_len=100))
    keys = ("max_seq_len", "kv_cache_config.dtype", "kv_cache_config.tokens_per_block", "max_num_tokens")
    assert [effective.source(key) for key in keys] == [
        "engine.args",
        str(extra),
        "engine.override_engine_args",
        "default",
    ]


def test_an_unknown_key_is_refused_by_place_and_path(extra: Path) -> None:
    extra.write_text("kv_cache_config: {dtypo: fp8}")
    with pytest.raises(ConfigError, match=r"extra\.yaml: kv_cache_config\.dtypo: unknown key"):
        resolve(config(extra))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="override_engine_args: is not JSON"):
        resolve(config(override="{max_batch_size: 3}"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(config(tmp_path / "none.yaml"))


def test_a_key_of_dynamic_batching_that_does_not_exist_is_refused(extra: Path) -> None:
    extra.write_text("scheduler_config: {dynamic_batch_config: {enable_batch_size_tuning: true, window: 3}}")
    with pytest.raises(ConfigError, match=r"scheduler_config\.dynamic_batch_config\.window: unknown key"):
        resolve(config(extra))


def test_print_config_shows_effective_values_and_their_sources(extra: Path, tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(f"engine: {{kind: trtllm, model: /model, extra_engine_args: {extra}}}")
    command = [sys.executable, "-m", "services", str(file), "engine.args.max_seq_len=77", "--print-config"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"trtllm max_batch_size = 8  # {extra}" in lines
    assert "trtllm max_seq_len = 77  # engine.args" in lines
    assert "trtllm experimental = true  # it has not been run on real TensorRT-LLM yet" in lines


def test_every_model_family_has_a_file_for_every_way_to_run_it() -> None:
    shipped = {(path.parent.name, path.stem) for path in CONFIGS}
    families, ways = ("llama", "qwen3", "deepseek"), ("agg", "prefill", "decode", "encode")
    assert shipped == {(family, way) for family in families for way in ways}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_value_of_a_shipped_file_is_in_effect(path: Path) -> None:
    assert str(path) in resolve(config(path)).sources.values()
