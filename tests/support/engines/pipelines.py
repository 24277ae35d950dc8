"""Pipelines of public shapes with random weights, a few thousand of them, in diffusers' layout."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    LattePipeline,
    LatteTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from models.demo_diffusion.architecture import WORDS, new_tokenizer


def write_wan(folder: Path) -> Path:
    """Wan: clips, whose frames are 1 more than a multiple of 4, and pictures."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    text = UMT5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=1, pad_token_id=0)
    encoder, scheduler = UMT5EncoderModel(text), FlowMatchEulerDiscreteScheduler(shift=3.0)
    WanPipeline(new_tokenizer(), encoder, vae, scheduler, transformer).save_pretrained(folder)
    return folder


def write_latte(folder: Path) -> Path:
    """Latte: clips of 8 frames, and pictures, in blocks over places and over frames."""
    torch.manual_seed(0)
    transformer = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=16,
        attention_bias=True,
        sample_size=32,
        patch_size=2,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=16,
        video_length=8,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=4,
        norm_num_groups=4,
    )
    text = T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=1, pad_token_id=0)
    encoder, scheduler = T5EncoderModel(text), DDIMScheduler()
    LattePipeline(new_tokenizer(), encoder, vae, transformer, scheduler).save_pretrained(folder)
    return folder


def write_flux(folder: Path) -> Path:
    """Flux: pictures alone, in blocks of two kinds; without a negative prompt of its own kind of guidance."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    clip = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        projection_dim=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    text = T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=1, pad_token_id=0)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=new_tokenizer(),
        text_encoder_2=T5EncoderModel(text),
        tokenizer_2=new_tokenizer(),
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder
