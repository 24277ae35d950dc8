"""The kinds of requests whose routers are lost under them: what has to go on exactly, whatever an answer is made of."""

from collections.abc import Sequence
from pathlib import Path

from support.engines.adapters import save_adapter
from support.engines.checkpoints import DEMO
from support.engines.written_engine import HERMES_TEMPLATE
from support.faults.lost_routers import request_kinds
from support.images.demo_questions import questions

from baton.inference.v1 import generate_pb2

_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}'
_EMBEDDED = (
    "engine={kind: pytorch, model: models/demo, name: demo, device: cpu, threads: 1, kv_cache_bytes: 48MiB, "
    "lora: {folder: FOLDER, max_loaded: 2}}"
)
_PROMPT = "Sort: pear apple mango"
_SEEDED = {"temperature": 0.8, "seed": 11}
_BODY: dict[str, object] = {"model": "demo", **_SEEDED, "max_tokens": 60, "ignore_eos": True}
_MESSAGES = {"messages": [{"role": "user", "content": "Sort: pear apple"}]}

# Of OpenAI's API.
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/chat/completions", {**_BODY, **_MESSAGES}),
    "three": ("/chat/completions", {**_BODY, **_MESSAGES, "n": 3, "stream_options": {"include_usage": True}}),
    "stop": ("/chat/completions", {**_BODY, **_MESSAGES, "stop": ["qz", "th", "e e"]}),
    "logprobs": ("/completions", {**_BODY, "prompt": "Sort: pear", "logprobs": 1}),
}


def any_requests(max_tokens: int = 60) -> dict[str, generate_pb2.GenerateRequest]:
    """Those that every engine serves."""
    return request_kinds(_PROMPT, max_tokens)


def paced_requests() -> dict[str, generate_pb2.GenerateRequest]:
    """Those whose clients do not get each token at once."""
    stopping = {"max_tokens": 60, "ignore_eos": True}
    return _requests(
        stopping,
        {
            "rare_messages": {"sampling": _SEEDED, "response": {"min_tokens_per_message": 9}},
            "slow_reader": {"sampling": _SEEDED, "stopping": {**stopping, "max_tokens": 200}},
        },
    )


def embedded_requests() -> dict[str, generate_pb2.GenerateRequest]:
    """Those that the demonstration model serves beside, on the workers of `embedded_worker`."""
    user = {"role": "user", "parts": [{"text": "Sort: pear apple"}]}
    tools = {"tools": [{"name": "sort", "parameters": _SCHEMA}], "tool_choice": {"is_required": True}}
    return image_requests() | _requests(
        {"max_tokens": 60, "ignore_eos": True},
        {
            "guided": {"sampling": _SEEDED, "guided": {"json_schema": _SCHEMA}},
            "chat": {"sampling": _SEEDED, "prompt": None, "chat": {"messages": [user]}},
            "tools": {"sampling": _SEEDED, "prompt": None, "chat": {"messages": [user], **tools}},
            "adapter": {"sampling": _SEEDED, "lora_name": "first"},
        },
    )


def image_requests() -> dict[str, generate_pb2.GenerateRequest]:
    """That about a picture."""
    [question] = questions(1, "lost routers")
    media = [{"data": file} for file in question.files]
    fields = {"sampling": _SEEDED, "prompt": question.exercise.prompt, "media": media}
    return _requests({"max_tokens": 60, "ignore_eos": True}, {"image": fields})


def embedded_worker(folder: Path) -> Sequence[str]:
    """The overrides of workers with the demonstration model, and an adapter and a template, saved in `folder`."""
    save_adapter(folder / "adapters" / "first", DEMO, seed=1)
    template = folder / "hermes.jinja"
    template.write_text(HERMES_TEMPLATE)
    return _EMBEDDED.replace("FOLDER", str(folder / "adapters")), f"chat_template={template}"


def _requests(
    stopping: dict[str, object], asked: dict[str, dict[str, object]]
) -> dict[str, generate_pb2.GenerateRequest]:
    return {
        name: generate_pb2.GenerateRequest(**{"prompt": _PROMPT, "stopping": stopping, **fields})  # type: ignore[arg-type]
        for name, fields in asked.items()
    }
