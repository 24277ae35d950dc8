"""The model's shape: Stable Diffusion's layout in miniature, for diffusers' StableDiffusionPipeline."""

from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, UNet2DConditionModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from models.demo.exercises.scenes import COLORS, SHAPES, SIDE

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unknown>"
WORDS = (PAD, BOS, EOS, UNKNOWN, "a", "and", ",", *COLORS, *SHAPES)
"""The whole vocabulary."""

CONTEXT_TOKENS = 20
LATENT_SIDE = SIDE // 4
_LATENT_CHANNELS = 4
_TEXT_WIDTH = 128


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words, in lower case."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, WORDS.index(BOS)), (EOS, WORDS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=CONTEXT_TOKENS,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
    )


def new_text_encoder() -> CLIPTextModel:
    """Returns an encoder of three layers, with random weights."""
    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=_TEXT_WIDTH,
        intermediate_size=2 * _TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        pad_token_id=WORDS.index(PAD),
        bos_token_id=WORDS.index(BOS),
        eos_token_id=WORDS.index(EOS),
    )
    return CLIPTextModel(config)


def new_autoencoder() -> AutoencoderKL:
    """Returns an autoencoder between SIDE x SIDE pixels and LATENT_SIDE x LATENT_SIDE latents, with random weights."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 48, 64),
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIDE,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )


def new_unet() -> UNet2DConditionModel:
    """Returns the network that removes noise, with random weights."""
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 96),
        layers_per_block=1,
        norm_num_groups=16,
        cross_attention_dim=_TEXT_WIDTH,
        attention_head_dim=4,
    )


def new_scheduler() -> DPMSolverMultistepScheduler:
    """Returns the solver of the straight flow from noise to picture that the network learns."""
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=1.0,
        algorithm_type="dpmsolver++",
        steps_offset=1,
    )
