"""A chat template that a worker serves in the place of its model's own."""

import re
from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rpc.errors import ConfigError

# Marks what a model is trained on; to those who render it it is nothing.
_TRAINING_TAGS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def read_chat_template(path: Path | None) -> str:
    """Its text; empty without a path. Raises ConfigError naming the key if it is not there, empty, or no Jinja."""
    if path is None:
        return ""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"chat_template: {path} is empty")
    try:
        # As routers do, which say the same of it only when a chat comes.
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINING_TAGS.sub("", text))
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: {path}, line {error.lineno}: {error.message}") from error
    return text
