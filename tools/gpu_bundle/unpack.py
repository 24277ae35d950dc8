"""Unpacks the parts of a bundle on the target, and verifies them. Needs nothing but Python.

    python unpack.py SITE PART... [--import MODULE...]

Run it for each part as it comes, beside manifest.json. With the last part, or `--import`, every file is compared with
its digest, and the modules are imported by a new interpreter that finds SITE first.
"""

import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tarfile
from pathlib import Path

_IMPORT_SECONDS = 300
# The interpreter says how each import went: a module that crashes takes only its own process along.
_IMPORT = "import importlib, sys; m = importlib.import_module(sys.argv[1]); print(getattr(m, '__version__', ''))"


def unpack(part: Path, site: Path, digests: dict) -> None:
    """Raises ValueError for a part that is not the one of the manifest."""
    content = part.read_bytes()
    if hashlib.sha256(content).hexdigest() != digests.get(part.name):
        raise ValueError(f"{part} is not the part of manifest.json: it is another, or damaged")
    with lzma.open(part) as stream, tarfile.open(fileobj=stream, mode="r|", ignore_zeros=True) as archive:
        archive.extractall(site, filter="data")


def wrong(site: Path, digests: dict) -> list:
    """The files that are missing, or that have another content."""
    return [name for name, digest in digests.items() if _digest(site / name) != digest]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def imports(modules: list, site: Path) -> bool:
    """Tries each module, and prints its version or its error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}
    good = True
    for module in modules:
        ran = subprocess.run(
            [sys.executable, "-c", _IMPORT, module], env=environment, capture_output=True, timeout=_IMPORT_SECONDS
        )
        last = (ran.stdout if ran.returncode == 0 else ran.stderr).decode(errors="replace").strip().rpartition("\n")[2]
        print(f"import {module}: {'ok' if ran.returncode == 0 else f'FAILED ({ran.returncode})'} {last}", flush=True)
        good = good and ran.returncode == 0
    return good


def main() -> int:
    """Returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("parts", type=Path, nargs="*")
    parser.add_argument("--import", dest="modules", nargs="+", default=[], metavar="MODULE")
    options = parser.parse_args()
    manifest = json.loads(Path(__file__).with_name("manifest.json").read_text())
    options.site.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        try:
            unpack(part, options.site, manifest["parts"])
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{part.name}: unpacked", flush=True)
    bad = wrong(options.site, manifest["files"])
    print(f"{len(manifest['files']) - len(bad)} of {len(manifest['files'])} files are there and right", flush=True)
    if not options.modules:
        return 0
    if bad:
        print(f"missing or wrong: {', '.join(bad[:5])}", file=sys.stderr)
        return 1
    return 0 if imports(options.modules, options.site) else 1


if __name__ == "__main__":
    sys.exit(main())
