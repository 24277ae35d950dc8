"""Options of the commands about records and traces of requests."""

import argparse

from cli.arguments.values import UINT32, address, integer, number_of, positive


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


def traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp", default="127.0.0.1:4317", metavar="HOST:PORT", help="listen here for spans (OTLP/gRPC)"
    )
    parser.add_argument("--listen", default="127.0.0.1:16686", metavar="HOST:PORT", help="serve the page here")
    number_of(parser, "--max-traces", type=integer(UINT32), default=10000, help="keep at most N traces")
    number_of(parser, "--max-mib", type=integer(UINT32), default=128, help="keep at most N MiB of spans")


def trace(parser: argparse.ArgumentParser) -> None:
    verify = parser.add_subparsers(dest="action", metavar="ACTION", required=True).add_parser(
        "verify", help="check a request's trace against the contract in docs/tracing.md"
    )
    verify.add_argument("trace_id", metavar="TRACE_ID", help="from a log line or the page of `baton traces`")
    verify.add_argument("--url", help="a Jaeger query API (default: the local cluster's, or http://127.0.0.1:16686)")
    number_of(
        verify, "--wait", type=positive, default=5.0, help="wait this long for spans to arrive", metavar="SECONDS"
    )
