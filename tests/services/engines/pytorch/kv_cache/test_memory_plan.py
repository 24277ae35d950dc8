"""The block pool's share of a GPU's memory: computed from the needs of steps, whichever worker starts first."""

import pytest

from baton.errors import ConfigError
from services.engines.pytorch.kv_cache.memory_plan import StepShape, pool_bytes, step_bytes

GIB = 1 << 30
EIGHT_BILLION = StepShape(
    step_tokens=4096,
    max_sequences=64,
    hidden_size=4096,
    intermediate_size=14336,
    head_numbers=(32 + 16) * 128,
    vocab_size=128_256,
    width=2,
)


def test_a_step_of_an_8b_model_needs_about_a_gibibyte() -> None:
    assert 0.9 * GIB < step_bytes(EIGHT_BILLION) < 1.5 * GIB


def test_one_worker_gets_what_weights_and_steps_leave() -> None:
    assert pool_bytes(free=124 * GIB, total=140 * GIB, allocated=15 * GIB, share=1.0, step=GIB) == 121 * GIB


def test_two_workers_on_one_gpu_get_the_same_in_either_order_of_start() -> None:
    first = pool_bytes(free=124 * GIB, total=140 * GIB, allocated=15 * GIB, share=0.5, step=GIB)
    left = 140 - 15 - 1 - 15 - 1 - first // GIB - 1
    second = pool_bytes(free=left * GIB, total=140 * GIB, allocated=15 * GIB, share=0.5, step=GIB)
    assert first == second == 51 * GIB


def test_where_nothing_is_left_the_numbers_are_told() -> None:
    with pytest.raises(ConfigError, match=r"of 24.0 GiB 8.0 are free, this worker may take 12.0"):
        pool_bytes(free=8 * GIB, total=24 * GIB, allocated=15 * GIB, share=0.5, step=GIB)
