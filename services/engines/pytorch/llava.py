"""LLaVA by halves: an encode worker needs nothing of it but the eyes, the others all but those.

Neither class reads, or makes room for, the weights of the other half.
"""

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration


class _Half(LlavaForConditionalGeneration):  # type: ignore[no-untyped-call]
    """What both halves have in common."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: older checkpoints are to be read under the names that the library knows for LLaVA's weights."""
        return False


class LlavaLanguage(_Half):  # type: ignore[no-untyped-call]
    """The language model, which reads embeddings made elsewhere."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        del self.model.vision_tower, self.model.multi_modal_projector


class LlavaVision(_Half):  # type: ignore[no-untyped-call]
    """Vision tower and projector."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        del self.model.language_model, self.lm_head

    def get_input_embeddings(self) -> torch.nn.Module:
        """An empty module: nothing here takes token ids."""
        return torch.nn.Identity()

    def get_output_embeddings(self) -> torch.nn.Module:
        """An empty module: there is no vocabulary here."""
        return torch.nn.Identity()
