"""Options of the commands that start, show and check processes."""

import argparse

from cli.arguments.values import UINT32, address, credentials, integer, number_of, positive
from engine_protocol.roles import roles

# The values of `baton up --mode`: aggregated, disaggregated, and encode, prefill and decode on separate workers.
MODES = ("agg", "disagg", "epd")


def other_roles() -> tuple[str, ...]:
    """The roles that no mode starts workers of."""
    return tuple(role for role in roles() if role not in ("encode", "prefill", "decode"))


def up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="agg: whole requests on decode workers; disagg: separate prefill workers; epd: separate encode workers too"
        " (default: epd for a model with vision, else disagg)",
    )
    parser.add_argument(
        "--prefill", type=integer(64), metavar="N", help="number of prefill workers (default: by --mode)"
    )
    number_of(parser, "--decode", type=integer(64), default=1, help="number of decode workers")
    parser.add_argument("--encode", type=integer(64), metavar="N", help="number of encode workers (default: by --mode)")
    for role in other_roles():
        text = f"number of {role} workers (default: 0)"
        parser.add_argument(f"--{role}", type=integer(64), default=0, metavar="N", help=text)
    number_of(parser, "--routers", type=integer(16), default=1, help="number of routers")
    number_of(parser, "--router-processes", type=integer(64), default=1, help="processes of each router")
    parser.add_argument("--envoy", action="store_true", help="start Envoy before the routers: adds gRPC-Web and JSON")
    number_of(
        parser,
        "--openai",
        type=integer(2**16 - 1),
        default=8000,
        help="port of OpenAI's API over HTTP, or another if it is taken; 0 serves none",
        metavar="PORT",
    )
    parser.add_argument(
        "--engine",
        type=_engine,
        choices=["pytorch", "simulated", "vllm"],
        default="pytorch",
        help="default: pytorch; vllm after `make vllm-install`",
    )
    parser.add_argument(
        "--share-gpus", action="store_true", help="start more workers than there are GPUs, which then share them"
    )
    parser.add_argument("--model", default="", metavar="FOLDER", help="a checkpoint in Hugging Face format")


def _engine(name: str) -> str:
    if name == "trtllm":
        raise argparse.ArgumentTypeError(
            "workers on TensorRT-LLM load MPI, and are not started by `baton up`: start `python -m services` with each"
            " worker's configuration, one after the other (docs/tensorrt-llm.md)"
        )
    return name


def info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the whole answer of GetServerInfo as JSON")
    address(parser)


def workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        action="store_true",
        help="show the blocks in each memory tier, where tokens were found, and what is retained for whom",
    )
    address(parser)


def logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as router or prefill-0 (default: all)")
    number_of(parser, "--lines", type=integer(UINT32), default=20, help="print the last N lines of each")
    parser.add_argument("--follow", action="store_true", help="keep printing new lines")


def lora(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show the adapters of each worker; reads their folders again")
    load = actions.add_parser("load", help="load an adapter from the workers' folders, or replace it by its new files")
    unload = actions.add_parser("unload", help="refuse new requests for an adapter, and wait for those that run")
    for action in (load, unload):
        action.add_argument("name", metavar="NAME", help="the name of the adapter's folder")
        action.add_argument("--worker", action="append", default=[], metavar="ID", help="only here; may be repeated")
        action.add_argument("--timeout", type=positive, default=60.0, metavar="SECONDS", help="default: 60")
    for action in (listing, load, unload):
        action.add_argument("--model", default="", help="required only if several models are served")
        address(action)


def move(parser: argparse.ArgumentParser) -> None:
    _worker(parser)
    parser.add_argument(
        "--streams",
        type=integer(UINT32),
        default=0,
        metavar="N",
        help="those with the most left first (default: all)",
    )


def drain(parser: argparse.ArgumentParser) -> None:
    _worker(parser)
    parser.add_argument(
        "--grace",
        type=positive,
        metavar="SECONDS",
        help="what still runs then is stopped there (default: the worker's drain_seconds)",
    )


def role(parser: argparse.ArgumentParser) -> None:
    _worker(parser)
    parser.add_argument("role", choices=["prefill", "decode"], help="the role that it is to have")
    parser.add_argument("--timeout", type=positive, default=60.0, metavar="SECONDS", help="default: 60")


def upgrade(parser: argparse.ArgumentParser) -> None:
    _worker(parser)
    parser.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="default: 600")
    parser.add_argument(
        "--or-drain",
        action="store_true",
        help="if the new process does not fit, move all that the worker runs to others, and end it",
    )
    parser.set_defaults(grace=None)


def _worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its id, as `baton workers` shows it")
    address(parser)


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="PATH",
        help="instead, check the order of timeouts in these files or folders: configurations of Baton and Envoy,"
        " manifests of Kubernetes and Compose",
    )
    address(parser)


def health(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", help="any Baton process (default: the router)")
    parser.add_argument("--service", default="", metavar="NAME", help="check one service, by its full name")
    credentials(parser)


def nothing(_: argparse.ArgumentParser) -> None:
    pass
