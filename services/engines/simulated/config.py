"""The configuration of the simulated engine."""

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from runtime.config import Section
from services.engines.context import EngineConfig


class SimulatedTiming(Section):
    """The key `timing`: where the costs of steps come from."""

    profile: str = Field(min_length=1, description="A file that `baton bench profile` has written.")
    step_tokens: int = Field(
        default=4096,
        ge=2,
        description="Tokens of a step of the measured engine, at most, one of each answer among them. It takes the "
        "place of prefill_chunk_tokens.",
    )


class SimulatedConfig(EngineConfig):
    """A model with exactly these costs. The defaults take no time."""

    model_config = ConfigDict(protected_namespaces=())

    kind: Literal["simulated"] = "simulated"
    name: str = Field(default="simulated", min_length=1, description="The name that clients ask for.")
    model: str = Field(default="", description="A folder with tokenizer.json; empty is one token a byte.")
    max_context_tokens: int = Field(default=32768, ge=2)
    block_tokens: int = Field(default=16, ge=1)
    num_blocks: int = Field(default=4096, ge=1, description="Of each data-parallel rank.")
    data_parallel_ranks: int = Field(
        default=1, ge=1, le=64, description="Copies of the model, each with a batch and a prefix cache of its own."
    )
    block_bytes: int = Field(default=4096, ge=32)
    max_batch: int = Field(default=256, ge=1, description="Sequences that compute together.")
    max_waiting: int = Field(default=4096, ge=1, description="Requests that wait for blocks or a place in the batch.")
    prefill_chunk_tokens: int = Field(default=2048, ge=1, description="Prompt tokens of one step, at most.")
    prefill_base_seconds: float = Field(default=0.0, ge=0)
    prefill_tokens_per_second: float = Field(default=0.0, ge=0, description="0 is infinitely fast.")
    decode_step_seconds: float = Field(default=0.0, ge=0, description="One token for every running sequence.")
    timing: SimulatedTiming | None = Field(
        default=None, description="The costs of a measured model, instead of the three above."
    )
    end_probability: float = Field(default=0.0, ge=0, lt=1, description="Of the end of sequence, at each token.")
    guided_decoding: bool = Field(default=False, description="Whether answers follow the grammars of requests.")
    fail_after_tokens: int = Field(default=0, ge=0, description="Then the whole engine fails; 0 is never.")
    kv_events: bool = Field(default=True, description="Whether the worker reports the content of its prefix cache.")
    allow_faults: bool = Field(default=False, description="Whether requests may bring x-baton-fault.")
    load_seconds: float = Field(default=0.0, ge=0)
    wake_seconds: float = Field(default=0.0, ge=0, description="After its memory was released.")
    image_tokens: int = Field(default=0, ge=0, description="Tokens of every image; 0 is a model without images.")
    image_hidden_size: int = Field(default=64, ge=1, description="Numbers of a row of an embedding.")
    encode_seconds: float = Field(default=0.0, ge=0, description="Of one image.")

    embed_dimensions: int = Field(default=64, ge=1, description="Numbers of a text's vector.")
    embed_seconds: float = Field(default=0.0, ge=0, description="Of one call to embed texts.")
    draw_step_seconds: float = Field(default=0.0, ge=0, description="Of one step of a picture.")

    @model_validator(mode="after")
    def _blocks_hold_whole_tokens(self) -> "SimulatedConfig":
        if self.block_bytes % self.block_tokens:
            raise ValueError(f"block_bytes must be a multiple of block_tokens, {self.block_tokens}")
        return self

    @model_validator(mode="after")
    def _has_one_timing(self) -> "SimulatedConfig":
        if self.timing and (self.prefill_base_seconds or self.prefill_tokens_per_second or self.decode_step_seconds):
            names = "prefill_base_seconds, prefill_tokens_per_second and decode_step_seconds"
            raise ValueError(f"timing takes the place of {names}: set either")
        if self.timing and self.timing.step_tokens <= self.max_batch:
            raise ValueError(f"timing.step_tokens must be greater than max_batch, {self.max_batch}")
        return self

    @property
    def allows_fault_injection(self) -> bool:
        return self.allow_faults

    @property
    def context_tokens(self) -> int:
        """The longest context that the limit and the pool both allow."""
        return min(self.max_context_tokens, self.num_blocks * self.block_tokens)
