"""Every stage of the Dockerfile, also of images that are built nowhere: that its text can be followed."""

import importlib.util
import json
import re
import subprocess
from dataclasses import dataclass

import pytest
from support.manifests import DEPLOY, ROOT

TARGETS = ("router", "cpu", "cuda", "trtllm")
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "USER", "WORKDIR"}
# What stages make by their commands, for others to copy.
MADE = {"/opt/venv": "-m venv --without-pip /opt/venv", "/wheels": "--directory /wheels"}


@dataclass(frozen=True)
class Stage:
    """Its name, what it is built on, and its instructions."""

    name: str
    base: str
    instructions: tuple[tuple[str, str], ...]

    def of(self, keyword: str) -> list[str]:
        return [words for found, words in self.instructions if found == keyword]


def parsed() -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage with their defaults, and the stages in their order."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, lines)):
        keyword, _, words = line.partition(" ")
        if keyword == "FROM":
            base, _, name = words.partition(" AS ")
            stages[name] = Stage(name, base, ())
        elif not stages:
            argument, _, default = words.partition("=")
            arguments[argument] = default
        else:
            last = next(reversed(stages.values()))
            stages[last.name] = Stage(last.name, last.base, (*last.instructions, (keyword, words.strip())))
    return arguments, stages


ARGUMENTS, STAGES = parsed()


def whole(target: str) -> list[Stage]:
    """A stage, and those that it is built on."""
    found = [STAGES[target]]
    while found[-1].base in STAGES:
        found.append(STAGES[found[-1].base])
    return found


def test_the_targets_are_stages() -> None:
    assert set(TARGETS) <= set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_built_on_an_earlier_one_or_on_an_image_that_is_named(name: str) -> None:
    base = STAGES[name].base
    if base.startswith("${"):
        assert re.fullmatch(r"[a-z0-9./_-]+:[A-Za-z0-9._-]+", ARGUMENTS[base[2:-1]])
    else:
        assert list(STAGES).index(base) < list(STAGES).index(name)


@pytest.mark.parametrize("name", STAGES)
def test_every_instruction_is_one(name: str) -> None:
    assert {keyword for keyword, _ in STAGES[name].instructions} <= KNOWN


@pytest.mark.parametrize("name", STAGES)
def test_what_is_copied_from_another_stage_is_made_there(name: str) -> None:
    for words in STAGES[name].of("COPY"):
        match = re.match(r"--from=(\S+) (.*)", words)
        if match is None:
            continue
        made = " ".join(run for stage in whole(match[1]) for run in stage.of("RUN"))
        for source in match[2].split()[:-1]:
            if found := re.fullmatch(r"/requirements/(\w+)\.txt", source):
                assert re.search(rf"for target in [\w ]*\b{found[1]}\b[\w ]*;", made), source
            else:
                assert MADE[source] in made, source


@pytest.mark.parametrize("name", STAGES)
def test_every_variable_is_an_argument(name: str) -> None:
    declared = {each.partition("=")[0] for stage in whole(name) for each in stage.of("ARG")} | {"PATH", "target"}
    # Those of a shell's loop are without braces; a line's `:+` is what the shell puts there if it is set.
    used = {each for _, words in STAGES[name].instructions for each in re.findall(r"\$\{?([A-Za-z_]\w*)", words)}
    assert used <= declared


@pytest.mark.parametrize("name", STAGES)
def test_every_command_is_a_shells(name: str) -> None:
    for words in STAGES[name].of("RUN"):
        script = re.sub(r"^(--mount=\S+\s+)+", "", words)
        done = subprocess.run(["sh", "-n", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_starts_is_in_it(target: str) -> None:
    stages = whole(target)
    command = json.loads(next(words for stage in stages for words in stage.of("CMD")))
    module, config = command[command.index("-m") + 1 : command.index("-m") + 3]
    assert command[0] == ("python3" if target == "trtllm" else "python")
    assert importlib.util.find_spec(f"{module}.__main__")
    assert (ROOT / config).is_file()
    assert any(words.split()[0] in config for stage in stages for words in stage.of("COPY"))


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_the_same_labels(target: str) -> None:
    labels = " ".join(words for stage in whole(target) for words in stage.of("LABEL"))
    assert set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels)) == {
        "title",
        "licenses",
        "version",
        "revision",
    }


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_listens_where_its_health_check_asks(target: str) -> None:
    stages = whole(target)
    variables = " ".join(words for stage in stages for words in stage.of("ENV"))
    command = json.loads(next(words for stage in stages for words in stage.of("CMD")))
    assert "BATON_ADDRESS=127.0.0.1:7070" in variables
    assert "listen=0.0.0.0:7070" in command
    assert any(words.split()[0] == "7070" for stage in stages for words in stage.of("EXPOSE"))
