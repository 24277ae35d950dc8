"""Options of the commands about records of requests."""

import argparse

from cli.arguments.connecting import address
from cli.arguments.values import positive


def record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as its client knows it")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="default: standard output")
    _of_tenant(parser)


def replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a file of `baton record`, or of a router's records.folder")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="the prompt, where the record has its digest only; named *.json, the whole GenerateRequest",
    )
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="the request's deadline")
    _of_tenant(parser)


def why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", nargs="?", default="", help="as its client knows it")
    parser.add_argument("--bundle", default="", metavar="FILE", help="instead of a REQUEST_ID: its record")
    _of_tenant(parser)


def _of_tenant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", metavar="NAME", help="whose request it is, unless credentials say so")
    address(parser)
