"""Options of `baton bench`."""

import argparse

from cli.arguments.connecting import address
from cli.arguments.values import UINT32, UINT64, count, integer, not_negative, positive, span

# The values of `baton bench replay --generate`.
TRACES = ("mixed", "conversations", "agents", "system-prompts", "zipf")


def bench(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    sweep = actions.add_parser("sweep", help="measure at several request rates or concurrencies")
    sweep.add_argument(
        "--rate", type=positive, nargs="+", default=[], metavar="N", help="requests a second, sent at random times"
    )
    sweep.add_argument(
        "--concurrency", type=count(10_000), nargs="+", default=[], metavar="N", help="requests that run at once"
    )
    sweep.add_argument(
        "--input", type=span, default=(512, 512), metavar="N[:N]", help="tokens of a prompt (default: 512)"
    )
    sweep.add_argument(
        "--output", type=span, default=(128, 128), metavar="N[:N]", help="tokens of an answer (default: 128)"
    )
    sweep.add_argument("--lengths", metavar="FILE", help="instead, a prompt's and an answer's tokens on each line")
    sweep.add_argument("--requests", type=count(UINT32), default=200, metavar="N", help="of each step (default: 200)")
    replay = actions.add_parser("replay", help="replay a trace of requests that share prefixes")
    replay.add_argument("trace", nargs="?", metavar="TRACE", help="a file in Mooncake's format, perhaps .gz")
    replay.add_argument("--generate", choices=TRACES, help="a generated trace instead")
    replay.add_argument("--requests", type=count(UINT32), default=1000, metavar="N", help="at most (default: 1000)")
    replay.add_argument(
        "--seconds", type=positive, default=300.0, metavar="N", help="of a generated trace (default: 300)"
    )
    replay.add_argument("--speedup", type=positive, default=1.0, metavar="X", help="times as fast (default: 1)")
    replay.add_argument(
        "--block-tokens", type=count(512), default=512, metavar="N", help="for each 512 of the trace (default: 512)"
    )
    replay.add_argument(
        "--max-output", type=count(UINT32), default=1024, metavar="N", help="tokens of an answer (default: 1024)"
    )
    profile = actions.add_parser("profile", help="measure an idle cluster's speed, for simulated engines and routers")
    _profile(profile)
    for action in (sweep, replay, profile):
        action.add_argument("--model", default="", help="required only if several models are served")
        action.add_argument("--seed", type=integer(UINT64), default=1, metavar="N", help="default: 1")
        action.add_argument(
            "--timeout", type=positive, default=300.0, metavar="SECONDS", help="of each request (default: 300)"
        )
        action.add_argument("--markdown", metavar="FILE", help="write the report here too")
        address(action)
    for action in (sweep, replay):
        action.add_argument(
            "--ttft-target", type=not_negative, default=0.0, metavar="MS", help="for goodput: the first token"
        )
        action.add_argument(
            "--itl-target", type=not_negative, default=0.0, metavar="MS", help="for goodput: each other token"
        )
        action.add_argument("--json", metavar="FILE", help="write all numbers here")
        action.add_argument("--plot", metavar="FILE", help="draw them; needs matplotlib: baton[bench]")


def _profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="where the profile is written, as JSON")
    for name, default, what in (
        ("--prompts", [128, 512, 2048, 8192], "tokens of the prompts"),
        ("--batches", [1, 4, 16, 64], "sequences that decode at once"),
        ("--contexts", [512, 4096], "tokens before each new one"),
    ):
        text = f"{what} (default: {' '.join(map(str, default))})"
        parser.add_argument(name, type=count(UINT32), nargs="+", default=default, metavar="N", help=text)
    parser.add_argument("--answer", type=count(UINT32), default=64, metavar="N", help="tokens of each (default: 64)")
    parser.add_argument("--repeats", type=count(1000), default=5, metavar="N", help="of each prompt (default: 5)")
