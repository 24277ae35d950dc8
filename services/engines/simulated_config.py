"""What can be set of the simulated engine."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SimulatedConfig(BaseModel):
    """A model that costs what is written here, and nothing else. The defaults cost no time at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    kind: Literal["simulated"] = "simulated"
    name: str = Field(default="simulated", min_length=1, description="The name that clients ask for.")
    model: str = Field(default="", description="A folder with tokenizer.json; empty is one token a byte.")
    max_context_tokens: int = Field(default=32768, ge=2)
    block_tokens: int = Field(default=16, ge=1)
    num_blocks: int = Field(default=4096, ge=1)
    block_bytes: int = Field(default=4096, ge=32)
    max_batch: int = Field(default=256, ge=1, description="Sequences that compute together.")
    max_waiting: int = Field(default=4096, ge=1, description="Requests that wait for blocks or a place in the batch.")
    prefill_chunk_tokens: int = Field(default=2048, ge=1, description="Prompt tokens of one step, at most.")
    prefill_base_seconds: float = Field(default=0.0, ge=0)
    prefill_tokens_per_second: float = Field(default=0.0, ge=0, description="0 is infinitely fast.")
    decode_step_seconds: float = Field(default=0.0, ge=0, description="One token for every running sequence.")
    end_probability: float = Field(default=0.0, ge=0, lt=1, description="Of the end of sequence, at each token.")
    fail_after_tokens: int = Field(default=0, ge=0, description="Then the whole engine fails; 0 is never.")
    allow_faults: bool = Field(default=False, description="Whether requests may bring x-baton-fault.")
    load_seconds: float = Field(default=0.0, ge=0)
    image_tokens: int = Field(default=0, ge=0, description="Tokens of every image; 0 is a model without images.")
    image_hidden_size: int = Field(default=64, ge=1, description="Numbers of a row of an embedding.")
    encode_seconds: float = Field(default=0.0, ge=0, description="Of one image.")

    @model_validator(mode="after")
    def _blocks_hold_whole_tokens(self) -> "SimulatedConfig":
        if self.block_bytes % self.block_tokens:
            raise ValueError(f"block_bytes must be a multiple of block_tokens, {self.block_tokens}")
        return self

    @property
    def context_tokens(self) -> int:
        """The longest context that both the limit and the pool allow."""
        return min(self.max_context_tokens, self.num_blocks * self.block_tokens)
