"""Headless Chromium, for tests of pages as a user sees them."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60.0
# In virtual time, which runs as fast as the page allows: enough for its scripts and their answers.
_SCRIPT_MILLISECONDS = 4000


def chromium() -> str:
    """The browser's binary. Without one the test is skipped; under CI, where it is installed, it fails."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        text = "no Chromium: `tools/install_system_packages.sh` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    return found


async def dump_dom(url: str, profile: Path) -> str:
    """The page's HTML after its scripts have run."""
    return (await _run(url, profile, "--dump-dom")).decode()


async def screenshot(url: str, profile: Path, path: Path) -> None:
    """A picture of the page."""
    await _run(url, profile, f"--screenshot={path}", "--window-size=1360,760", "--hide-scrollbars")


def command(profile: Path) -> list[str]:
    """The browser without a screen, and without calls to its vendor."""
    return [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ]


async def _run(url: str, profile: Path, *options: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command(profile),
        f"--virtual-time-budget={_SCRIPT_MILLISECONDS}",
        *options,
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output
