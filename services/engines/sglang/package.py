"""SGLang as it is installed: imported only here, and inside its own processes."""

import asyncio
import importlib
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from baton.errors import ConfigError
from services.engines.external.package import PackageSource

_SOURCE = PackageSource(
    "sglang",
    "SGLang",
    "sglang",
    "install it into an environment of its own (docs/sglang.md), or choose engine.kind pytorch",
    Version("0.5.16"),
    Version("0.5.17.dev0"),
    "0.5.16",
)


@dataclass(frozen=True, slots=True)
class SglangPackage:
    """The parts of the package that the adapter uses."""

    version: Version
    engine: Any
    server_args: Any
    generate_request: Any
    http_error: type[Exception]


def open_sglang_package() -> SglangPackage:
    """Imports SGLang, whose import takes the event loop's policy: it is put back.

    Raises a one-line ConfigError if it is missing, cannot run here, or is not supported.
    """
    policy = asyncio.get_event_loop_policy()
    try:
        version = _SOURCE.version_of(_SOURCE.load())
        engine = _SOURCE.load("srt.entrypoints.engine")
    finally:
        asyncio.set_event_loop_policy(policy)
    _require_nixl()
    return SglangPackage(
        version=version,
        engine=engine.Engine,
        server_args=engine.ServerArgs,
        generate_request=engine.GenerateReqInput,
        http_error=importlib.import_module("fastapi").HTTPException,
    )


def _require_nixl() -> None:
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(f"engine.kind sglang needs nixl, which cannot be imported ({error})") from error
