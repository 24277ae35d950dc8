"""The Dockerfile, as far as it can be tried without a Docker engine."""

import re
import runpy
import zipfile
from pathlib import Path

import pytest
from support.manifests import DEPLOY, ROOT

FILE = DEPLOY / "docker" / "Dockerfile"
TEXT = FILE.read_text().replace("\\\n", " ")
TARGETS = ("cpu", "cuda", "trtllm")


def stages() -> dict[str, str]:
    """The instructions of every stage, with those of the stages it is built from."""
    texts: dict[str, str] = {}
    for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S):
        texts[name] = texts.get(base, "") + body
    return texts


@pytest.mark.parametrize("target", TARGETS)
def test_every_image_runs_as_nobody_in_particular(target: str) -> None:
    assert re.findall(r"^USER (.*)$", stages()[target], re.M)[-1] == "10001:10001"


@pytest.mark.parametrize("target", TARGETS)
def test_every_image_has_a_health_check(target: str) -> None:
    assert re.search(r'^HEALTHCHECK .* CMD \["baton", "health"\]$', stages()[target], re.M)


def test_everything_that_is_copied_exists() -> None:
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.M)]
    assert [source for sources in copied for source in sources if not (ROOT / source).exists()] == []


def test_every_package_of_the_wheel_is_copied() -> None:
    packages = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert packages
    for package in re.findall(r'"(\w+)[/"]', packages[1]):
        assert f"COPY {package} {package}" in stages()["build"]


def test_nothing_that_is_copied_is_ignored() -> None:
    lines = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for words in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.M) for source in words.split()[:-1]}
    assert copied == kept


def test_what_the_tensorrt_llm_image_brings_is_not_installed_again(tmp_path: Path) -> None:
    wheel = tmp_path / "baton_serving-0.1.0-py3-none-any.whl"
    metadata = "Name: baton-serving\nRequires-Dist: torch>=2.11\nRequires-Dist: grpcio>=1.81.1\n"
    metadata += "Requires-Dist: pytest; extra == 'dev'\nRequires-Dist: transformers<6,>=5.0\n\nRequires-Dist: prose\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("baton_serving-0.1.0.dist-info/METADATA", metadata)
    script = runpy.run_path(str(DEPLOY / "docker" / "requirements.py"))
    assert script["requirements"](str(wheel)) == ["grpcio>=1.81.1"]
