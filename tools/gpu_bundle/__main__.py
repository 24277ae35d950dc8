"""Makes a bundle: `python -m tools.gpu_bundle --help`."""

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.gpu_bundle import unpack
from tools.gpu_bundle.parts import Entry, write_parts
from tools.gpu_bundle.recipe import Recipe, read_recipe
from tools.gpu_bundle.symbols import missing, symbols_of_torch
from tools.gpu_bundle.wheels import Chooser, Target, Wheel, read_present


def main() -> int:
    """Returns 1 for a bundle that could not work, and writes nothing then."""
    options = _options()
    try:
        recipe = read_recipe(options.recipe, options.version)
        target = Target(options.python, read_present(options.present))
        options.wheels.mkdir(parents=True, exist_ok=True)
        chooser = Chooser(target, recipe.leave_out, options.wheels, options.pip)
        chosen = chooser.choose([*recipe.requirements, *options.requirement])
        for line in chosen.unmet:
            print(f"note: {line}")
        with tempfile.TemporaryDirectory(dir=options.wheels) as folder:
            entries = [*_unpacked(chosen.wheels, recipe, Path(folder), options.python)]
            if faults := _missing(entries, options.torch_wheel):
                print("\n".join(faults), file=sys.stderr)
                return 1
            names = write_parts(entries, options.arch, options.part_mib << 20, options.output)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    shutil.copy(unpack.__file__, options.output)
    for name in names:
        print(f"{options.output / name}: {(options.output / name).stat().st_size / 2**20:.1f} MiB")
    print(f"on the target: python unpack.py SITE {' '.join(names)} --import {' '.join(recipe.imports)}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bundles an inference engine for a machine without network.")
    parser.add_argument("recipe", help="such as vllm, or a file")
    parser.add_argument("version", help="of the engine")
    parser.add_argument("output", type=Path, help="a folder for the parts")
    parser.add_argument("--present", type=Path, required=True, help="what the target has, as `pip freeze` prints it")
    parser.add_argument("--torch-wheel", type=Path, help="the target's torch; its symbols are compared")
    parser.add_argument("--python", default="3.12", help="the target's version")
    parser.add_argument("--arch", type=int, default=90, help="the GPU's compute capability, such as 90")
    parser.add_argument("--part-mib", type=int, default=48, help="the size of a part")
    parser.add_argument("--wheels", type=Path, default=Path(".wheels"), help="where downloads are kept")
    parser.add_argument("--requirement", action="append", default=[], help="a further package")
    parser.add_argument("--pip", action="append", default=[], help="an option of pip, such as --index-url=URL")
    return parser.parse_args()


def _unpacked(wheels: Sequence[Wheel], recipe: Recipe, folder: Path, python: str) -> Iterator[Entry]:
    """Yields the files of the wheels that the target can load."""
    other = f"cpython-{python.replace('.', '')}-"
    for wheel in wheels:
        with zipfile.ZipFile(wheel.path) as archive:
            for name in archive.namelist():
                if name.endswith("/") or recipe.excludes(name) or (".cpython-" in name and other not in name):
                    continue
                # Of <name>.data, purelib and platlib belong beside the packages, scripts and headers do not.
                place = name.split("/", 2)
                if place[0].endswith(".data"):
                    if place[1] not in ("purelib", "platlib"):
                        continue
                    yield Entry(place[2], Path(archive.extract(name, folder)))
                else:
                    yield Entry(name, Path(archive.extract(name, folder)))


def _missing(entries: Sequence[Entry], torch_wheel: Path | None) -> list[str]:
    if torch_wheel is None:
        print("note: without --torch-wheel no symbols are compared")
        return []
    modules = [(each.name, each.path) for each in entries if each.path.suffix == ".so"]
    return [str(each) for each in missing(modules, symbols_of_torch(torch_wheel))]


if __name__ == "__main__":
    sys.exit(main())
