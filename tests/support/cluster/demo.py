"""Workers that serve the demonstration model, in this process."""

from support.engines.checkpoints import DEMO

from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig


def demo_worker(role: str) -> WorkerConfig:
    """A worker of one role, on one thread."""
    return WorkerConfig(
        worker_id=f"{role}-0",
        roles=(role,),  # type: ignore[arg-type]
        engine=PyTorchConfig(model=DEMO, name="demo", device="cpu", threads=1, kv_cache_bytes=64 << 20),
        drain_seconds=0,
    )
