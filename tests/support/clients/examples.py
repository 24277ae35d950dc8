"""The client programs of examples/, built by their own Makefiles and run as a user would run them."""

import asyncio
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest
from support.manifests import ROOT

from runtime.aio import timeout

EXAMPLES = ROOT / "examples"
# Libraries over OpenAI's API, which keep to no common contract and take minutes to install.
LIBRARIES = "openai-clients"


def on_this_machine(seconds: float) -> float:
    """The seconds for a program that has a core, and more where others want it too."""
    return seconds * min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


_BUILD_SECONDS = 300
_RUN_SECONDS = 60
# The deadline of a test that runs its program a few times. Building it, which a fixture does, has its own.
WITHIN_SECONDS = pytest.mark.timeout(on_this_machine(_BUILD_SECONDS + 3 * _RUN_SECONDS), func_only=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status of a program, and its output."""

    code: int
    out: str
    err: str

    @property
    def status(self) -> int:
        """The number of the gRPC status that it ended with. Raises StopIteration if it names none."""
        return int(next(line for line in self.err.splitlines() if line.startswith("status ")).split()[1].rstrip(":"))


@dataclass(frozen=True, slots=True)
class Program:
    """A client in one language. `needs` are programs, by name, and files of libraries, by path."""

    language: str
    command: Sequence[str]
    needs: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        return EXAMPLES / self.language

    @property
    def missing(self) -> list[str]:
        """The programs and files that are needed to build it and missing."""
        return [each for each in self.needs if not (Path(each).exists() or shutil.which(each))]

    def build(self) -> None:
        """Runs its Makefile. Without its toolchain the test is skipped; under CI, where it is installed, it fails."""
        if self.missing:
            text = f"{', '.join(self.missing)} not found: `tools/install_system_packages.sh` installs what is missing"
            if os.environ.get("CI"):
                pytest.fail(text)
            pytest.skip(text)
        command = ["make", "--silent", "-C", str(self.folder), f"PYTHON={sys.executable}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as building:
            output = _output_in_time(building, " ".join(command))
        assert building.returncode == 0, output

    @asynccontextmanager
    async def started(self, address: str, *words: str) -> AsyncIterator[Process]:
        """The running program; it is killed at the end of the context."""
        environment = {**os.environ, "BATON_ADDRESS": address}
        process = await asyncio.create_subprocess_exec(
            *self.command, *words, cwd=self.folder, env=environment, stdout=PIPE, stderr=PIPE
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def run(self, address: str, *words: str) -> Ended:
        """Runs the program to its end."""
        async with self.started(address, *words) as process:
            return await ended(process)


def _output_in_time(building: "subprocess.Popen[str]", named: str) -> str:
    """Runs a build, and returns its output. Its deadline grows with the load of the machine."""
    began = monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return building.communicate(timeout=1)[0]
        seconds, most = monotonic() - began, on_this_machine(_BUILD_SECONDS)
        if seconds > most:
            building.kill()
            load = os.getloadavg()[0]
            pytest.fail(f"`{named}` did not end in {most:.0f} s, at a load of {load:.0f}; build it before, alone")


async def ended(process: Process) -> Ended:
    """Waits for the end of a program, and reads the rest of its output."""
    async with timeout(on_this_machine(_RUN_SECONDS)):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


_GO = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc", "/usr/share/gocode/src/google.golang.org/grpc")
_JAVA = (
    "java",
    "javac",
    "protoc",
    "grpc_java_plugin",
    "/usr/share/java/grpc-netty.jar",
    "/usr/share/java/protobuf-util.jar",
)
_CPP = ("g++", "cmake", "protoc", "grpc_cpp_plugin", "/usr/include/grpcpp/grpcpp.h")

PROGRAMS = {
    program.language: program
    for program in (
        Program("python", (sys.executable, "main.py")),
        Program("node", ("node", "main.js"), ("node", "npm")),
        Program("go", ("build/baton",), _GO),
        Program("java", ("build/baton",), _JAVA),
        Program("cpp", ("build/baton",), _CPP),
    )
}
