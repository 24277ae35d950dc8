"""A recipe: the packages of an engine, and the parts of them that its target does without."""

import fnmatch
from dataclasses import dataclass
from pathlib import Path

import tomllib

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`leave_out` names distributions, `exclude` has patterns of paths in wheels, and `imports` is tried at the end."""

    requirements: tuple[str, ...]
    leave_out: frozenset[str]
    exclude: tuple[str, ...]
    imports: tuple[str, ...]

    def excludes(self, path: str) -> bool:
        """Says of a path inside a wheel that the target does without it."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.exclude)


def read_recipe(name: str, version: str) -> Recipe:
    """Reads a recipe by its name, or from a file. Raises ValueError for one with other keys or other types."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.toml")))
        raise ValueError(f"unknown recipe {name!r}; expected a file or one of {known}")
    found = tomllib.loads(path.read_text())
    keys = {"requirements", "leave_out", "exclude", "imports"}
    if set(found) != keys:
        raise ValueError(f"{path}: expected the keys {', '.join(sorted(keys))}, found {', '.join(sorted(found))}")
    for key, values in found.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{path}: {key} must be a list of texts")
    return Recipe(
        tuple(each.replace("{version}", version) for each in found["requirements"]),
        frozenset(found["leave_out"]),
        tuple(found["exclude"]),
        tuple(found["imports"]),
    )
