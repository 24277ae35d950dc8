"""Prints what an image installs beside Baton's own wheels: `requirements.py TARGET`, in the repository's root.

The list is that of the three pyproject.toml, without what the target must not install. Standard library only.
"""

import re
import sys
from pathlib import Path
from typing import Any

import tomllib

PROJECTS = tuple(map(Path, ("pyproject.toml", "packaging/client/pyproject.toml", "packaging/http2/pyproject.toml")))
# The first process of every container, which passes signals on.
INIT = "dumb-init"
# OpenAI's API is a key of a router's configuration, and not another image; the `baton` command is in every image.
EXTRAS = {
    "router": ("openai", "cli"),
    "cpu": ("openai", "cli", "pytorch"),
    "cuda": ("openai", "cli", "pytorch"),
    "trtllm": ("openai", "cli"),
}
# Installed from this checkout, after the others.
OURS = {"baton-client", "baton-http2"}
# By the image's target. Routers compute nothing. Another torch or transformers would break the TensorRT-LLM of its
# image, which was built against its own.
LEFT_OUT = {
    "router": {"numpy"},
    "cpu": set(),
    "cuda": set(),
    "trtllm": {"numpy", "pillow", "tokenizers"},
}


def requirements(target: str) -> list[str]:
    """The requirements of an image, without most extras. Raises KeyError for an unknown target."""
    without = LEFT_OUT[target] | OURS
    projects = [tomllib.loads(path.read_text())["project"] for path in PROJECTS]
    declared = {each for project in projects for each in _declared(project, EXTRAS[target])}
    return sorted({INIT, *(each for each in declared if _name(each) not in without)})


def _declared(project: dict[str, Any], wanted: tuple[str, ...]) -> list[str]:
    extras = project.get("optional-dependencies", {})
    return [*project["dependencies"], *(each for name in wanted for each in extras.get(name, []))]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
