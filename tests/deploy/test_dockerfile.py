"""The Dockerfile's text; tests/containers builds and runs its images."""

import re
import runpy
import sys

import pytest
from support.manifests import DEPLOY, ROOT

FILE = DEPLOY / "docker" / "Dockerfile"
TEXT = FILE.read_text().replace("\\\n", " ")
TARGETS = ("router", "cpu", "cuda", "trtllm")


def stages() -> dict[str, str]:
    """The instructions of every stage, with those of the stages it is built from."""
    texts: dict[str, str] = {}
    for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S):
        texts[name] = texts.get(base, "") + body
    return texts


@pytest.mark.parametrize("target", TARGETS)
def test_every_image_runs_as_an_unprivileged_user(target: str) -> None:
    assert re.findall(r"^USER (.*)$", stages()[target], re.M)[-1] == "10001:10001"


@pytest.mark.parametrize("target", TARGETS)
def test_every_image_has_a_health_check(target: str) -> None:
    assert re.search(r'^HEALTHCHECK .* CMD \["baton", "health"\]$', stages()[target], re.M)


@pytest.mark.parametrize("target", TARGETS)
def test_the_first_process_of_every_image_takes_signals_from_its_start(target: str) -> None:
    entry_points = re.findall(r"^ENTRYPOINT (.*)$", stages()[target], re.M)
    assert entry_points == ['["dumb-init", "--single-child", "--"]']


def copied() -> set[str]:
    return {source for words in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.M) for source in words.split()[:-1]}


def kept() -> set[str]:
    lines = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


def test_everything_that_is_copied_exists() -> None:
    assert [source for source in copied() | kept() if not (ROOT / source).exists()] == []


def test_every_package_of_the_wheel_is_copied() -> None:
    packages = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert packages
    assert set(re.findall(r'"(\w+)[/"]', packages[1])) <= kept()
    assert "COPY . ." in stages()["code"]
    assert "COPY . ." in stages()["router-code"]


def test_nothing_that_is_copied_is_ignored() -> None:
    assert copied() - {"."} <= kept() | {"packaging/client/pyproject.toml", "packaging/http2/pyproject.toml"}


def test_routers_get_the_compiled_wheel_unless_the_argument_is_empty() -> None:
    assert "COPY --from=router-code /opt/venv /opt/venv" in stages()["router"]
    assert "HATCH_BUILD_HOOK_ENABLE_CUSTOM=${COMPILED:+true}" in stages()["router-code"]
    # In each of the two stages: podman's builder has no arguments of the stage before.
    assert re.findall(r"^ARG COMPILED=(.*)$", stages()["router-code"], re.M) == ["1", "1"]


def names(target: str) -> set[str]:
    requirements = runpy.run_path(str(DEPLOY / "docker" / "requirements.py"))["requirements"]
    return {re.split(r"[^A-Za-z0-9._-]", each)[0] for each in requirements(target)}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it runs in the image's Python, and reads TOML")
class TestRequirements:
    @pytest.fixture(autouse=True)
    def _in_the_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)

    def test_a_router_gets_no_torch(self) -> None:
        assert names("cpu") - names("router") == {"numpy", "safetensors", "torch", "transformers"}

    @pytest.mark.parametrize("target", TARGETS)
    def test_every_image_has_the_tables_of_the_command(self, target: str) -> None:
        assert "rich" in names(target)

    def test_what_the_tensorrt_llm_image_brings_is_not_installed_again(self) -> None:
        assert names("cuda") - names("trtllm") >= {"torch", "transformers", "numpy"}
        assert "grpcio" in names("trtllm")

    @pytest.mark.parametrize("target", TARGETS)
    def test_every_image_has_its_first_process(self, target: str) -> None:
        assert "dumb-init" in names(target)

    @pytest.mark.parametrize("target", TARGETS)
    def test_every_image_has_what_openais_api_needs(self, target: str) -> None:
        assert names(target) >= {"uvicorn", "httptools"}

    def test_batons_own_wheels_are_no_requirement(self) -> None:
        assert names("cuda").isdisjoint({"baton-client", "baton-http2"})


@pytest.mark.parametrize("target", TARGETS[:3])
def test_an_image_does_not_change_its_dependencies_with_the_code(target: str) -> None:
    before, _, after = re.split(r"^COPY --from=((?:router-)?code) /opt/venv /opt/venv$", stages()[target], flags=re.M)
    assert "--requirement" in before
    assert "RUN" not in after
    assert not re.search(r"^COPY (\.|baton|router|services|runtime) ", before, re.M)
