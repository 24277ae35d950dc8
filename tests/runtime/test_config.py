"""Configuration files and overrides: precedence, and the messages for mistakes."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, SecretStr, field_validator, model_validator
from typing_extensions import Self

from baton.errors import ConfigError
from rpc.auth.tls import TlsConfig
from runtime.config import Loaded, Section, Variables, load


class Retry(Section):
    budget: int = 2
    codes: tuple[str, ...] = ("UNAVAILABLE",)


class Torch(Section):
    kind: Literal["pytorch"]
    model: str
    threads: int = 1


class Simulated(Section):
    kind: Literal["simulated"]
    token_seconds: float = 0.0

    @model_validator(mode="after")
    def _quick(self) -> Self:
        if self.token_seconds > 10:
            raise ValueError("is too slow")
        return self


class Process(Section):
    listen: str
    retry: Retry = Retry()
    engine: Annotated[Torch | Simulated, Field(discriminator="kind")] = Simulated(kind="simulated")
    peers: tuple[Retry, ...] = ()
    password: SecretStr = SecretStr("")
    tls: TlsConfig | None = None
    share: float = 0.5

    @field_validator("share")
    @classmethod
    def _is_a_share(cls, share: float) -> float:
        if not 0 <= share <= 1:
            raise ValueError("is not between 0 and 1")
        return share


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "router.yaml"


def loaded(file: Path, text: str, *overrides: str) -> Loaded[Process]:
    file.write_text(text, encoding="utf-8")
    return load(Process, file, overrides)


def mistake(file: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(file, text, *overrides)
    return caught.value.message


def test_values_come_from_the_file(file: Path) -> None:
    assert loaded(file, "listen: a:1\nretry: {budget: 5}").value == Process(listen="a:1", retry=Retry(budget=5))


def test_an_override_wins_over_the_file(file: Path) -> None:
    assert loaded(file, "listen: a:1\nretry: {budget: 5}", "retry.budget=7").value.retry.budget == 7


def test_an_override_leaves_its_neighbours_alone(file: Path) -> None:
    retry = loaded(file, "listen: a:1\nretry: {budget: 5, codes: [ABORTED]}", "retry.budget=7").value.retry
    assert retry.codes == ("ABORTED",)


def test_the_last_of_two_overrides_wins(file: Path) -> None:
    assert loaded(file, "listen: a:1", "retry.budget=7", "retry.budget=8").value.retry.budget == 8


def test_the_value_of_an_override_is_yaml(file: Path) -> None:
    assert loaded(file, "listen: a:1", "retry.codes=[ABORTED, UNKNOWN]").value.retry.codes == ("ABORTED", "UNKNOWN")


def test_the_value_of_an_override_may_contain_an_equals_sign(file: Path) -> None:
    assert loaded(file, "", "listen=a=b").value.listen == "a=b"


def test_an_override_may_fill_a_section_that_the_file_leaves_empty(file: Path) -> None:
    assert loaded(file, "listen: a:1\nretry:", "retry.budget=3").value.retry.budget == 3


def test_a_configuration_cannot_be_changed(file: Path) -> None:
    value = loaded(file, "listen: a:1").value
    with pytest.raises(ValueError, match="frozen"):
        value.listen = "b:2"


def test_an_unknown_key_is_named_with_its_file_and_the_key_that_was_meant(file: Path) -> None:
    assert mistake(file, "listen: a:1\nretry: {budgett: 5}") == (
        f"{file}: retry.budgett: unknown key (did you mean 'budget'?)"
    )


def test_an_unknown_key_that_resembles_none_is_named_alone(file: Path) -> None:
    assert mistake(file, "listen: a:1\nxyz: 5") == f"{file}: xyz: unknown key"


def test_an_unknown_key_of_an_alternative_is_named_without_its_tag(file: Path) -> None:
    text = "listen: a:1\nengine: {kind: pytorch, model: m, thread: 2}"
    assert mistake(file, text) == f"{file}: engine.thread: unknown key (did you mean 'threads'?)"


def test_a_missing_key_is_named(file: Path) -> None:
    assert mistake(file, "listen: a:1\nengine: {kind: pytorch}") == f"{file}: engine.model: Field required"


def test_an_unknown_alternative_is_named(file: Path) -> None:
    message = mistake(file, "listen: a:1\nengine: {kind: vllm}")
    assert message.startswith(f"{file}: engine: ")
    assert "'pytorch', 'simulated'" in message


def test_a_mistake_of_an_alternative_as_a_whole_is_named_without_its_tag(file: Path) -> None:
    assert mistake(file, "listen: a:1\nengine: {kind: simulated, token_seconds: 11}") == f"{file}: engine: is too slow"


def test_a_mistake_in_a_list_is_named_with_its_place(file: Path) -> None:
    message = mistake(file, "listen: a:1\npeers: [{budget: 1}, {budget: x}]")
    assert message.startswith(f"{file}: peers[1].budget: ")


def test_a_mistake_in_an_override_is_not_blamed_on_the_file(file: Path) -> None:
    assert mistake(file, "listen: a:1", "retry.budgett=5").startswith("override: retry.budgett: unknown key")


def test_a_value_that_a_check_refuses_is_named(file: Path) -> None:
    assert mistake(file, "listen: a:1\nshare: 2") == f"{file}: share: is not between 0 and 1"


def test_every_mistake_is_named_in_one_line(file: Path) -> None:
    message = mistake(file, "retry: {budget: x}\nxyz: 1")
    assert all(key in message for key in ("listen: ", "retry.budget: ", "xyz: "))
    assert "\n" not in message


def test_a_secret_is_not_shown_in_a_mistake(file: Path) -> None:
    assert "hunter2" not in mistake(file, "listen: a:1\npassword: [hunter2]")


@pytest.mark.parametrize("override", ["retry.budget", "=3", "retry..budget=3", "listen.host=a"])
def test_an_override_that_is_none_is_named(file: Path, override: str) -> None:
    assert repr(override) in mistake(file, "listen: a:1", override)


@pytest.mark.parametrize("text", ["listen: [", "- a list", "just text", "listen: a\nlisten: b"])
def test_a_file_that_is_no_configuration_is_named(file: Path, text: str) -> None:
    message = mistake(file, text)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message


def test_a_key_that_comes_twice_is_refused(file: Path) -> None:
    assert "'budget' is given twice" in mistake(file, "listen: a:1\nretry:\n  budget: 1\n  budget: 2")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        load(Process, tmp_path / "missing.yaml")


def test_a_file_that_is_not_text_is_named(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"router\.yaml: is not UTF-8"):
        load(Process, file)


def test_every_value_is_described_with_its_source(file: Path) -> None:
    text = "listen: a:1\nengine: {kind: pytorch, model: demo}\npassword: hunter2"
    assert loaded(file, text, "retry.budget=7", "engine.threads=2").describe() == [
        'listen = "a:1"  # file',
        "retry.budget = 7  # override",
        'retry.codes = ["UNAVAILABLE"]  # default',
        'engine.kind = "pytorch"  # file',
        'engine.model = "demo"  # file',
        "engine.threads = 2  # override",
        "peers = []  # default",
        'password = "**********"  # file',
        "tls = null  # default",
        "share = 0.5  # default",
    ]


def test_a_section_that_is_overridden_as_a_whole_is_an_override_in_all_its_parts(file: Path) -> None:
    sources = loaded(file, "listen: a:1", "engine={kind: simulated}").sources
    assert sources["engine.kind"] == "override"


def test_half_a_pair_of_certificate_and_key_is_refused(file: Path) -> None:
    assert mistake(file, "listen: a:1\ntls: {cert: a.pem}") == f"{file}: tls: cert and key must be given together"


def with_variables(file: Path, text: str, *overrides: str, **variables: str) -> Loaded[Process]:
    file.write_text(text, encoding="utf-8")
    return load(Process, file, overrides, Variables("BATON_X__", {"BATON_X": "0", "HOME": "/", **variables}))


def test_a_variable_goes_before_the_file_and_an_override_before_both(file: Path) -> None:
    text = "listen: a:1\nshare: 0.1\nretry: {budget: 3}"
    found = with_variables(file, text, "share=0.3", BATON_X__SHARE="0.2", BATON_X__RETRY__BUDGET="5")
    assert (found.value.share, found.value.retry.budget, found.value.listen) == (0.3, 5, "a:1")
    assert [found.sources[key] for key in ("share", "retry.budget", "listen", "password")] == [
        *("override", "environment", "file", "default")
    ]
    assert "retry.budget = 5  # environment" in found.describe()


def test_a_variable_of_a_section_is_yaml_and_one_of_its_keys_goes_before_it(file: Path) -> None:
    section = {"BATON_X__RETRY": "{budget: 3, codes: [A]}", "BATON_X__RETRY__BUDGET": "4"}
    found = with_variables(file, "listen: a:1", **section)
    assert found.value.retry == Retry(budget=4, codes=("A",))
    assert with_variables(file, "listen: a:1", "retry={budget: 9}", **section).value.retry == Retry(budget=9)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BATON_X__RETRI__BUDGET", "1", "BATON_X__RETRI__BUDGET: retri: unknown key (did you mean 'retry'?)"),
        ("BATON_X__RETRY__BUGDET", "1", "retry.bugdet: unknown key (did you mean 'budget'?)"),
        ("BATON_X__", "1", "BATON_X__"),
        ("BATON_X__SHARE", "7", "BATON_X__SHARE: share: is not between 0 and 1"),
        ("BATON_X__PEERS__BUDGET", "1", "BATON_X__PEERS__BUDGET: peers has no keys of its own"),
        ("BATON_X__PASSWORD", "'secret", "BATON_X__PASSWORD: password: is not YAML"),
    ],
)
def test_a_wrong_variable_is_named_and_its_value_is_not_shown(file: Path, name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_variables(file, "listen: a:1\npeers: []", **{name: value})
    assert said in error.value.message
    assert "secret" not in error.value.message
