"""A worker's chat template may come from a file, which is checked before anything is loaded."""

from pathlib import Path

import pytest
from support.cluster.in_process import bench, simulated

from baton.errors import ConfigError
from discovery.memory import MemoryRegistry
from services.server import host_worker

CHAT = {"messages": [{"role": "user", "parts": [{"text": "hello"}]}]}


async def test_routers_render_chats_by_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}!")
    config = simulated("d1", "decode").model_copy(update={"chat_template": file})
    async with bench(config) as running:
        stream = await running.generate(chat=CHAT, stopping={"max_tokens": 2})
        assert stream.started.prompt_tokens == len("hello!")


@pytest.mark.parametrize(("content", "why"), [(None, "cannot be read"), ("  ", "is empty"), ("{% if %}", "line 1")])
async def test_a_file_that_is_none_ends_the_worker_at_once(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "wrong.jinja"
    if content is not None:
        file.write_text(content)
    config = simulated("d1", "decode").model_copy(update={"chat_template": file})
    with pytest.raises(ConfigError, match=why):
        async with host_worker(config, MemoryRegistry("test")):
            pass
