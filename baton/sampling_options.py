"""The numbers of SamplingParams, one row each, from which façades, clients, CLI, checks and engines derive theirs."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

from google.protobuf.message import Message

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """The rules of an option: it is from `low` to `high`, and above `low` where that is excluded.

    A request that sets the `neutral` value asks for nothing, also of a model whose engine lacks the option, and reports
    it by its name as `unsupported_sampling`; None: no value is neutral.
    """

    help: str
    neutral: float | None
    low: float = 0
    high: float = math.inf
    excludes_low: bool = False
    kserve: tuple[str, ...] = ()  # other names of the parameter there; in OpenAI's API it has the field's
    is_semantic: bool = False  # OpenTelemetry has an attribute for it


class SamplingNumbers(TypedDict, total=False):
    """The options by name, as arguments of both clients. None leaves one unset."""

    temperature: Annotated[float | None, Row("sampling temperature; 0 is greedy", 1.0, is_semantic=True)]
    top_p: Annotated[
        float | None,
        Row(
            "nucleus sampling: sample from the most likely tokens of this total probability",
            1.0,
            high=1,
            excludes_low=True,
            is_semantic=True,
        ),
    ]
    top_k: Annotated[
        int | None, Row("sample from the N most likely tokens; 0 keeps all", 0, high=UINT32, is_semantic=True)
    ]
    min_p: Annotated[float | None, Row("drop tokens less likely than this times the most likely one", 0.0, high=1)]
    repetition_penalty: Annotated[
        float | None, Row("divide logits of tokens seen in the prompt or the answer", 1.0, excludes_low=True)
    ]
    presence_penalty: Annotated[
        float | None, Row("subtract once from the logit of each token in the answer", 0.0, -2, 2, is_semantic=True)
    ]
    frequency_penalty: Annotated[
        float | None, Row("subtract from a token's logit once per occurrence", 0.0, -2, 2, is_semantic=True)
    ]
    seed: Annotated[int | None, Row("seed of the sampler", None, high=UINT64, kserve=("random_seed",))]


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """An option: its field of SamplingParams, the type of its values, and its row."""

    name: str
    kind: type[float] | type[int]
    row: Row

    @property
    def flag(self) -> str:
        """The option of `baton generate`."""
        return f"--{self.name.replace('_', '-')}"

    def problem(self, value: float) -> str:
        """The reason why a value is refused; empty if it is in the range."""
        row = self.row
        if math.isnan(value) or not row.low <= value <= row.high:
            bounds = f"in [{row.low:g}, {row.high:g}]" if row.high < math.inf else f"at least {row.low:g}"
            return f"must be {bounds}, is {value:g}"
        if math.isinf(value):
            return f"must be finite, is {value:g}"
        return f"must be above {row.low:g}" if row.excludes_low and value == row.low else ""


def _options() -> dict[str, SamplingOption]:
    hints: dict[str, Any] = get_type_hints(SamplingNumbers, include_extras=True)
    return {
        name: SamplingOption(name, get_args(hint.__origin__)[0], hint.__metadata__[0]) for name, hint in hints.items()
    }


OPTIONS = _options()


def given(params: Message) -> dict[str, Any]:
    """The values that a SamplingParams has for options, by name."""
    return {field.name: value for field, value in params.ListFields() if field.name in OPTIONS}
