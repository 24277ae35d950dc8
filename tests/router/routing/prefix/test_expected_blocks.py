"""Prompts that were sent to a worker and that it has not reported yet."""

import random

from router.routing.prefix.expected_blocks import ExpectedBlocks


def chain(*parts: int) -> list[int]:
    """The keys of a prompt of such parts: each key depends on all parts up to there."""
    return [hash(parts[: count + 1]) for count in range(len(parts))]


def test_prompts_that_share_a_beginning_are_found_as_far_as_they_are_equal() -> None:
    expected = ExpectedBlocks()
    expected.add(chain(1, 2, 3, 4, 5), expires=10.0)
    expected.add(chain(1, 2, 9, 9)[2:], expires=10.0)
    for prompt, found in (((1, 2, 3, 4, 5), 5), ((1, 2, 3, 7), 3), ((1, 2, 9, 9, 9), 4), ((1,), 1), ((7, 2), 0)):
        assert expected.extent(chain(*prompt), 0, now=0.0) == found
    assert expected.extent(chain(1, 2, 3), 0, now=10.0) == 0


def test_it_agrees_with_sets_of_blocks_whatever_is_reported() -> None:
    source = random.Random(1)
    for _ in range(200):
        expected, reported, sent = ExpectedBlocks(), set[int](), set[int]()
        for _ in range(30):
            keys = chain(*(source.randrange(2) for _ in range(source.randrange(1, 9))))
            have = next((at for at, key in enumerate(keys) if key not in reported | sent), len(keys))
            assert _extent(expected, keys, reported) == have
            if have < len(keys):
                expected.add(keys[have:], expires=1.0)
                sent.update(keys)
            if source.random() < 0.5:
                # As workers do: the first blocks of a prompt that they have been sent, beginning anywhere.
                news = [key for key in keys[: source.randrange(len(keys) + 1)] if key not in reported]
                reported.update(news)
                expected.reported(news, reported.__contains__)


def test_nothing_is_left_when_all_is_reported_or_has_expired() -> None:
    expected = ExpectedBlocks()
    keys = chain(*range(10))
    expected.add(keys, expires=1.0)
    for start in range(0, 10, 3):
        expected.reported(keys[start : start + 3], set(keys[: start + 3]).__contains__)
    assert not expected
    expected.add(keys, expires=1.0)
    expected.expire(now=1.0)
    assert not expected


def test_what_is_taken_back_is_not_found_nor_what_comes_after_it() -> None:
    for first, found in ((0, 0), (4, 4)):
        expected = ExpectedBlocks()
        keys = chain(*range(10))
        expected.add(keys, expires=1.0)
        expected.withdraw(keys[first:7])
        assert expected.extent(keys, 0, now=0.0) == found


def _extent(expected: ExpectedBlocks, keys: list[int], reported: set[int]) -> int:
    """The count of PrefixCaches."""
    count = 0
    while True:
        before = count
        while count < len(keys) and keys[count] in reported:
            count += 1
        count = expected.extent(keys, count, now=0.0)
        if count == before:
            return count
