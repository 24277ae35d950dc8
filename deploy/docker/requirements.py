"""Prints what a wheel requires, without what the TensorRT-LLM image brings: `requirements.py WHEEL`.

Another torch or transformers would break the image's TensorRT-LLM, which was built against its own. Standard library
only.
"""

import re
import sys
import zipfile

OF_THE_IMAGE = {"numpy", "pillow", "safetensors", "tokenizers", "torch", "transformers"}


def requirements(wheel: str) -> list[str]:
    """The requirements to install, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [each for each in required if "extra ==" not in each and _name(each) not in OF_THE_IMAGE]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
