"""Prompts with images as vLLM gets them, and the models that take them; without vLLM."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines.checkpoints import DEMO, save_qwen3

from baton.errors import Unsupported
from services.engines.kv import embedding_layout
from services.engines.prompt import Embedding, MediaSpan, Prompt
from services.engines.registry import engine_kind
from services.engines.rules import ImageRules
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.loading import encoder_config, image_rules
from services.engines.vllm.requests.media import check_last_position, identifier, multimodal_prompt, span_named

IMAGE = 7
RULES = ImageRules("<image>", IMAGE, 2, 3, embedding_layout("weights", "float32", 3))
ROWS = Embedding(b"one", (2, 3), "float32", bytes(24))
HERE, ELSEWHERE = MediaSpan(1, 2, b"one", ROWS), MediaSpan(4, 2, b"other")
PROMPT = Prompt((1, IMAGE, IMAGE, 2, IMAGE, IMAGE, 3), media=(HERE, ELSEWHERE))


@dataclass
class Element:
    """Stands for vLLM's MultiModalFieldElem."""

    data: Any
    field: str


# Stands for vLLM's module of inputs.
PACKAGE: Any = SimpleNamespace(
    multimodal_inputs=SimpleNamespace(
        MultiModalBatchedField=lambda: "batched",
        MultiModalFieldElem=Element,
        MultiModalKwargsItem=dict,
        PlaceholderRange=lambda offset, length: (offset, length),
    )
)


def test_each_image_has_its_rows_its_place_and_a_name_of_its_digest() -> None:
    found = multimodal_prompt(PACKAGE, RULES, PROMPT, PROMPT.token_ids)
    assert found["prompt_token_ids"] == list(PROMPT.token_ids)
    assert found["mm_placeholders"] == {"image": [(1, 2), (4, 2)]}
    assert found["mm_hashes"]["image"][0] == f"{b'one'.hex()}-2"
    rows = [item["image_embeds"].data for item in found["mm_kwargs"]["image"]]
    assert [(tuple(each.shape), str(each.dtype)) for each in rows] == [((2, 3), "torch.float32")] * 2


def test_an_image_without_its_embedding_has_a_name_that_nothing_else_has() -> None:
    names = {identifier(ELSEWHERE) for _ in range(3)}
    assert len(names) == 3
    assert not any(ELSEWHERE.digest.hex() in name or span_named(name, 0) for name in names)


@pytest.mark.parametrize("start", [0, 5, -9])
def test_the_place_of_an_image_is_read_from_its_name(start: int) -> None:
    assert span_named(identifier(HERE), start) == MediaSpan(start, 2, b"one")


def test_an_image_at_the_last_position_that_is_computed_is_refused() -> None:
    check_last_position(PROMPT.media, 7)
    for length in (5, 6):
        with pytest.raises(Unsupported, match=r"prompt\.media"):
            check_last_position(PROMPT.media, length)


def _config(folder: Path, **keys: object) -> VllmConfig:
    return VllmConfig.model_validate({"model": folder, **keys})


def test_llava_takes_images_by_the_rules_of_the_embedded_engines_encoder() -> None:
    config = _config(DEMO)
    rules = image_rules(config, config.args)
    assert rules is not None
    assert (rules.placeholder, rules.tokens_per_image, rules.embedding_layout.dtype) == ("<image>", 16, "float32")
    assert not rules.encoder_fingerprint
    assert "encoder" in engine_kind("vllm").parts


@pytest.mark.parametrize(
    "keys",
    [
        {"lora": {"folder": "/nowhere"}},
        {"args": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}},
    ],
    ids=["adapters", "speculation"],
)
def test_llava_takes_text_alone_with_what_was_not_run(keys: dict[str, object]) -> None:
    config = _config(DEMO, **keys)
    assert image_rules(config, config.args) is None


def test_a_model_of_text_takes_no_images(tmp_path: Path) -> None:
    config = _config(save_qwen3(tmp_path))
    assert image_rules(config, config.args) is None


@pytest.mark.parametrize(
    ("given", "used"),
    [("auto", "auto"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")],
)
def test_the_encoder_computes_in_the_dtype_of_the_engine_if_it_can(given: str, used: str) -> None:
    config = _config(DEMO, args={"dtype": given}, name="demo")
    assert (encoder_config(config, config.args).dtype, encoder_config(config, config.args).name) == (used, "demo")
