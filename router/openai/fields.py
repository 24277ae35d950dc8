"""Fields that the endpoints share. Unknown fields are refused, and so are values that would have to be ignored."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from baton.errors import FieldViolation, InvalidRequest
from baton.inference.v1 import generate_pb2
from baton.sampling_options import OPTIONS
from grammars.guide import MAX_TEXT_BYTES
from router.openai.errors import FieldNames, UnsupportedField
from router.text.json_values import WrongValue, load_unique_json
from runtime.threads import let_others_run

_UINT32 = 2**32 - 1
_MAX_VIOLATIONS = 16
_MAX_NAMED_ERRORS = 1024  # of more, each costs time to be described
_MOST_FIELDS = 256  # of one object: no class has as many, and each unknown one is an error
_HALF_HOUR, _DAY = 1800, 86_400  # in seconds
_LONGEST_NAME = 80  # of a field in an error
Uint32 = Annotated[int, Field(ge=0, le=_UINT32)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
_PART_TYPES = frozenset(
    ("text", "input_text", "output_text", "image_url", "input_image", "image", "thinking", "tool_use", "tool_result")
)
# The alternatives of fields that are one of several objects.
_ALTERNATIVES: Mapping[int | str, frozenset[str]] = {
    "source": frozenset(("base64", "url")),
    "tool_choice": frozenset(("auto", "any", "tool", "none")),
    "thinking": frozenset(("enabled", "adaptive", "disabled")),
}
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]

ANY_OBJECT = '{"type": "object"}'

Body = TypeVar("Body", bound=BaseModel)


def _failing_fast(schema: Any) -> Any:
    match schema:
        case {"type": "dict", "values_schema": {"type": kind} as values} if kind != "any":
            checked = core_schema.no_info_before_validator_function(let_others_run, _failing_fast(values))
            return {**schema, "values_schema": checked}
        case {"type": "list", "items_schema": {"type": "list"} as items}:
            checked = core_schema.no_info_before_validator_function(let_others_run, _failing_fast(items))
            return {**schema, "items_schema": checked, "fail_fast": True}
        case dict():
            inner = {name: _failing_fast(value) for name, value in schema.items()}
            return {**inner, "fail_fast": True} if schema.get("type") == "list" else inner
        case list():
            return [_failing_fast(value) for value in schema]
    return schema


class Fields(BaseModel):
    """An object of OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Lists are read up to their first wrong element: 60,000 errors hold the interpreter for half a second."""
        return _failing_fast(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        """Refuses an object with too many fields before each is an error. Lets others run, as pydantic does not."""
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            text = "has {count} fields of at most {most}"
            raise PydanticCustomError("too_many_fields", text, {"count": len(value), "most": _MOST_FIELDS})
        return let_others_run(value)


def read(kind: type[Body], value: Any, within: str = "") -> Body:
    """The body, or what a field of it holds, as one of the classes. Raises InvalidRequest naming each wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        if (count := error.error_count()) > _MAX_NAMED_ERRORS:
            raise InvalidRequest.of(within or "body", f"has {count} wrong or unknown fields") from None
        found = error.errors(include_url=False, include_context=False, include_input=False)
        # Of the alternatives of a field, the one that fits best fails deepest.
        found = sorted(found, key=lambda one: -len(one["loc"]))[:_MAX_VIOLATIONS]
        raise InvalidRequest([FieldViolation(_path(one["loc"], within), one["msg"]) for one in found]) from None


def _path(location: tuple[int | str, ...], path: str = "") -> str:
    for before, part in zip(("", *location), location, strict=False):
        # Pydantic names the alternatives of a union too; they are no fields.
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in (_PART_TYPES if isinstance(before, int) else _ALTERNATIVES.get(before, frozenset())):
            continue
        elif part.isidentifier() and part not in ("str", "list", "int", "dict") and not part[0].isupper():
            path += f".{part[:_LONGEST_NAME]}" if path else part[:_LONGEST_NAME]
    return path or "body"


def _require_true(value: bool) -> bool:
    if not value:
        raise PydanticCustomError("only_true", "must be true")
    return value


def _require_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "must be false")
    return value


# A Literal would take 0 and 1, too.
OnlyTrue = Annotated[bool, AfterValidator(_require_true)]
OnlyFalse = Annotated[bool, AfterValidator(_require_false)]


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool = False
    keep_seconds: Number | None = None  # how long the stream goes on without its client; also the header x-baton-keep
    include_obfuscation: OnlyFalse | None = None


class StructuralTag(Fields):
    """A part of an answer that is JSON of a schema, between two texts."""

    begin: str
    json_schema: dict[str, Any] = Field(alias="schema")
    end: str


class StructuralTags(Fields):
    """Text in which what follows a trigger is one of the tags, in the form that vLLM and SGLang have."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[StructuralTag]
    triggers: list[str]

    def set_in(self, request: generate_pb2.GenerateRequest, field: str) -> None:
        """Raises InvalidRequest for a tag that begins with none of the triggers."""
        request.guided.structural_tags.SetInParent()
        for index, tag in enumerate(self.structures):
            trigger = next((one for one in self.triggers if one and tag.begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequest.of(f"{field}.structures[{index}].begin", "begins with none of the triggers")
            schema = json_text(tag.json_schema, f"{field}.structures[{index}].schema")
            request.guided.structural_tags.tags.add(begin=tag.begin, json_schema=schema, end=tag.end, trigger=trigger)


class StructuredOutputs(Fields):
    """`structured_outputs`: what the answer follows, as in vLLM. One of its fields is set."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: OnlyTrue | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: StructuralTags | str | None = None

    @property
    def field(self) -> str:
        """The path of the one that is set. Raises InvalidRequest unless it is one."""
        named = {one.alias or name: getattr(self, name) for name, one in type(self).model_fields.items()}
        found = [name for name, value in named.items() if value is not None]
        if len(found) != 1:
            names = ", ".join(named)
            raise InvalidRequest.of("structured_outputs", f"has {len(found)} fields; give one of {names}")
        return f"structured_outputs.{found[0]}"

    def set_in(self, request: generate_pb2.GenerateRequest) -> None:
        """Sets the grammar of a request. Raises InvalidRequest."""
        field = self.field
        if self.json_object:
            request.guided.json_schema = ANY_OBJECT
        elif self.json_schema is not None:
            schema = self.json_schema
            request.guided.json_schema = schema if isinstance(schema, str) else json_text(schema, field)
        elif self.regex is not None:
            request.guided.regex = self.regex
        elif self.grammar is not None:
            request.guided.grammar = self.grammar
        elif self.choice is not None:
            request.guided.choice.texts.extend(self.choice)
            request.guided.choice.SetInParent()
        elif self.structural_tag is not None:
            self._tags(field).set_in(request, field)

    def _tags(self, field: str) -> StructuralTags:
        if isinstance(self.structural_tag, StructuralTags):
            return self.structural_tag
        text = self.structural_tag or ""
        if len(text) > MAX_TEXT_BYTES:
            raise InvalidRequest.of(field, f"has {len(text)} characters of at most {MAX_TEXT_BYTES}")
        try:
            return read(StructuralTags, load_unique_json(text), field)
        except WrongValue as error:
            raise InvalidRequest.of(f"{field}.{error.path}", error.problem) from None
        except (ValueError, RecursionError):
            raise InvalidRequest.of(field, "is not JSON") from None


# Of options that take more values here than in a request: their type, and what a request has for a value.
_TYPES: Mapping[str, Any] = {
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**64)],
    "top_k": Annotated[int, Field(ge=-1, le=_UINT32)],
}
_READ: Mapping[str, Callable[[int], int]] = {
    "seed": lambda seed: seed % 2**64,
    "top_k": lambda top_k: max(0, top_k),  # vLLM's -1 keeps all
}

if TYPE_CHECKING:
    OptionFields = Fields
else:
    OptionFields = create_model(
        "OptionFields",
        __base__=Fields,
        **{
            one.name: (_TYPES.get(one.name, Number if one.kind is float else Uint32) | None, None)
            for one in OPTIONS.values()
        },
    )


class CacheOptions(Fields):
    """`prompt_cache_options`."""

    mode: Literal["implicit"] | None = None
    ttl: Literal["30m"] | None = None


class RetainFields(Fields):
    """`baton.retain`."""

    ttl: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    prompt_tokens: Uint32 = 0


class BatonFields(Fields):
    """`baton`: CacheOptions of gRPC's API. Durations are in seconds."""

    retain: RetainFields | None = None
    end_session: bool = False
    parent_session: str = ""
    next_in: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None

    def set_in(self, cache: generate_pb2.CacheOptions) -> None:
        """Sets the same options."""
        cache.ends_session, cache.parent_session = self.end_session, self.parent_session
        if self.next_in is not None:
            cache.next_in.FromNanoseconds(round(self.next_in * 1e9))
        if self.retain is not None:
            retain = self.retain
            cache.retain.ttl.FromNanoseconds(max(1, round(retain.ttl * 1e9)))
            cache.retain.priority, cache.retain.prompt_tokens = retain.priority, retain.prompt_tokens


class CacheFields(Fields):
    """The caching of prompts. `baton` is a field that OpenAI's API does not have."""

    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    baton: BatonFields | None = None

    def set_cache(self, made: generate_pb2.GenerateRequest) -> None:
        """Sets the session, and the part of the prompt to retain, and for how long."""
        made.routing.session_key = self.prompt_cache_key or ""
        if self.prompt_cache_options is not None and self.prompt_cache_options.ttl is not None:
            made.cache.retain.ttl.FromSeconds(_HALF_HOUR)
        if self.prompt_cache_retention == "24h":
            made.cache.retain.ttl.FromSeconds(_DAY)
        if self.baton is not None:
            self.baton.set_in(made.cache)


class SamplingFields(CacheFields, OptionFields):
    """Sampling and length. The second half are fields that OpenAI's API does not have, as in vLLM."""

    model: str = Field(default="", max_length=1024)
    n: Uint32 | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[TokenId, Number] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # They change nothing here, or only for whom the request is counted.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None

    min_tokens: Uint32 | None = None
    stop_token_ids: list[Uint32] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def names(self) -> FieldNames:
        """The names that the body has for fields of the request."""
        return FieldNames(self.structured_outputs.field if self.structured_outputs else "")

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def request(self, request_id: str) -> generate_pb2.GenerateRequest:
        """A request with these fields, and without input."""
        made = generate_pb2.GenerateRequest(request_id=request_id, model=self.model)
        for name in OPTIONS:
            if (value := getattr(self, name)) is not None:
                setattr(made.sampling, name, _READ[name](value) if name in _READ else value)
        _copy(self, made.sampling, "n")
        for token_id, bias in (self.logit_bias or {}).items():
            made.sampling.logit_bias[int(token_id)] = bias
        made.sampling.bad_words.extend(self.bad_words or [])
        made.stopping.stop.extend([self.stop] if isinstance(self.stop, str) else self.stop or [])
        made.stopping.stop_token_ids.extend(self.stop_token_ids or [])
        _copy(self, made.stopping, "min_tokens", "ignore_eos")
        if self.include_stop_str_in_output is not None:
            made.stopping.include_stop = self.include_stop_str_in_output
        if self.skip_special_tokens is not None:
            made.response.keep_special_tokens = not self.skip_special_tokens
        self.set_cache(made)
        made.routing.cache_salt = self.cache_salt or ""
        if self.structured_outputs is not None:
            self.structured_outputs.set_in(made)
        return made


def json_text(value: object, field: str) -> str:
    """The JSON of a value. Raises InvalidRequest, of the field."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest.of(field, "is nested too deeply") from None


def _copy(fields: SamplingFields, message: Any, *names: str) -> None:
    for name in names:
        value = getattr(fields, name)
        if value is not None:
            setattr(message, name, value)


def refuse(field: str, why: str) -> UnsupportedField:
    """The error for a field that this API has, and Baton has not."""
    return UnsupportedField(field, why)
