"""`baton draw`, and both clients' `draw`: the pictures that ImageService draws."""

import asyncio
import os
from pathlib import Path

import pytest
from support.clients.baton_command import Baton
from support.cluster.in_process import bench, simulated

from baton import AsyncClient, Client


async def test_each_picture_is_a_file_and_its_seed_draws_it_again(baton: Baton, tmp_path: Path) -> None:
    async with bench(simulated("f1", "diffuse")) as running:
        words = ("draw", "a red circle", "-o", str(tmp_path / "a.png"), "--number", "2", "--seed", "7", "--steps", "3")
        outcome = await baton(*words, "--address", running.address)
        async with AsyncClient(running.address) as client:
            events = [event async for event in client.draw("a red circle", seed=8, steps=3)]
        with Client(running.address) as blocking:
            again = await asyncio.to_thread(lambda: list(blocking.draw("a red circle", seed=8, steps=3)))
    assert outcome.code == 0
    assert sorted(outcome.err.splitlines()) == [
        f"{tmp_path / 'a-2.png'}: 64 x 64, seed 8",
        f"{tmp_path / 'a.png'}: 64 x 64, seed 7",
    ]
    assert (tmp_path / "a-2.png").read_bytes() == events[-2].image.data == again[-2].image.data
    assert [event.WhichOneof("event") for event in again] == ["progress"] * 3 + ["image", "finished"]


async def test_a_wrong_option_is_named(baton: Baton, tmp_path: Path) -> None:
    async with bench(simulated("f1", "diffuse")) as running:
        words = ("draw", "x", "-o", str(tmp_path / "a.png"), "--width", "17", "--address", running.address)
        outcome = await baton(*words)
        nowhere = await baton("draw", "x", "-o", str(tmp_path / "none" / "a.png"), "--address", running.address)
    assert (outcome.code, nowhere.code) == (2, 2)
    assert "options.width" in outcome.err
    assert "cannot be written" in nowhere.err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("name", ["none/a.png", "."])
async def test_a_file_that_cannot_be_written_is_named_before_anything_is_drawn(
    name: str, baton: Baton, tmp_path: Path
) -> None:
    async with bench(simulated("f1", "diffuse")) as running:
        outcome = await baton("draw", "x", "-o", f"{tmp_path}/{name}", "--address", running.address)
        assert running.workers["f1"].engines.part("diffuser").steps == 0
    assert outcome.code == 2
    assert "output: " in outcome.err
    assert "cannot be written" in outcome.err


async def test_each_frame_of_a_clip_is_a_file_and_both_clients_draw_the_same(baton: Baton, tmp_path: Path) -> None:
    async with bench(simulated("f1", "diffuse")) as running:
        words = ("draw", "x", "-o", str(tmp_path / "a.png"), "--frames", "3", "--seed", "7", "--number", "2")
        outcome = await baton(*words, "--steps", "2", "--address", running.address)
        async with AsyncClient(running.address) as client:
            events = [event async for event in client.draw_video("x", frames=3, seed=8, steps=2)]
        with Client(running.address) as blocking:
            again = await asyncio.to_thread(lambda: list(blocking.draw_video("x", frames=3, seed=8, steps=2)))
    assert outcome.code == 0
    assert sorted(outcome.err.splitlines()) == [
        f"{tmp_path / 'a-2.png'}: 64 x 64, 3 frames, seed 8",
        f"{tmp_path / 'a.png'}: 64 x 64, 3 frames, seed 7",
    ]
    frames = [event.frame.data for event in events if event.HasField("frame")]
    assert [(tmp_path / f"a-2-{number}.png").read_bytes() for number in (1, 2, 3)] == frames
    assert frames == [event.frame.data for event in again if event.HasField("frame")]
    assert (tmp_path / "a-1.png").exists()


async def test_what_a_clip_cannot_be_is_named(baton: Baton, tmp_path: Path) -> None:
    wrong = {
        "video.format": ("-o", str(tmp_path / "a.mp4"), "--video"),
        "video.frames": ("-o", str(tmp_path / "a.png"), "--frames", "65"),
        "clips need --video": ("-o", str(tmp_path / "a.mp4")),
    }
    async with bench(simulated("f1", "diffuse")) as running:
        for text, words in wrong.items():
            outcome = await baton("draw", "x", *words, "--address", running.address)
            assert outcome.code == 2, text
            assert text in outcome.err
    assert os.listdir(tmp_path) == []
