"""Placeholders are repeated for each token of an image."""

from router.multimodal.prompt import expand

IMAGE = 9


def test_each_placeholder_becomes_as_many_as_its_medium_has_rows() -> None:
    expanded = expand([1, IMAGE, 2, IMAGE, IMAGE, 3], IMAGE, [2, 1, 3])
    assert expanded.token_ids == (1, 9, 9, 2, 9, 9, 9, 9, 3)
    assert expanded.starts == (1, 4, 5)


def test_without_media_nothing_changes() -> None:
    assert expand([1, 2], IMAGE, []).token_ids == (1, 2)
