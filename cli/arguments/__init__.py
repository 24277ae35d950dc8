"""The command line of `baton`: its commands and their options. Imports nothing heavy, so that --help is fast.

requests, cluster, traces, records, benchmarks (the options of each command), connecting (of all that call a process),
values (what options take).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.version import __version__
from cli.arguments import benchmarks, cluster, connecting, records, requests, traces


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A command: its name, its help text, the function that adds its options, and its module below `cli.commands`."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    module: str


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. If it is invalid, prints why and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serves language models, with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the installed version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        options = commands.add_parser(command.name, help=command.help, description=f"{command.help}.")
        options.set_defaults(module=f"cli.commands.{command.module}")
        command.add_options(options)
    return parser.parse_args(words)


class _ShowVersion(argparse.Action):
    """Imports the version only when it is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"baton {__version__}")
        parser.exit()


COMMANDS = (
    Subcommand("generate", "Send a prompt and stream the completion", requests.generate, "generate"),
    Subcommand("chat", "Hold a conversation", requests.chat, "chat"),
    Subcommand("embed", "Print the vectors of texts, one line of JSON each", requests.embed, "embed"),
    Subcommand("draw", "Draw a picture into a file", requests.draw, "draw"),
    Subcommand(
        "explain",
        "Show where a prompt would run now, and the predicted cost of each place",
        requests.explain,
        "explain",
    ),
    Subcommand("record", "Write the record of a request to a file", records.record, "records.record"),
    Subcommand("replay", "Run a recorded request again, and compare the answers", records.replay, "records.replay"),
    Subcommand("why", "Explain a recorded request: its time, its decisions, its failures", records.why, "records.why"),
    Subcommand("bench", "Put load on a server and measure it", benchmarks.bench, "benchmarks.bench"),
    Subcommand("info", "Show what this deployment offers: models, features, limits, façades", cluster.info, "info"),
    Subcommand("models", "List the served models", connecting.address, "models"),
    Subcommand("lora", "List, load and unload adapters on the workers", cluster.lora, "lora"),
    Subcommand("workers", "List the workers as the router sees them", cluster.workers, "workers"),
    Subcommand("move", "Move running answers from a worker to others", cluster.move, "placing"),
    Subcommand("drain", "Move all that a worker runs to others, and end it", cluster.drain, "placing"),
    Subcommand("role", "Change a worker between prefill and decode while it serves", cluster.role, "placing"),
    Subcommand("tenants", "List what each tenant uses, waits for and has left", connecting.address, "tenants"),
    Subcommand("health", "Check the health of a process, for probes", cluster.health, "health"),
    Subcommand("doctor", "Diagnose this installation, cluster or deployment", cluster.doctor, "doctor"),
    Subcommand("up", "Start a cluster on this machine, in the background", cluster.up, "local.up"),
    Subcommand("down", "Stop the cluster of `baton up`", cluster.nothing, "local.down"),
    Subcommand("status", "Show the processes of `baton up`", cluster.nothing, "local.status"),
    Subcommand("logs", "Print the logs of the processes of `baton up`", cluster.logs, "local.logs"),
    Subcommand("traces", "Receive traces and show them on a page", traces.traces, "tracing.traces"),
    Subcommand("trace", "Check the trace of a request", traces.trace, "tracing.trace"),
)
