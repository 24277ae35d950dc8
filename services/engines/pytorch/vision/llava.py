"""LLaVA in two halves: encode workers need its vision encoder only, other workers its language model only.

Neither class loads, or allocates memory for, the weights of the other half.
"""

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration


class _Half(LlavaForConditionalGeneration):  # type: ignore[no-untyped-call]
    """The base of both halves."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """Returns False: older checkpoints are read under the library's names of LLaVA's weights."""
        return False


class LlavaLanguage(_Half):  # type: ignore[no-untyped-call]
    """The language model, which reads embeddings of other workers."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        del self.model.vision_tower, self.model.multi_modal_projector


class LlavaVision(_Half):  # type: ignore[no-untyped-call]
    """Vision tower and projector."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        del self.model.language_model, self.lm_head

    def get_input_embeddings(self) -> torch.nn.Module:
        """Returns an empty module: this half takes no token ids."""
        return torch.nn.Identity()

    def get_output_embeddings(self) -> torch.nn.Module:
        """Returns an empty module: this half has no vocabulary."""
        return torch.nn.Identity()
