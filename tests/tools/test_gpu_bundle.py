"""tools/gpu_bundle: what reaches a machine without network is what was chosen, and it is right."""

import io
import json
import lzma
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version

pytest.importorskip("tomllib", reason="the tool needs Python 3.11")

from tools.gpu_bundle.cuda import only_for, regions
from tools.gpu_bundle.parts import Entry, write_parts
from tools.gpu_bundle.recipe import read_recipe
from tools.gpu_bundle.symbols import missing
from tools.gpu_bundle.wheels import Chooser, Target, read_present

ROOT = Path(__file__).resolve().parents[2]
UNPACK = ROOT / "tools" / "gpu_bundle" / "unpack.py"


def _wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), **files: str) -> Path:
    about = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    contents = {f"{about}/METADATA": "\n".join(lines) + "\n", f"{about}/WHEEL": "Wheel-Version: 1.0\n"}
    contents |= {
        f"{name}/{file}.py": text for file, text in ({"__init__": f"__version__ = '{version}'\n"} | files).items()
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in contents.items():
            archive.writestr(file, text)
    return path


def _entry(architecture: int, payload: bytes, kind: int = 2) -> bytes:
    header = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(payload), architecture)
    return header.ljust(64, b"\0") + payload


def _region(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_machine_code_of_other_gpus_becomes_zeros() -> None:
    module = b"before" + _region(_entry(80, b"a" * 24), _entry(90, b"b" * 24), _entry(90, b"p" * 8, kind=1)) + b"after"
    kept = only_for(module, 90)
    assert len(kept) == len(module)
    assert (b"a" * 24 in kept, b"b" * 24 in kept, b"p" * 8 in kept) == (False, True, False)
    assert kept.startswith(b"before")
    assert kept.endswith(b"after")
    assert [[code.architecture for code in region] for region in regions(kept)] == [[80, 90, 90]]


def test_ptx_stays_where_a_region_has_no_machine_code_for_the_gpu() -> None:
    module = _region(_entry(80, b"a" * 24), _entry(80, b"p" * 24, kind=1), _entry(100, b"q" * 24, kind=1))
    kept = only_for(module, 90)
    assert (b"a" * 24 in kept, b"p" * 24 in kept, b"q" * 24 in kept) == (False, True, False)


def test_machine_code_of_the_same_major_version_stays_if_it_is_the_best() -> None:
    module = _region(_entry(80, b"a" * 24), _entry(89, b"b" * 24))
    assert only_for(module, 86) != module
    assert b"a" * 24 in only_for(module, 86)
    assert b"b" * 24 not in only_for(module, 86)


def test_a_region_of_another_layout_stays_as_it_is() -> None:
    module = _region(_entry(80, b"a" * 24, kind=9))
    assert only_for(module, 90) == module


def _chosen(folder: Path, present: Mapping[str, Version | None], *requirements: str) -> tuple[list[str], list[str]]:
    index = ("--no-index", f"--find-links={folder}")
    (folder / "cache").mkdir()
    found = Chooser(Target("3.12", present), ["left"], folder / "cache", index).choose(requirements)
    return sorted(each.name for each in found.wheels), list(found.unmet)


def test_what_the_target_lacks_is_bundled_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    needs = ("needed>=1", "there>=2", "left", 'other; python_version < "3.12"', 'more; extra == "x"')
    _wheel(tmp_path, "engine", "1.0", needs)
    _wheel(tmp_path, "needed", "1.5")
    names, unmet = _chosen(tmp_path, {"there": Version("1.0")}, "engine==1.0")
    assert names == ["engine", "needed"]
    assert unmet == ["engine requires left, which is left out", "engine requires there>=2; it gets 1.0"]


def test_a_requirement_of_the_recipe_is_bundled_though_the_target_has_it(tmp_path: Path) -> None:
    _wheel(tmp_path, "engine", "1.0", ("there",))
    _wheel(tmp_path, "there", "2.0")
    assert _chosen(tmp_path, {"there": None}, "engine", "there==2.0") == (["engine", "there"], [])


def test_a_package_that_no_index_has_is_named(tmp_path: Path) -> None:
    _wheel(tmp_path, "engine", "1.0", ("nowhere==3",))
    with pytest.raises(ValueError, match=r"pip finds no wheel of nowhere==3 for Python 3\.12"):
        _chosen(tmp_path, {}, "engine")


def test_versions_are_read_as_pip_freeze_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "present.txt"
    file.write_text("torch==2.11.0+cu130\n# a note\nFlask_Thing @ file:///x\nnumpy\n")
    assert read_present(file) == {"torch": Version("2.11.0+cu130"), "flask-thing": None, "numpy": None}


def test_a_module_that_needs_symbols_of_another_torch_is_named(tmp_path: Path) -> None:
    source, module = tmp_path / "m.c", tmp_path / "m.so"
    source.write_text("void aoti_torch_new(void); void puts_(void); void f(void) { aoti_torch_new(); puts_(); }")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", module, source], check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    assert missing([("x/m.so", module)], frozenset({"aoti_torch_new"})) == []
    assert [str(each) for each in missing([("x/m.so", module)], frozenset({"aoti_torch_old"}))] == [
        "x/m.so needs 1 symbols that torch does not have: aoti_torch_new"
    ]


def _bundle(folder: Path, limit: int = 1 << 20) -> tuple[Path, list[str]]:
    files = {
        "good/__init__.py": "__version__ = '7'\n",
        "bad/__init__.py": "import nothing_of_this_name\n",
        "good/program": "#!/bin/sh",
    }
    entries = []
    for name, text in files.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        entries.append(Entry(name, path))
    noise = folder / "files" / "good" / "module.so"
    noise.write_bytes(_region(_entry(80, b"a" * 5000), _entry(90, b"b" * 5000)))
    entries.append(Entry("good/module.so", noise))
    names = write_parts(entries, 90, limit, folder / "parts")
    (folder / "parts" / "unpack.py").write_text(UNPACK.read_text())
    return folder / "parts", names


def _unpacked(parts: Path, site: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "unpack.py", str(site), *arguments]
    return subprocess.run(command, cwd=parts, capture_output=True, text=True, timeout=60)


def test_parts_are_unpacked_one_by_one_compared_and_imported(tmp_path: Path) -> None:
    parts, names = _bundle(tmp_path, limit=300)
    assert len(names) > 1
    assert all((parts / name).stat().st_size <= 300 for name in names)
    first = _unpacked(parts, tmp_path / "site", names[0])
    assert first.returncode == 0
    assert "of 4 files are there and right" in first.stdout
    early = _unpacked(parts, tmp_path / "site", "--import", "good")
    assert (early.returncode, "missing or wrong" in early.stderr) == (1, True)
    last = _unpacked(parts, tmp_path / "site", *names[1:], "--import", "good")
    assert last.returncode == 0, last.stderr
    assert "4 of 4 files are there and right" in last.stdout
    assert "import good: ok 7" in last.stdout
    assert (tmp_path / "site" / "good" / "module.so").read_bytes().count(b"a") == 0
    assert (tmp_path / "site" / "good" / "program").stat().st_mode & 0o111


def test_a_module_that_does_not_load_fails_the_verification(tmp_path: Path) -> None:
    parts, names = _bundle(tmp_path)
    ran = _unpacked(parts, tmp_path / "site", *names, "--import", "good", "bad")
    assert ran.returncode == 1
    assert "import bad: FAILED (1) ModuleNotFoundError: No module named 'nothing_of_this_name'" in ran.stdout


def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    parts, names = _bundle(tmp_path)
    damaged = bytearray((parts / names[0]).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (parts / names[0]).write_bytes(damaged)
    ran = _unpacked(parts, tmp_path / "site", names[0])
    assert ran.returncode == 1
    assert "is not the part of manifest.json" in ran.stderr
    assert not (tmp_path / "site" / "good").exists()


def test_a_file_that_fits_no_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"good/__init__\.py: \d+ bytes packed, over 50 of a part"):
        _bundle(tmp_path, limit=50)


def test_parts_are_plain_tar_files_in_xz(tmp_path: Path) -> None:
    parts, names = _bundle(tmp_path)
    content = lzma.decompress((parts / names[0]).read_bytes())
    with tarfile.open(fileobj=io.BytesIO(content), ignore_zeros=True) as archive:
        assert sorted(archive.getnames()) == sorted(json.loads((parts / "manifest.json").read_text())["files"])


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_recipes_are_complete(name: str) -> None:
    recipe = read_recipe(name, "9.9")
    assert f"{name}==9.9" in recipe.requirements
    assert "torch" in recipe.leave_out
    assert name in recipe.imports


def test_a_recipe_with_another_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('requirements = []\nleave_out = []\nexclude = []\nimports = []\nexcludes = ["x"]\n')
    with pytest.raises(ValueError, match="expected the keys exclude, imports, leave_out, requirements"):
        read_recipe(str(file), "1")


def test_an_unknown_recipe_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'tgi'; expected a file or one of sglang, vllm"):
        read_recipe("tgi", "1")
