"""A cache forgets what was not used lately, and never grows past its bound."""

from router.text.encoding.pieces import BoundedCache


def cache(most_bytes: int) -> BoundedCache[str, str]:
    return BoundedCache(most_bytes, lambda key, value: len(key) + len(value))


def test_what_is_used_stays_and_the_rest_is_forgotten() -> None:
    kept = cache(1000)
    kept.put("used", "value")
    kept.put("unused", "value")
    for number in range(300):
        kept.put(f"{number}", "x")
        assert kept.get("used") == "value"
    assert "unused" not in kept
    assert kept.get("unused") is None


def test_it_stays_within_its_bound() -> None:
    kept = cache(1000)
    for number in range(1000):
        kept.put(f"{number:03}", "seven..")
    assert 40 <= sum(f"{number:03}" in kept for number in range(1000)) <= 100


def test_a_large_entry_is_not_kept_and_displaces_no_others() -> None:
    kept = cache(1600)
    kept.put("small", "value")
    kept.put("large", "x" * 101)
    assert "large" not in kept
    assert "small" in kept
