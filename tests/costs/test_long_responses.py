"""Responses that are kept: what a long one, or a long conversation, takes."""

import time

import pytest
from support.calibration import here
from support.stored_responses import ANN, entry_of, table_of

from router.openai.responses import ResponseBuilder, ResponsesRequest
from router.openai.stored.document import GrowingText, ResponseDocument


async def test_a_long_conversation_holds_the_event_loop_for_no_time() -> None:
    table = table_of()
    for number in range(1024):
        before = {"previous_response_id": f"resp_{number - 1}"} if number else {}
        table.add(await entry_of(f"resp_{number}", **before))
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        found = table.chain("resp_1023", ANN)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < here(0.02)
    assert [one.identity for one in found] == [f"resp_{number}" for number in range(1024)]


async def test_a_response_of_many_instructions_is_written_in_little_time() -> None:
    body = ResponsesRequest(model="m", input="x", instructions="é" * 2_000_000)
    assert body.generate_request("r").chat.messages[0].parts[0].text == body.instructions
    document = ResponseDocument(ResponseBuilder(body, "resp_1", 0), "m")
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        made = document.response()
        seconds.append(time.thread_time() - began)
    assert len(made) > 12_000_000
    # 12 MB are copied; to make them of the text takes 60 ms and more.
    assert min(seconds) < here(0.03)


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
