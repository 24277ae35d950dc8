"""Libraries over OpenAI's API against a router: LangChain, LlamaIndex, LiteLLM and the Vercel AI SDK, unchanged.

`make clients` runs them, and `make test` does not: installing them takes minutes.
"""

import os

import pytest
from support.clients.examples import LIBRARIES, WITHIN_SECONDS, Ended, Program
from support.clients.openai_api import openai_bench, tools_worker, url_of
from support.engines.checkpoints import DEMO
from support.engines.written_engine import HERMES_TEMPLATE

pytestmark = [
    WITHIN_SECONDS,
    pytest.mark.skipif(
        LIBRARIES not in os.environ.get("BATON_CLIENTS", "").split(),
        reason=f"`make clients CLIENTS={LIBRARIES}` runs it",
    ),
]

PYTHON = "build/venv/bin/python"
SORTED = "apple mango pear"
CALLED = "weather, city known, then a text"
VECTORS = "2 vectors, the same length True"
COMMON = {"plain": SORTED, "streamed": SORTED, "tools": CALLED, "tools_streamed": CALLED}
OBJECT = {"structured": "Pet True True"}
BY_A_TOOL = {"structured_by_a_tool": "Pet True True"}
RESPONSES = {f"responses_{name}": line for name, line in COMMON.items() if name != "plain"}
NOT_FOUND = {"embeddings": VECTORS, "error": "NotFoundError model_not_found"}
LANGCHAIN_ERROR = {"error": "OpenAIModelNotFoundError model_not_found"}
PRINTED = {
    "langchain_client.py": {
        **COMMON,
        **OBJECT,
        **BY_A_TOOL,
        "responses": SORTED,
        **RESPONSES,
        **NOT_FOUND,
        **LANGCHAIN_ERROR,
    },
    "llama_index_client.py": {**COMMON, **OBJECT, **BY_A_TOOL, **NOT_FOUND},
    "litellm_client.py": {**COMMON, **OBJECT, "responses": SORTED, "embeddings": VECTORS, "error": "NotFoundError 404"},
    "vercel.js": {
        **{
            f"{api}_{name}": line
            for api in ("responses", "chat", "compatible")
            for name, line in {**COMMON, "structured": "Pet true"}.items()
        },
        "embeddings": VECTORS.lower(),
        "error": "AI_APICallError 404",
    },
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    program("vercel.js").build()


def program(script: str) -> Program:
    return Program(LIBRARIES, ("node" if script.endswith(".js") else PYTHON, script), ("node", "npm"))


@pytest.fixture
async def run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, script: str) -> Ended:
    """The program's end, on the demo model: with its own chat template, and with another where there are tools."""
    worker = tools_worker(tmp_path_factory.mktemp("template"), "prefill", "decode", "embed")
    assert worker.chat_template is not None
    own = (DEMO / "chat_template.jinja").read_text()
    with_tools = 'tools or messages[-1].role == "tool"'
    worker.chat_template.write_text(f"{{% if {with_tools} %}}{HERMES_TEMPLATE}{{% else %}}{own}{{% endif %}}")
    async with openai_bench(worker) as running:
        monkeypatch.setenv("BATON_OPENAI", url_of(running))
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it is read from GitHub otherwise
        return await program(script).run(running.address)


@pytest.mark.parametrize("script", PRINTED)
async def test_each_case_of_a_library_prints_what_is_known_of_its_answer(script: str, run: Ended) -> None:
    lines = dict(line.split(": ", 1) for line in run.out.splitlines())
    assert (run.code, lines) == (0, PRINTED[script]), run.err
