"""The rules of a model, part of its facts: for images in prompts, for vectors of texts, for pictures and clips."""

from dataclasses import dataclass

from services.engines.kv import KvLayout


@dataclass(frozen=True, slots=True)
class ImageRules:
    """References to images in a prompt: `placeholder` in text, and its id once for each row of the image's embedding.

    `tokens_per_image` is the number of rows of every image, or 0 if images differ. A row has `hidden_size` numbers of
    `embedding_layout`'s dtype. `encoder_fingerprint` is empty without an encoder.
    """

    placeholder: str
    placeholder_token_id: int
    tokens_per_image: int
    hidden_size: int
    embedding_layout: KvLayout
    encoder_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """The vectors that a model makes of texts: how many numbers, of how long inputs, and how they are made.

    `normalize` says whether they are scaled to the length 1 unless a request says otherwise.
    """

    dimensions: int
    max_input_tokens: int
    pooling: str  # last, mean, cls, max, weighted_mean, mean_sqrt_len, or several joined by +
    normalize: bool


@dataclass(frozen=True, slots=True)
class ClipRules:
    """The clips that a model draws: `frames` and `frames_per_second` where a request does not say, and limits.

    The number of frames is 1 more than a multiple of `frame_multiple`.
    """

    frames: int
    max_frames: int
    frame_multiple: int
    frames_per_second: float
    mp4: bool  # whether it can be written as one file


@dataclass(frozen=True, slots=True)
class DrawingRules:
    """The pictures that a model draws: what counts where a request does not say, and limits.

    Width and height are multiples of `size_multiple`.
    """

    width: int
    height: int
    steps: int
    guidance_scale: float
    size_multiple: int
    max_pixels: int
    max_steps: int
    max_number: int  # of one request
    max_prompt_characters: int
    negative_prompt: bool  # whether it can be told what not to draw
    previews: bool
    clips: ClipRules | None = None  # of a model that draws clips
