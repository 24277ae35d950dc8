"""The model's shape: that of the demonstration model for pictures, with attention over frames (AnimateDiff, arXiv
2307.04725), for diffusers' AnimateDiffPipeline.
"""

import torch
from diffusers import DPMSolverMultistepScheduler, MotionAdapter, UNet2DConditionModel, UNetMotionModel
from transformers import CLIPTextModel, PreTrainedTokenizerFast

from models.demo_clips.clips import DIRECTIONS, FRAMES
from models.demo_diffusion import architecture as pictures

WORDS = (*pictures.WORDS, "moves", *DIRECTIONS)
"""The whole vocabulary; the words for pictures have the ids that they have there."""

_HEADS = 4
_SHIFT = 2.5
"""Of times towards the noise: the frames of a clip are alike, so that they show more through the same noise."""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words, in lower case."""
    return pictures.new_tokenizer(WORDS)


def text_encoder_of(trained: CLIPTextModel) -> CLIPTextModel:
    """Returns the encoder of the model for pictures, with more words."""
    found = pictures.new_text_encoder(len(WORDS))
    weights, known = found.state_dict(), len(pictures.WORDS)
    for name, tensor in trained.state_dict().items():
        weights[name][: len(tensor)] = tensor
        if "token_embedding" in name:
            weights[name][known:] *= tensor.std() / weights[name][known:].std()
    found.load_state_dict(weights)
    return found


def unet_of(trained: UNet2DConditionModel) -> UNetMotionModel:
    """Returns the network of the model for pictures, with layers over frames that do not change anything yet."""
    adapter = MotionAdapter(
        block_out_channels=tuple(trained.config.block_out_channels),
        motion_layers_per_block=trained.config.layers_per_block,
        motion_num_attention_heads=_HEADS,
        motion_norm_num_groups=trained.config.norm_num_groups,
        motion_max_seq_length=FRAMES,
        use_motion_mid_block=False,
    )
    found = UNetMotionModel.from_unet2d(trained, adapter)
    for name, parameter in found.named_parameters():
        if "motion_modules" in name and ".proj_out." in name:
            torch.nn.init.zeros_(parameter)
    return found


def shifted(times: torch.Tensor) -> torch.Tensor:
    """Returns the times of the flow as the scheduler shifts them."""
    return _SHIFT * times / (1 + (_SHIFT - 1) * times)


def new_scheduler() -> DPMSolverMultistepScheduler:
    """Returns the solver of the straight flow from noise to clip that the network learns."""
    return DPMSolverMultistepScheduler.from_config(pictures.new_scheduler().config, flow_shift=_SHIFT)
