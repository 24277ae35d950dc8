"""Builds the tokenizer and the processor: byte-level BPE of generated text, single digits, the chat template.

    python -m models.demo.tokenizing models/demo

They are built once and committed; training only reads them.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from models.demo.exercises.exercise import IMAGE
from models.demo.exercises.generate_data import ASSISTANT, BOS, EOS, SYSTEM, USER, documents
from models.demo.exercises.scenes import CELL, SIDE

PAD = "<|pad|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, IMAGE)
VOCABULARY_SIZE = 768
CONTEXT_TOKENS = 2048

_CORPUS_SEED = "tokenizer"
_CORPUS_DOCUMENTS = 60_000

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("the roles are system, user and assistant, not " ~ message.role) }}
    {%- endif %}
    {{- "<|" ~ message.role ~ "|>" }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- "<image>\\n" if part.type == "image" else part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == "assistant" %}{{- eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{% endif %}
"""


def build_tokenizer() -> Tokenizer:
    """Learns the merges; the same corpus gives the same merges."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_corpus(), _trainer())
    beginning = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[beginning])
    return tokenizer


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _corpus() -> Iterator[str]:
    """Yields the text between special tokens, which are never merged with their neighbours."""
    for document in islice(documents(_CORPUS_SEED), _CORPUS_DOCUMENTS):
        for segment in document.segments:
            text = segment.text
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "\0")
            yield from filter(None, text.split("\0"))


def build_processor(tokenizer: Tokenizer) -> LlavaProcessor:
    """Returns the tokenizer with the attributes that Hugging Face's classes store with it."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT, IMAGE],
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    return LlavaProcessor(  # type: ignore[no-untyped-call]
        image_processor=_image_processor(),
        tokenizer=fast,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def _image_processor() -> CLIPImageProcessor:
    return CLIPImageProcessor(
        size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def main() -> None:
    """Writes the tokenizer's and the processor's files into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    build_processor(build_tokenizer()).save_pretrained(parser.parse_args().folder)


if __name__ == "__main__":
    main()
