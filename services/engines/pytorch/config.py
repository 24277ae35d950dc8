"""The configuration of the embedded PyTorch engine. Importable without torch."""

import re
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator, model_validator
from typing_extensions import Self

from runtime.config import Section
from services.engines.context import EngineConfig
from services.engines.lora.options import LoraOptions
from services.engines.pytorch.kv_cache.retention import RETAINED_SHARE
from services.engines.pytorch.kv_cache.tiers.options import TierOptions


class SpeculationOptions(Section):
    """The key `engine.speculation`: several tokens in one step, where they can be guessed."""

    kind: Literal["prompt_lookup"]
    """prompt_lookup: what followed the last tokens when they occurred before."""
    max_tokens: int = Field(default=4, ge=1, le=16)
    """Draft tokens of a sequence in one step."""
    ngram: int = Field(default=3, ge=1, le=8)
    """How many of the last tokens must have occurred before."""
    max_sequences: int = Field(default=8, ge=1)
    """Steps with more decoding sequences get no drafts: they are used well without."""


class MultiNodeOptions(Section):
    """The key `engine.multi_node`: each rank of a split model is a process started for itself, on any host."""

    leader: str
    """host:port at which rank 0 waits for the others. Rank 0 listens there if the host is an IP address, and on all its
    addresses if it is a name.
    """
    rank: int = Field(ge=0)
    """Of this process. Rank 0 is the worker; the others compute for it, and register nowhere."""
    join_seconds: float = Field(default=1800.0, gt=0)
    """The longest time to wait for the other ranks, while they start."""
    lost_seconds: float = Field(default=30.0, ge=3)
    """A rank that has been silent for so long counts as ended."""

    @field_validator("leader")
    @classmethod
    def _has_host_and_port(cls, leader: str) -> str:
        host, _, port = leader.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"expected host:port, not {leader!r}")
        return leader


class PyTorchConfig(EngineConfig):
    """Options of the embedded engine. Options that are None are derived from the device and the model."""

    kind: Literal["pytorch"] = "pytorch"
    model: Path
    """A folder in Hugging Face's checkpoint layout. Nothing is ever downloaded."""
    name: str = ""
    """The name under which the model is served; the folder's name if empty."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N for the GPU with that index among those that the process sees."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of weights and KV. auto: float32 on a CPU; on CUDA bfloat16 unless the checkpoint is float32."""
    execution: Literal["auto", "library", "fused"] = "auto"
    """library: transformers' modules. fused: kernels that read the block pool in place, with decode steps in CUDA
    graphs, and the next step started while one runs; for llama, mistral, qwen2 and qwen3. auto: fused where CUDA,
    Triton and the model allow it.
    """
    cuda_graphs: bool = True
    """Captures the fused decode steps for each batch size when the worker starts."""
    graph_prompt_tokens: int = Field(default=256, ge=0, le=1024)
    """With `cuda_graphs`, a step of decodes and of the last tokens of up to four prompts is captured too, if these are
    at most so many together: what is left to compute of prompts that are cached. 0: no step with a prompt is. A split
    model captures none.
    """
    kv_cache_bytes: ByteSize | None = Field(default=None, gt=0)
    """Size of the block pool. By default 256 MiB on a CPU, and on CUDA the rest of `gpu_memory_share`."""
    kv_cache_fraction: float | None = Field(default=None, gt=0, lt=1)
    """On CUDA: the pool's share of the free memory, instead of the computed size."""
    gpu_memory_share: float = Field(default=1.0, gt=0, le=1)
    """The share of the GPU's memory for this worker: weights, steps and the block pool."""
    block_tokens: int | None = Field(default=None, ge=1, le=256)
    """Tokens in a block: 16 on a CPU, 32 on CUDA."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Prompt and answer together; limited by the model's own limit and by the pool."""
    max_sequences: int = Field(default=64, ge=1)
    """Requests that run at the same time."""
    max_step_tokens: int | None = Field(default=None, ge=2)
    """Tokens computed in one step, which bounds its duration: 512 on a CPU, 4096 on CUDA; to embed, 4096 and 16384."""
    max_waiting: int = Field(default=256, ge=1)
    """Requests, images to encode, or calls to embed that wait; one more is refused as Overloaded."""
    max_step_images: int = Field(default=16, ge=1)
    """Images that an encode worker computes together."""
    pooling: Literal["auto", "last", "mean", "cls", "max"] = "auto"
    """How an embed worker makes a vector of the states of a text's tokens. auto: as the checkpoint's files for
    sentence-transformers say; without them the last token's state of a decoder, and the mean of a model like BERT.
    """
    max_step_inputs: int = Field(default=64, ge=1)
    """Texts that an embed worker takes together; those of one call are never divided."""
    max_logprobs: int = Field(default=20, ge=0)
    prefix_cache: bool = True
    retained_share: float = Field(default=RETAINED_SHARE, ge=0, le=1)
    """Of all blocks, the most that one tenant's requests retain in the prefix cache."""
    stall_seconds: float | None = Field(default=None, gt=0)
    """A layer that takes longer counts as stuck, and the worker ends; 12 s if unset."""
    canary_seconds: float | None = Field(default=5.0, gt=0)
    """A hung engine is NOT_SERVING within this time: it is tested with one token after half of it without progress, and
    recovers if it answers after all. null disables the test.
    """
    canary_patience_seconds: float = Field(default=8.0, gt=0)
    """The engine counts as failed, and the worker ends, if the test takes longer."""
    lora: LoraOptions | None = None
    """Adapters; null serves none. Steps are then computed by transformers' modules."""
    speculation: SpeculationOptions | None = None
    """Speculative decoding; null turns it off. Steps are then computed by transformers' modules."""
    tiers: TierOptions | None = None
    """Host memory, and perhaps a disk, for blocks that the pool evicts; null drops them."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for one operation; PyTorch's own choice if unset."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Processes, and on CUDA GPUs, among which the model is split; by the fused kernels only. `kv_cache_bytes` is then
    what each GPU takes.
    """
    multi_node: MultiNodeOptions | None = None
    """Ranks as processes of their own, on one host or several; null has rank 0 start the others on its host."""

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
            raise ValueError(f"expected auto, cpu, cuda or cuda:N, not {device!r}")
        return device

    @model_validator(mode="after")
    def _step_holds_every_sequence(self) -> Self:
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_sequences:
            raise ValueError("max_step_tokens must be greater than max_sequences")
        return self

    @model_validator(mode="after")
    def _tiers_have_a_prefix_cache(self) -> Self:
        if self.tiers is not None and not self.prefix_cache:
            raise ValueError("tiers: prefix_cache must not be false, because tiers keep what it evicts")
        return self

    @model_validator(mode="after")
    def _rank_is_one_of_the_group(self) -> Self:
        if self.multi_node is None:
            return self
        if self.tensor_parallel_size == 1:
            raise ValueError("multi_node: tensor_parallel_size must be greater than 1")
        if self.multi_node.rank >= self.tensor_parallel_size:
            raise ValueError(f"multi_node.rank: must be less than tensor_parallel_size, {self.tensor_parallel_size}")
        return self

    @model_validator(mode="after")
    def _can_be_split(self) -> Self:
        if self.tensor_parallel_size == 1:
            return self
        others = {"lora": self.lora, "speculation": self.speculation, "tiers": self.tiers}
        if unsupported := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"tensor_parallel_size: a split model does not support {', '.join(unsupported)}")
        if self.multi_node is None and self.device.startswith("cuda:"):
            raise ValueError(f"tensor_parallel_size: {self.device} is one GPU, and each rank has its own; device: cuda")
        if self.execution == "library":
            raise ValueError(
                "tensor_parallel_size: execution must not be library, because transformers' modules cannot be split"
            )
        return self

    @property
    def is_follower(self) -> bool:
        return self.multi_node is not None and self.multi_node.rank > 0

    def why_not_kept(self, *, weights: bool, kv: bool) -> str:
        if kv and not self.prefix_cache:
            return "engine.prefix_cache: false, and it is the prefix cache whose KV is kept"
        if self.device.startswith("cuda") and self.execution == "library":
            return "engine.execution: library: memory of a GPU is kept of fused models only"
        if self.tensor_parallel_size > 1:
            return self._why_not_kept_split(weights)
        return ""

    def _why_not_kept_split(self, weights: bool) -> str:
        field = "engine.tensor_parallel_size"
        if self.multi_node is not None:
            return f"{field}: ranks that are started for themselves have no keeper"
        if self.device != "cpu":
            return f"{field}: only a pool that all ranks share is kept, with engine.device: cpu"
        return f"{field}: keep_memory.weights: those of a split model cannot be kept yet" if weights else ""

    @property
    def served_name(self) -> str:
        """`name`, or the folder's name."""
        return self.name or self.model.resolve().name
