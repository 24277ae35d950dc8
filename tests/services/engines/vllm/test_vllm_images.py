"""A checkpoint with a vision encoder that Baton does not encode for: its language part is served, and no images."""

from pathlib import Path

import pytest
import torch
from support.engines import vllm
from support.engines.engine_calls import collect, greedy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from baton.errors import Unsupported
from services.engines.context import EngineContext
from services.engines.prompt import MediaSpan, Prompt
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.factory import open_vllm

pytestmark = [pytest.mark.requires_vllm, pytest.mark.timeout(1800)]

VOCABULARY = 128
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IDS = tuple(range(20, 60))


def save_idefics3(folder: Path) -> Idefics3ForConditionalGeneration:
    """A random model that vLLM's build for CPUs imports without torchvision."""
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *IMAGE_TOKENS, *map(chr, range(32, 127))]
    words = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=list(IMAGE_TOKENS)
    )
    images = Idefics3ImageProcessor(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2}
    vision = {**sizes, "hidden_size": 64, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": vllm.HEAD_DIM}
    text = {"model_type": "llama", **sizes, "hidden_size": 128, **heads, "vocab_size": VOCABULARY, **ENDS}
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=vision,
            text_config={**text, "max_position_embeddings": 2048},
            image_token_id=pieces.index("<image>"),
            scale_factor=2,
            pad_token_id=0,
        )
    )
    model.to(torch.float32).save_pretrained(folder)
    return model.eval()


async def test_the_language_part_of_a_vision_checkpoint_answers_as_transformers(tmp_path: Path) -> None:
    with vllm.installed():
        model = save_idefics3(tmp_path)
        settings = {**vllm.settings(tmp_path, {"num_gpu_blocks_override": 64}), "guided_decoding": False}
        async with open_vllm(VllmConfig.model_validate(settings), EngineContext()) as engine:
            answer = await collect(engine.decode(Prompt(IDS), greedy(8)))
            images = engine.facts.images
            with pytest.raises(Unsupported, match=r"prompt\.media: the model .* takes text only"):
                await collect(engine.decode(Prompt(IDS, media=(MediaSpan(0, 2, b"digest"),)), greedy(8)))
    prompt = torch.tensor([IDS])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    assert list(answer.ids) == expected[0, len(IDS) :].tolist()
    assert images is None
