"""LLaVA's other vision towers than the demonstration checkpoint's, with random weights, compared with the plain
library.
"""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.engines.device import EXECUTION, ON_DEVICE
from support.engines.engine_calls import disaggregated
from support.images.prompts import encoded_prompt
from transformers import (
    AutoImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

from baton.errors import ConfigError
from services.engines.prompt import Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.vision.encoder import PyTorchEncoder

PLACEHOLDER = 300
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)

_PROCESSOR = {
    "size": {"height": 32, "width": 32},
    "do_center_crop": False,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
}


def small_llava(tower: type, strategy: str, layer: int) -> LlavaConfig:
    vision = tower(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8
    )
    text = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=PLACEHOLDER,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=layer,
    )


def save(config: LlavaConfig, processor: str, folder: Path) -> LlavaForConditionalGeneration:
    """A checkpoint whose vision tower makes answers depend on the picture."""
    torch.manual_seed(3)
    model = LlavaForConditionalGeneration(config).eval()
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        for weight in part.parameters():
            weight.data.normal_(0, 0.25)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor, **_PROCESSOR}))
    return model


def picture(index: int) -> Image.Image:
    return Image.radial_gradient("L").rotate(90).resize((40 + index, 40)).convert("RGB").rotate(20 * index)


def _config(folder: Path) -> PyTorchConfig:
    options = {**ON_DEVICE, "execution": EXECUTION, "threads": 1, "kv_cache_bytes": 16 << 20, "max_step_tokens": 70}
    return PyTorchConfig.model_validate({"model": folder, **options})


@pytest.mark.parametrize(
    ("tower", "processor", "strategy", "layer", "tokens"),
    [
        (CLIPVisionConfig, "CLIPImageProcessor", "default", -2, 16),
        (CLIPVisionConfig, "CLIPImageProcessor", "full", -2, 17),
        (SiglipVisionConfig, "SiglipImageProcessor", "full", -1, 16),
    ],
    ids=["clip", "clip with its class token", "siglip"],
)
async def test_a_tower_gives_the_plain_models_ids(
    tower: type, processor: str, strategy: str, layer: int, tokens: int, tmp_path: Path
) -> None:
    plain = save(small_llava(tower, strategy, layer), processor, tmp_path)
    prepare = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    config = _config(tmp_path)
    async with PyTorchEncoder(config) as encoder, PyTorchEngine(config) as prefill, PyTorchEngine(config) as decode:
        assert encoder.facts.images.tokens_per_image == tokens
        for index in range(3):
            ids = (1, 5 + index, *[PLACEHOLDER] * tokens, 20, 30 + index)
            rest = await disaggregated(prefill, decode, await encoded_prompt(encoder, ids, [picture(index)]), GREEDY)
            expected = plain.generate(
                input_ids=torch.tensor([ids]),
                pixel_values=prepare(images=[picture(index)], return_tensors="pt")["pixel_values"],
                max_new_tokens=12,
                min_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
            assert rest == tuple(expected[0, len(ids) + 1 :].tolist())


async def test_a_tower_whose_pictures_differ_in_length_is_refused_by_name(tmp_path: Path) -> None:
    small_llava(PixtralVisionConfig, "full", -1).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="'pixtral' cannot be served; encoded are those of llava with clip_vision_model"
    ):
        async with PyTorchEncoder(_config(tmp_path)):
            pass
