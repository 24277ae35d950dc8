"""Noise is a function of seed, position and token id, and is distributed like random numbers."""

import math

import torch

from services.engines.pytorch.sampling.sampling import gumbel, row_key


def noise(seed: int, position: int, count: int = 20_000) -> torch.Tensor:
    keys = torch.tensor([row_key(seed, position)], dtype=torch.int32)
    return gumbel(keys, torch.arange(count, dtype=torch.int32))[0]


def plain_noise(seed: int, position: int, token: int) -> float:
    """The documented function, in unbounded integers."""

    def splitmix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    weyl = 0x9E3779B97F4A7C15
    key = splitmix((splitmix((seed + weyl) % 2**64) + (position + 1) * weyl) % 2**64)
    bits = (token * 0x9E3779B1 + key) % 2**32
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
    bits = ((bits ^ bits >> 15) + (key >> 32)) * 0x846CA68B % 2**32
    bits ^= bits >> 16
    return -math.log(-math.log1p(-(bits % 2**31 + 0.5) / 2**31))


def test_noise_is_what_plain_integers_give() -> None:
    wanted = [plain_noise(2**63 + 12345, 678, token) for token in range(1000)]
    assert torch.allclose(noise(2**63 + 12345, 678, 1000), torch.tensor(wanted), atol=1e-4)


def test_noise_never_changes_between_versions() -> None:
    # Pinned, since a worker of another version must continue a request that this one began.
    assert row_key(1234, 56) == (-571655178, -534643883)


def test_a_tokens_noise_does_not_depend_on_which_others_are_looked_at() -> None:
    keys = torch.tensor([row_key(1, 2), row_key(3, 4)], dtype=torch.int32)
    picked = torch.tensor([[17, 4, 900], [900, 5, 17]], dtype=torch.int32)
    some = gumbel(keys, picked)
    assert torch.equal(some[0], noise(1, 2)[picked[0].long()])
    assert torch.equal(some[1], noise(3, 4)[picked[1].long()])


def test_noise_has_the_gumbel_distribution() -> None:
    values = noise(7, 1, 200_000).double()
    assert abs(float(values.mean()) - 0.57722) < 0.02
    assert abs(float(values.var()) - math.pi**2 / 6) < 0.04
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99, 0.9999):
        assert abs(float((values < -math.log(-math.log(quantile))).double().mean()) - quantile) < 0.005


def test_noise_of_neighbouring_positions_seeds_and_tokens_is_unrelated() -> None:
    first = noise(7, 1)
    for other in (noise(7, 2), noise(8, 1), noise(7 + (1 << 32), 1), first.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.03


def test_all_noise_is_a_number() -> None:
    assert bool(torch.isfinite(torch.stack([noise(seed, 9, 100_000) for seed in range(10)])).all())


def test_every_seed_of_64_bits_counts() -> None:
    assert len({row_key(seed, 5) for seed in (0, 1, (1 << 63), (1 << 64) - 1, 1 << 32)}) == 5
