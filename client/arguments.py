"""The command line of `baton`: its commands and their options. Imports nothing heavy, so that help is quick."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name, what help says of it, and who adds its options."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the process with exit code 2, saying why, if it is wrong."""
    parser = argparse.ArgumentParser(prog="baton", description="Serves language models, prefill and decode apart.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version that is installed, and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_options(commands.add_parser(command.name, help=command.help, description=f"{command.help}."))
    return parser.parse_args(words)


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"baton {metadata.version('baton-serving')}")
        parser.exit()


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    parser.add_argument("--model", default="", help="needed only where several models are served")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a user's message, for the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; implies --chat")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image, or the URI of one, that a user's message is about; may be repeated; implies --chat",
    )
    parser.add_argument("--raw", action="store_true", help="PROMPT is no message; it has a placeholder for each image")
    parser.add_argument("--token-ids", action="store_true", help="PROMPT is token ids, separated by commas or spaces")
    _sampling(parser)
    parser.add_argument("--json", action="store_true", help="print each event of the stream as one line of JSON")
    parser.add_argument("--timing", action="store_true", help="show at the end where the time went, stage by stage")
    parser.add_argument("--timeout", type=_positive, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--tenant", default="", metavar="NAME", help="whose quota to use, if no credentials say so")
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="-10 to 10: the higher goes first where requests wait"
    )
    _address(parser)


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=_integer(UINT32), metavar="N", help="generate so many tokens at most")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token each time")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that reach this")
    parser.add_argument("--seed", type=_integer(UINT64), metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")


def _up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=_integer(64), default=1, metavar="N", help="prefill workers (default 1)")
    parser.add_argument("--decode", type=_integer(64), default=1, metavar="N", help="decode workers (default 1)")
    parser.add_argument(
        "--encode", type=_integer(64), metavar="N", help="encode workers (default 1 for a model that sees, else 0)"
    )
    parser.add_argument("--routers", type=_integer(16), default=1, metavar="N", help="routers (default 1)")
    parser.add_argument("--envoy", action="store_true", help="Envoy before them: gRPC-Web and JSON too")
    parser.add_argument("--engine", choices=["pytorch", "simulated"], default="pytorch", help="default pytorch")
    parser.add_argument("--model", default="", metavar="FOLDER", help="a checkpoint in Hugging Face format")


def _logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as router or prefill-0; all if none is named")
    parser.add_argument(
        "--lines", type=_integer(UINT32), default=20, metavar="N", help="of each, the last N (default 20)"
    )
    parser.add_argument("--follow", action="store_true", help="go on with what is written from now on")


def _traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--otlp", default="127.0.0.1:4317", metavar="HOST:PORT", help="where exporters send spans")
    parser.add_argument("--listen", default="127.0.0.1:16686", metavar="HOST:PORT", help="where the page is shown")
    parser.add_argument(
        "--max-traces", type=_integer(UINT32), default=10_000, metavar="N", help="kept at most (default 10000)"
    )
    parser.add_argument(
        "--max-mib", type=_integer(UINT32), default=128, metavar="N", help="of spans kept at most (default 128)"
    )


def _trace(parser: argparse.ArgumentParser) -> None:
    verify = parser.add_subparsers(dest="action", metavar="ACTION", required=True).add_parser(
        "verify", help="hold a request's trace against the contract of docs/tracing.md"
    )
    verify.add_argument("trace_id", metavar="TRACE_ID", help="as log lines and the page of `baton traces` have it")
    verify.add_argument("--url", help="a Jaeger query API; by default the local cluster's, or http://127.0.0.1:16686")
    verify.add_argument(
        "--wait", type=_positive, default=5.0, metavar="SECONDS", help="for spans on their way (default 5)"
    )


def _address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router; by default $BATON_ADDRESS, the cluster of `baton up`, or 127.0.0.1:7070",
    )
    _credentials(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="PATH",
        help="check instead whether the timeouts of these files, or of folders of them, are ordered: configurations of"
        " Baton and Envoy, manifests of Kubernetes and Compose",
    )
    _address(parser)


def _health(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", help="any process; by default the router")
    parser.add_argument("--service", default="", metavar="NAME", help="of one service, by its full name")
    _credentials(parser)


def _credentials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="use TLS, as any of the next three does ($BATON_TLS)")
    parser.add_argument("--ca", metavar="FILE", help="whose certificates to trust ($BATON_CA)")
    parser.add_argument("--cert", metavar="FILE", help="the certificate to present ($BATON_CERT)")
    parser.add_argument("--key", metavar="FILE", help="its key ($BATON_KEY)")
    parser.add_argument("--token-file", metavar="FILE", help="a token to send ($BATON_TOKEN_FILE; or $BATON_TOKEN)")


def _nothing(_: argparse.ArgumentParser) -> None:
    pass


def _integer(largest: int) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not 0 <= value <= largest:
            raise argparse.ArgumentTypeError(f"{value} is not between 0 and {largest}")
        return value

    return parse_integer


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


COMMANDS = (
    Command("generate", "Send a prompt, and stream the answer", _generate),
    Command("models", "List the models that are served", _address),
    Command("workers", "List the workers as the router sees them", _address),
    Command("health", "Ask a process for its health, as probes do", _health),
    Command("doctor", "Say what is wrong with this installation, cluster, or deployment", _doctor),
    Command("up", "Start a cluster on this machine, in the background", _up),
    Command("down", "End the cluster of `baton up`", _nothing),
    Command("status", "Show the processes of `baton up`", _nothing),
    Command("logs", "Show what the processes of `baton up` wrote", _logs),
    Command("traces", "Receive traces, and show them on a page", _traces),
    Command("trace", "Check the trace of a request", _trace),
)
