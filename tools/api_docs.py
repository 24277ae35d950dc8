"""Writes docs/api.md from the comments of the public protos: `python tools/api_docs.py [OUT]`.

A field's documentation is its comment in the proto; a field without a comment has none on the page.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
PACKAGE = "baton/inference/v1"
OUT = ROOT / "docs" / "api.md"

HEAD = """# The public API

Generated from `protos/baton/inference/v1` by `make docs`; do not edit. Errors are in [errors.md](errors.md). Through
Envoy the same methods are available as JSON, at the paths in `deploy/envoy/http_rules.yaml`.
"""

# The field numbers in descriptor.proto by which protoc addresses comments.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _METHODS, _VALUES = 2, 3, 2, 2


@dataclass(frozen=True, slots=True)
class Source:
    """A file and its comments by location."""

    file: FileDescriptorProto
    comments: Mapping[tuple[int, ...], str]

    def comment(self, *place: int) -> str:
        """On one line; empty if there is none."""
        return self.comments.get(place, "")


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=OUT, metavar="OUT", help="default: docs/api.md")
    parser.parse_args().out.write_text(page())


def page() -> str:
    """The whole page: services first, then messages and enums by name."""
    sources = [source for source in _sources() if source.file.name.startswith(PACKAGE)]
    services = [part for source in sources for part in _services(source)]
    types = sorted(part for source in sources for part in _types(source))
    return "\n".join([HEAD, *services, "## Messages and enums\n", *types])


def _sources() -> list[Source]:
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out.name}", *files], check=True, timeout=60)
        descriptors = FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return [Source(file, _comments(file)) for file in descriptors.file]


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    locations = file.source_code_info.location
    return {tuple(each.path): " ".join((each.leading_comments or each.trailing_comments).split()) for each in locations}


def _services(source: Source) -> Iterator[str]:
    for index, service in enumerate(source.file.service):
        text = source.comment(_SERVICES, index)
        yield f"## {service.name}\n\n{text}\n\n{_methods(source, index, service)}"


def _methods(source: Source, index: int, service: ServiceDescriptorProto) -> str:
    rows = ["| method | request | response | |", "|---|---|---|---|"]
    for number, method in enumerate(service.method):
        answer = f"{'stream of ' if method.server_streaming else ''}{_link(method.output_type)}"
        text = source.comment(_SERVICES, index, _METHODS, number)
        rows.append(f"| `{method.name}` | {_link(method.input_type)} | {answer} | {text} |")
    return "\n".join(rows) + "\n"


def _types(source: Source) -> Iterator[str]:
    for index, message in enumerate(source.file.message_type):
        yield _message(source, message, (_MESSAGES, index))
    for index, enum in enumerate(source.file.enum_type):
        yield _enum(source, enum, (_ENUMS, index))


def _message(source: Source, message: DescriptorProto, place: tuple[int, ...]) -> str:
    text = [f"### {message.name}\n", *_paragraph(source.comment(*place))]
    if not message.field:
        return "\n".join([*text, "Empty.\n"])
    rows = ["| field | type | |", "|---|---|---|"]
    for number, field in enumerate(message.field):
        comment = source.comment(*place, _FIELDS, number)
        rows.append(
            f"| `{field.name}` = {field.number} | {_type(message, field)} | {_of_oneof(message, field)}{comment} |"
        )
    return "\n".join([*text, *rows, ""])


def _enum(source: Source, enum: EnumDescriptorProto, place: tuple[int, ...]) -> str:
    rows = ["| value | |", "|---|---|"]
    for number, value in enumerate(enum.value):
        rows.append(f"| `{value.name}` = {value.number} | {source.comment(*place, _VALUES, number)} |")
    return "\n".join([f"### {enum.name}\n", *_paragraph(source.comment(*place)), *rows, ""])


def _paragraph(text: str) -> list[str]:
    return [f"{text}\n"] if text else []


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next(
        (each for each in message.nested_type if field.type_name.endswith(f".{message.name}.{each.name}")), None
    )
    if entry is not None and entry.options.map_entry:
        key, value = (_plain(each) for each in entry.field)
        return f"map of {key} to {value}"
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"{'repeated ' if repeated else 'optional ' if field.proto3_optional else ''}{_plain(field)}"


def _plain(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _of_oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return f"One of `{message.oneof_decl[field.oneof_index].name}`. "


def _link(type_name: str) -> str:
    package, _, name = type_name.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == PACKAGE.replace("/", ".") else f"`{package}.{name}`"


if __name__ == "__main__":
    main()
