"""Which GPUs TensorRT-LLM would see."""

import os


def visible_gpus() -> int:
    """How many: those of CUDA_VISIBLE_DEVICES if it is set, else all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() not in ("", "-1")])
    import torch

    return torch.cuda.device_count()
