"""`python -m support.engines.vllm_with_faults CONFIG ...` is `python -m services`, whose vLLM takes fault plans."""

from dataclasses import replace

from services.__main__ import main
from services.engines.registry import ENGINES
from services.engines.vllm.config import VllmConfig


class DisturbedVllmConfig(VllmConfig):
    """The configuration of vLLM, for workers whose requests may be delayed at each of their steps."""

    @property
    def allows_fault_injection(self) -> bool:
        return True


# vLLM's processes import this module too.
if __name__ == "__main__":
    ENGINES["vllm"] = replace(ENGINES["vllm"], config=DisturbedVllmConfig)
    main()
