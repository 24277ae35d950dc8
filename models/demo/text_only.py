"""Writes the demonstration model's language model alone, for engines that do not take its images, such as vLLM.

    python models/demo/text_only.py FOLDER

It is a Llama with the same tokenizer and chat template. Questions about pictures are what it cannot answer.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

DEMO = Path(__file__).resolve().parent
SAME = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
PREFIX = "language_model."


def write_text_model(folder: Path) -> Path:
    """Writes the checkpoint into a folder, which it creates, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = json.loads((DEMO / "config.json").read_text())
    config = {"architectures": ["LlamaForCausalLM"], "dtype": whole["dtype"], **whole["text_config"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = load_file(DEMO / "model.safetensors")
    kept = {name.removeprefix(PREFIX): each for name, each in weights.items() if name.startswith(PREFIX)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in SAME:
        shutil.copyfile(DEMO / name, folder / name)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write_text_model(Path(sys.argv[1])))
