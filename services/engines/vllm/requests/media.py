"""Prompts with images as vLLM's processed inputs: embeddings of Baton's encoder in place of pixels.

vLLM finds an image's blocks and embeddings again by an identifier, which is made of our digest and the number of rows.
So its prefix cache, its KV events and the routers' hash chain agree which images are equal.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from baton.errors import Unsupported
from services.engines.prompt import MediaSpan, Prompt
from services.engines.rules import ImageRules
from services.engines.vllm.package import VllmPackage

_MODALITY = "image"
_FIELD = "image_embeds"
# vLLM drops the rows of images whose KV is there when a request begins, and its process ends by "Encoder cache miss" if
# it preempts the request later and has lost that KV. It drops none with this field, which models ignore.
_KEPT = "address"


def identifier(span: MediaSpan) -> str:
    """Returns the identifier of an image whose embedding is here; of any other one a name that nothing else has."""
    name = span.digest.hex() if span.embedding is not None else f"handoff-{secrets.token_hex(8)}"
    return f"{name}-{span.num_tokens}"


def span_named(name: object, start: int) -> MediaSpan | None:
    """Returns the place of an image by its identifier; None if that is not one of an image's digest."""
    digest, _, rows = name.partition("-") if isinstance(name, str) else ("", "", "")
    try:
        return MediaSpan(start, int(rows), bytes.fromhex(digest))
    except ValueError:
        return None


def check_last_position(media: Sequence[MediaSpan], length: int) -> None:
    """Raises Unsupported if the last of `length` positions, which a reader of KV computes again, is an image's."""
    if any(span.start < length <= span.end for span in media):
        raise Unsupported("prompt.media: vLLM hands over no prompt that ends with an image; put text behind it")


def multimodal_prompt(
    package: VllmPackage, rules: ImageRules, prompt: Prompt, token_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns vLLM's input for `token_ids`, a beginning of the prompt's context with all of its images.

    Images without embeddings, whose KV comes from another worker, have zeros: vLLM wants tensors, and reads them only
    if it preempts the request, which VllmGeneration ends then.
    """
    inputs = package.multimodal_inputs
    field = inputs.MultiModalBatchedField()
    kept = inputs.MultiModalFieldElem(data=_empty(), field=field)
    rows = [inputs.MultiModalFieldElem(data=_rows(span, rules), field=field) for span in prompt.media]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(token_ids),
        "mm_kwargs": {_MODALITY: [inputs.MultiModalKwargsItem({_FIELD: each, _KEPT: kept}) for each in rows]},
        "mm_hashes": {_MODALITY: [identifier(span) for span in prompt.media]},
        "mm_placeholders": {
            _MODALITY: [inputs.PlaceholderRange(offset=each.start, length=each.num_tokens) for each in prompt.media]
        },
    }


def _empty() -> Any:
    import torch

    return torch.zeros(1, dtype=torch.uint8)


def _rows(span: MediaSpan, rules: ImageRules) -> Any:
    import torch

    embedding = span.embedding
    if embedding is None:
        # As wide as others, with which vLLM may put them into one batch.
        shape = (span.num_tokens, rules.hidden_size)
        return torch.zeros(shape, dtype=getattr(torch, rules.embedding_layout.dtype))
    # Copied, because torch needs writable memory.
    flat = torch.frombuffer(bytearray(embedding.data), dtype=getattr(torch, embedding.dtype))
    return flat.reshape(embedding.shape)
