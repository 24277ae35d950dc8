"""Counts the structure of the product: `python -m tools.structure`, in the repository's root.

Lines and files, rooms that import each other in circles, files that do, Protocols with one implementation, docstrings
without their subject first, and the files to read to change a token's, a request's or a handoff's path
(tools/reading_lists.yaml).
Reads the source with `ast` and runs nothing of it; imports under TYPE_CHECKING count.
"""

import argparse
import ast
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "baton",
    "baton_http2",
    "runtime",
    "rpc",
    "engine_protocol",
    "discovery",
    "grammars",
    "media",
    "services",
    "router",
    "cli",
    "devtools",
)
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
# The folders of tests and programs around the product, whose docstrings count too.
AROUND = ("tests", "benchmarks", "tools", "examples", "packaging", "deploy", "models")
BUILT = {"build", "node_modules"}  # by the clients of examples/, with others' packages
# Packages whose folders are rooms of their own.
ROOMS = ("router", "services", "rpc", "baton_http2")
SHORT_LINES = 40
# A docstring that begins with a clause instead of its subject, or that only points elsewhere.
CLAUSE = re.compile(
    r"^(What|Whether|Who|Whom|Whose|How|Why|When|Where|While|Until|If|As|Since|Because|Although|See|Does nothing)\b"
)

Graph = Mapping[str, set[str]]
Statement = ast.Module | ast.stmt | ast.ExceptHandler | ast.match_case


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: its dotted name, its tree and its number of lines."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        """Its import statements, at every depth."""
        return (node for node in statements(self.tree) if isinstance(node, ast.Import | ast.ImportFrom))


def main() -> None:
    """Prints one line a figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout, to compare with")
    parser.add_argument("--list", action="store_true", help="also print the circles and the docstrings")
    options = parser.parse_args()
    modules = read(options.root)
    around = read(options.root, AROUND)
    others = {name: each for name, each in around.items() if name.startswith(("tests", "examples"))}
    parts = (sizes(modules), circles(modules, options.list), protocols(modules, others, options.list))
    for line in (line for part in (*parts, docstrings(modules | around, options.list)) for line in part):
        print(line)
    for line in reading(options.root):
        print(line)


def read(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, Module]:
    """The product's modules by name, or those of other folders, without generated ones."""
    gc.disable()  # trees are no garbage, and the collector would look at all of them again and again
    try:
        paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
        modules = [
            _parsed(path, path.relative_to(root))
            for path in paths
            if not GENERATED.search(path.name) and not BUILT & {*path.relative_to(root).parts}
        ]
        return {module.name: module for module in modules}
    finally:
        gc.enable()


def _parsed(path: Path, relative: Path) -> Module:
    text = path.read_text()
    name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    return Module(name, path, ast.parse(text), len(text.splitlines()))


def statements(tree: ast.Module) -> Iterator[Statement]:
    """The tree and its statements at every depth, without their expressions, which are most of a tree."""
    waiting: list[Statement] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            waiting += getattr(node, field, ())


def sizes(modules: Mapping[str, Module]) -> Iterator[str]:
    """Lines, files, and files so short that they belong with a neighbour."""
    files = [each for each in modules.values() if each.path.name != "__init__.py"]
    yield f"product lines: {sum(each.lines for each in modules.values())} in {len(modules)} files"
    yield f"files under {SHORT_LINES} lines: {sum(each.lines < SHORT_LINES for each in files)}"
    yield f"class names that a package has twice: {len(repeated_class_names(modules))}"


def repeated_class_names(modules: Mapping[str, Module]) -> list[str]:
    """The public classes, as `package.Class`, of which a package has several with one name."""
    names = Counter(
        f"{each.name.partition('.')[0]}.{node.name}"
        for each in modules.values()
        for node in each.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def circles(modules: Mapping[str, Module], shows: bool) -> Iterator[str]:
    """Circles of imports among the rooms of each package, and among files."""
    imports = {name: imported(module, modules) for name, module in modules.items()}
    for package in ROOMS:
        rooms = room_graph(imports, package)
        found = components(rooms)
        yield f"rooms of {package} in circles: {sum(map(len, found))} of {len(rooms)}"
        if shows:
            yield from (f"    {' <-> '.join(sorted(each))}" for each in found)
    found = components(imports)
    yield f"circles of files: {len(found)}"
    if shows:
        yield from (f"    {' <-> '.join(sorted(each))}" for each in found)


def imported(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The product's modules that one imports; a package's `__init__` counts only where nothing below it is meant."""
    found = set()
    for node in module.imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = below & set(modules)
            found |= inside or ({node.module} & set(modules))
    return found - {module.name}


def room_graph(imports: Graph, package: str) -> dict[str, set[str]]:
    """The folders right below a package, and which of them import which. Files beside the folders are no rooms."""
    graph: dict[str, set[str]] = {}
    for name, others in imports.items():
        parts = name.split(".")
        if parts[0] != package or len(parts) < 3:
            continue
        rooms = {other.split(".")[1] for other in others if other.startswith(f"{package}.") and other.count(".") > 1}
        graph.setdefault(parts[1], set()).update(rooms - {parts[1]})
    return graph


def components(graph: Graph) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm, without recursion)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for start in graph:
        if start in order:
            continue
        order[start] = low[start] = len(order)
        stack.append(start)
        work = [(start, iter(sorted(graph[start])))]
        while work:
            node, others = work[-1]
            below = next((each for each in others if each in graph), None)
            if below is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    cut = stack.index(node)
                    found.append(set(stack[cut:]))
                    del stack[cut:]
            elif below not in order:
                order[below] = low[below] = len(order)
                stack.append(below)
                work.append((below, iter(sorted(graph[below]))))
            elif below in stack:
                low[node] = min(low[node], order[below])
    return [each for each in found if len(each) > 1]


def protocols(modules: Mapping[str, Module], others: Mapping[str, Module], shows: bool) -> Iterator[str]:
    """Protocols that a single class of the product has the members of: a seam without a second side.

    Counted apart are those of a module that docs/extending.md names, those that a class of `others` (tests and
    examples) has the members of, too, and those whose users cannot import the class without a circle.
    """
    own, elsewhere, plugs = Classes.of(modules), Classes.of(others), (ROOT / "docs" / "extending.md").read_text()
    seams = [(module, node) for module, node in own.nodes if node.name in own.protocols]
    imports = {name: imported(module, modules) for name, module in modules.items()}
    found: dict[str, list[str]] = {"without a reason": [], "plugs": [], "others in tests": [], "a circle otherwise": []}
    for module, seam in seams:
        having = own.having(members_of(seam))
        if len(having) != 1:
            continue
        place, name = having[0]
        reason = "without a reason"
        if module.replace(".", "/") + ".py" in plugs:
            reason = "plugs"
        elif elsewhere.having(members_of(seam)):
            reason = "others in tests"
        elif users(seam.name, module, modules) & reachable(place, imports):
            reason = "a circle otherwise"
        found[reason].append(f"    {module}.{seam.name}: {name} ({reason})")
    counts = ", ".join(f"{len(lines)} {reason}" for reason, lines in found.items())
    yield f"Protocols with one implementation, of {len(seams)}: {counts}"
    if shows:
        yield from (line for lines in found.values() for line in lines)


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes with their modules, the names of the Protocols among them, and each name's members with its bases'."""

    nodes: Sequence[tuple[str, ast.ClassDef]]
    protocols: frozenset[str]
    members: Mapping[str, set[str]]

    @classmethod
    def of(cls, modules: Mapping[str, Module]) -> "Classes":
        nodes = [
            (each.name, node)
            for each in modules.values()
            for node in statements(each.tree)
            if isinstance(node, ast.ClassDef)
        ]
        bases = {node.name: set(map(name_of, node.bases)) for _, node in nodes}
        members = {node.name: members_of(node) for _, node in nodes}
        protocols = frozenset(name for name, above in bases.items() if "Protocol" in above)
        return cls(nodes, protocols, {name: inherited(name, members, bases) for name in members})

    def having(self, wanted: set[str]) -> list[tuple[str, str]]:
        """The modules and names of the classes that have these members and are no Protocols."""
        return [
            (module, node.name)
            for module, node in self.nodes
            if node.name not in self.protocols and wanted <= self.members[node.name]
        ]


def users(seam: str, module: str, modules: Mapping[str, Module]) -> set[str]:
    """The modules that name a Protocol, the one that defines it among them."""
    naming = {
        each.name
        for each in modules.values()
        if any(isinstance(node, ast.ImportFrom) and node.module == module for node in each.imports)
        and any(alias.name == seam for node in each.imports for alias in node.names)
    }
    return naming | {module}


def reachable(start: str, imports: Graph) -> set[str]:
    """All modules that one imports, directly or through others."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def name_of(base: ast.expr) -> str:
    """A base class's last name, without its parameters."""
    plain = base.value if isinstance(base, ast.Subscript) else base
    return (
        plain.attr
        if isinstance(plain, ast.Attribute) and name_of(plain.value) == "typing"
        else getattr(plain, "id", "")
    )


def members_of(node: ast.ClassDef) -> set[str]:
    """The names of a class: methods, fields, and whatever its methods assign to `self`."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for each in ast.walk(node):
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found - {"__init__", "__slots__"}


def inherited(name: str, members: Mapping[str, set[str]], bases: Graph) -> set[str]:
    """The members of a class, with those of its bases in the product."""
    return members[name].union(*(inherited(base, members, bases) for base in bases[name] if base in members))


def docstrings(modules: Mapping[str, Module], shows: bool) -> Iterator[str]:
    """Counts docstrings, and those that begin with a clause or only point elsewhere."""
    total, wrong = clause_first(modules)
    yield f"docstrings that begin with a clause or point elsewhere: {len(wrong)} of {total}"
    if shows:
        yield from (f"    {each}" for each in wrong)


def clause_first(modules: Mapping[str, Module]) -> tuple[int, list[str]]:
    """The number of docstrings, and a line for each that begins with a clause or only points elsewhere."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    total, wrong = 0, []
    for module in modules.values():
        for node in statements(module.tree):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            total += text is not None
            if text and CLAUSE.match(text):
                wrong.append(f"{module.name}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    return total, wrong


def reading(root: Path) -> Iterator[str]:
    """Files and lines of each reading list that the checkout has; a list is for the checkout that it stands in."""
    path = root / "tools" / "reading_lists.yaml"
    lists: Mapping[str, Iterable[str]] = yaml.safe_load(path.read_text()) if path.exists() else {}
    for purpose, names in lists.items():
        files = [root / name for name in names]
        lines = sum(len(each.read_text().splitlines()) for each in files)
        yield f"to read, to change {purpose}: {len(files)} files, {lines} lines"


if __name__ == "__main__":
    main()
