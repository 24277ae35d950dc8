"""A text that grows by pieces."""

import random

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
