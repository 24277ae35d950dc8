"""A text that grows by pieces."""

import random
import time

import pytest

from router.openai.stored.document import GrowingText


def test_what_follows_any_place_is_that_of_the_whole() -> None:
    draw, text, whole = random.Random(1), GrowingText(), ""
    for _ in range(5000):
        piece = "aé日\r\n"[: draw.randrange(6)]
        text.add(piece)
        whole += piece
        place = draw.randrange(len(whole) + 3)
        assert text.after(place) == whole[place:]
        if draw.random() < 0.01:
            assert (str(text), len(text)) == (whole, len(whole))


@pytest.mark.parametrize("reads_whole", [False, True])
def test_a_long_text_takes_as_long_for_each_piece_as_a_short_one(reads_whole: bool) -> None:
    def seconds(pieces: int) -> float:
        text = GrowingText()
        began = time.thread_time()
        for number in range(pieces):
            text.add("word" * 16)
            if number == pieces // 2 and reads_whole:
                str(text)
            assert len(text.after(len(text) - 64)) == 64
        return time.thread_time() - began

    ratio = min(seconds(40_000) / seconds(4000) for _ in range(5))
    assert ratio < 40  # 10 if it is linear, 100 if it is quadratic
