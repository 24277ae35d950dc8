"""Writes the descriptors that Envoy transcodes JSON with: `python tools/transcoding.py OUT`.

They are those of protos/, with the paths of deploy/envoy/http_rules.yaml as the `google.api.http` options that the
protos themselves do not have, and with the types of error details. Raises KeyError for a rule of an unknown method.
"""

import argparse
from pathlib import Path

import yaml
from google.api import annotations_pb2, http_pb2
from google.protobuf import json_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet, MethodDescriptorProto
from google.rpc import error_details_pb2, status_pb2

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "envoy" / "http_rules.yaml"
DESCRIPTORS = ROOT / "protos" / "descriptors.binpb"


def main() -> None:
    """Writes the file named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    out = parser.parse_args().out
    out.write_bytes(transcoding(DESCRIPTORS.read_bytes(), RULES.read_text()).SerializeToString())


def transcoding(descriptors: bytes, rules: str) -> FileDescriptorSet:
    """The descriptors, with an HTTP rule for each method that `rules` names."""
    found = FileDescriptorSet.FromString(descriptors)
    methods = _methods(found)
    for rule in yaml.safe_load(rules)["rules"]:
        http = json_format.ParseDict({**rule, "selector": ""}, http_pb2.HttpRule())
        methods[rule["selector"]].options.Extensions[annotations_pb2.http].CopyFrom(http)
    for file in (status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR):
        _add(found, file)
    return found


def _methods(descriptors: FileDescriptorSet) -> dict[str, MethodDescriptorProto]:
    return {
        f"{file.package}.{service.name}.{method.name}": method
        for file in descriptors.file
        for service in file.service
        for method in service.method
    }


def _add(descriptors: FileDescriptorSet, file: FileDescriptor) -> None:
    """Adds a file after its imports, unless it was added before."""
    for imported in file.dependencies:
        _add(descriptors, imported)
    if file.name not in {each.name for each in descriptors.file}:
        file.CopyToProto(descriptors.file.add())


if __name__ == "__main__":
    main()
