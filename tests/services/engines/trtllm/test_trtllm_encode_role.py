"""The arguments of a TensorRT-LLM encode worker, and the models that it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from fake_tensorrt_llm.mm_encoder import ENCODERS
from support.engines import trtllm
from support.engines.checkpoints import DEMO

from baton.errors import ConfigError
from services.engines.context import EngineContext
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.factory import open_trtllm_encoder
from services.engines.trtllm.model_facts import problem
from services.engines.trtllm.package import open_package
from services.engines.trtllm.resolved_args import Environment, check

CONFIGS = Path(__file__).parents[4] / "deploy" / "engine_configs"


def config(**options: object) -> TrtllmConfig:
    return TrtllmConfig.model_validate({**trtllm.settings(DEMO), "args": {}, **options})


def given_by(file: str) -> set[str]:
    return set(yaml.safe_load((CONFIGS / "llama" / f"{file}.yaml").read_text()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek"])
async def test_the_shipped_file_is_what_the_encoder_is_given(version: str, family: str) -> None:
    async with open_trtllm_encoder(config(extra_engine_args=CONFIGS / family / "encode.yaml"), EngineContext()):
        assert ENCODERS[0].passed == {
            "model": str(DEMO),
            "tensor_parallel_size": 1,
            "max_batch_size": 16,
            "max_num_tokens": 16384,
        }


async def test_an_encoder_for_which_nothing_is_set_is_given_the_model_and_the_batch_size_alone(newest: None) -> None:
    async with open_trtllm_encoder(config(), EngineContext()):
        assert set(ENCODERS[0].passed) == {"model", "max_batch_size"}


@pytest.mark.parametrize("file", ["agg", "prefill", "decode"])
async def test_of_a_file_for_another_role_the_encoder_is_given_what_it_takes(newest: None, file: str) -> None:
    async with open_trtllm_encoder(config(extra_engine_args=CONFIGS / "llama" / f"{file}.yaml"), EngineContext()):
        taken = {"dtype", "tensor_parallel_size", "max_batch_size", "max_num_tokens"} & given_by(file)
        assert set(ENCODERS[0].passed) == {"model", "max_batch_size", *taken}


def test_what_the_encoder_does_not_take_is_warned_of(newest: None) -> None:
    environment = Environment(("encode",), open_package().version, gpus=1)
    warnings = check(config(extra_engine_args=CONFIGS / "llama" / "agg.yaml"), environment).warnings
    assert "MultimodalEncoder does not take kv_cache_config; it is left out" in warnings


async def test_a_model_without_images_has_no_encode_role(newest: None, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="has no encode role"):
        async with open_trtllm_encoder(config(model=checkpoint), EngineContext()):
            pass


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "no encoder that runs alone"),
        ({"text_config": {"rope_scaling": {"mrope_section": [16, 24, 24]}}}, "mRoPE"),
        ({"text_config": {"rope_parameters": {"rope_type": "mrope"}}}, "mRoPE"),
        ({"image_token_index": None}, "image_token_id"),
    ],
)
def test_models_whose_images_cannot_be_served_are_refused(change: dict[str, object], why: str) -> None:
    model = {**json.loads((DEMO / "config.json").read_text()), **change}
    assert why in problem({key: value for key, value in model.items() if value is not None})


def test_the_images_of_the_demonstration_can_be_served() -> None:
    assert problem(json.loads((DEMO / "config.json").read_text())) == ""
