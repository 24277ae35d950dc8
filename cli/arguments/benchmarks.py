"""Options of `baton bench`."""

import argparse
from typing import TypeAlias

from cli.arguments.values import UINT32, UINT64, address, count, integer, not_negative, number_of, positive, share, span

# The values of `baton bench replay --generate`.
TRACES = ("mixed", "conversations", "agents", "system-prompts", "zipf", "sessions")
_URLS = "http(s)://HOST:PORT of OpenAI's API, or grpc://HOST:PORT of Baton's"


_Parser: TypeAlias = argparse.ArgumentParser


def bench(parser: _Parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    sweep = actions.add_parser("sweep", help="measure at several request rates or concurrencies")
    compare = actions.add_parser("compare", help="measure several servers in turns, and their ratios")
    replay = actions.add_parser("replay", help="replay a trace of requests that share prefixes")
    profile = actions.add_parser("profile", help="measure an idle cluster's speed, for simulated engines and routers")
    for action in (sweep, compare):
        _steps(action)
        _images(action)
    _replay(replay)
    _profile(profile)
    _one_or_several(compare)
    for action in (sweep, replay, profile):
        action.add_argument("--url", default="", metavar="URL", help=f"{_URLS}; instead of --address")
    for action in (sweep, compare, replay, profile):
        _common(action)
    for action in (sweep, compare, replay):
        _targets_and_files(action)


def _steps(parser: _Parser) -> None:
    """The load of a sweep. The second name of an option is the one that such programs have in this field."""
    parser.add_argument(
        "--rate",
        "--request-rate",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="requests a second, sent at random times",
    )
    parser.add_argument(
        "--concurrency", type=count(10_000), nargs="+", default=[], metavar="N", help="requests that run at once"
    )
    parser.add_argument(
        "--input", "--isl", type=span, default=(512, 512), metavar="N[:N]", help="tokens of a prompt (default: 512)"
    )
    parser.add_argument(
        "--output", "--osl", type=span, default=(128, 128), metavar="N[:N]", help="tokens of an answer (default: 128)"
    )
    parser.add_argument("--lengths", metavar="FILE", help="instead, a prompt's and an answer's tokens on each line")
    number_of(parser, "--requests", "--request-count", type=count(UINT32), default=200, help="of each step")
    number_of(parser, "--warmup", type=integer(10000), default=0, help="requests before the first step")


def _images(parser: _Parser) -> None:
    number_of(parser, "--images", type=integer(64), default=0, help="of each request, which becomes a chat")
    parser.add_argument(
        "--image-size",
        type=span,
        default=(256, 256),
        metavar="N[:N]",
        help="the width and height in pixels (default: 256)",
    )
    number_of(parser, "--image-repeat", type=share, default=0.0, help="of images sent before", metavar="SHARE")


def _one_or_several(parser: _Parser) -> None:
    parser.add_argument("--url", action="append", default=[], metavar="URL", help=f"{_URLS}; give two or more")
    number_of(parser, "--rounds", type=count(1000), default=3, help="each begins with another server")


def _replay(parser: _Parser) -> None:
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a file in Mooncake's format, perhaps .gz")
    parser.add_argument("--generate", choices=TRACES, help="a generated trace instead")
    number_of(parser, "--requests", type=count(UINT32), default=1000, help="at most")
    number_of(parser, "--seconds", type=positive, default=300.0, help="of a generated trace")
    number_of(parser, "--speedup", type=positive, default=1.0, help="times as fast", metavar="X")
    number_of(parser, "--block-tokens", type=count(512), default=512, help="for each 512 of the trace")
    number_of(parser, "--max-output", type=count(UINT32), default=1024, help="tokens of an answer")


def _common(parser: _Parser) -> None:
    parser.add_argument("--model", default="", help="required only if several models are served")
    parser.add_argument("--seed", type=integer(UINT64), default=1, metavar="N", help="default: 1")
    number_of(parser, "--timeout", type=positive, default=300.0, help="of each request", metavar="SECONDS")
    number_of(parser, "--wait", type=not_negative, default=0.0, help="for the server to be ready", metavar="SECONDS")
    parser.add_argument(
        "--mode",
        choices=("agg", "disagg"),
        default="",
        help="run every request so, by gRPC; by HTTP only the report's title has it",
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the report here too")
    address(parser)


def _targets_and_files(parser: _Parser) -> None:
    parser.add_argument(
        "--ttft-target", type=not_negative, default=0.0, metavar="MS", help="for goodput: the first token"
    )
    parser.add_argument(
        "--itl-target", type=not_negative, default=0.0, metavar="MS", help="for goodput: each other token"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers here")
    parser.add_argument("--plot", metavar="FILE", help="draw them; needs matplotlib: baton-serving[bench]")


def _profile(parser: _Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="where the profile is written, as JSON")
    for name, default, what in (
        ("--prompts", [128, 512, 2048, 8192], "tokens of the prompts"),
        ("--batches", [1, 4, 16, 64], "sequences that decode at once"),
        ("--contexts", [512, 4096], "tokens before each new one"),
    ):
        text = f"{what} (default: {' '.join(map(str, default))})"
        parser.add_argument(name, type=count(UINT32), nargs="+", default=default, metavar="N", help=text)
    number_of(parser, "--answer", type=count(UINT32), default=64, help="tokens of each")
    number_of(parser, "--repeats", type=count(1000), default=5, help="of each prompt")
