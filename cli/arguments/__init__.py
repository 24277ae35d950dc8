"""The command line of `baton`: its commands and their options. Imports nothing heavy, so that --help is fast.

requests, cluster, records (and traces), benchmarks: the options of each command; values: what options take, and the
options of all commands that call a process.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.version import __version__
from cli.arguments import benchmarks, cluster, records, requests, values


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A command: its name, its help text, the function that adds its options, and its `module.function`."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    function: str


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. If it is invalid, prints why and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serves language models, with prefill and decode on separate workers."
    )
    parser.add_argument(
        "--version", action="version", version=f"baton {__version__}", help="print the installed version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        options = commands.add_parser(command.name, help=command.help, description=f"{command.help}.")
        options.set_defaults(function=f"cli.commands.{command.function}")
        command.add_options(options)
    return parser.parse_args(words)


COMMANDS = (
    Subcommand("generate", "Send a prompt and stream the completion", requests.generate, "generate.run"),
    Subcommand("chat", "Hold a conversation", requests.chat, "chat.run"),
    Subcommand("embed", "Print the vectors of texts, one line of JSON each", requests.embed, "draw.print_vectors"),
    Subcommand("draw", "Draw a picture or a clip into files", requests.draw, "draw.draw"),
    Subcommand(
        "explain",
        "Show where a prompt would run now, and the predicted cost of each place",
        requests.explain,
        "explain.run",
    ),
    Subcommand("record", "Write the record of a request to a file", records.record, "records.request.write_record"),
    Subcommand(
        "replay",
        "Run a recorded request again, and compare the answers",
        records.replay,
        "records.replay.replay_record",
    ),
    Subcommand(
        "why", "Explain a recorded request: its time, its decisions, its failures", records.why, "records.why.run"
    ),
    Subcommand("bench", "Put load on a server and measure it", benchmarks.bench, "benchmarks.bench.run"),
    Subcommand(
        "info", "Show what this deployment offers: models, features, limits, façades", cluster.info, "offers.show_info"
    ),
    Subcommand("models", "List the served models", values.address, "offers.list_models"),
    Subcommand("lora", "List, load and unload adapters on the workers", cluster.lora, "workers.run_lora"),
    Subcommand("workers", "List the workers as the router sees them", cluster.workers, "workers.list_workers"),
    Subcommand("move", "Move running answers from a worker to others", cluster.move, "workers.move"),
    Subcommand("drain", "Move all that a worker runs to others, and end it", cluster.drain, "workers.drain"),
    Subcommand(
        "role", "Change a worker between prefill and decode while it serves", cluster.role, "workers.change_role"
    ),
    Subcommand(
        "upgrade", "Replace a worker's code; its answers go on in the new process", cluster.upgrade, "workers.upgrade"
    ),
    Subcommand("tenants", "List what each tenant uses, waits for and has left", values.address, "offers.list_tenants"),
    Subcommand("health", "Check the health of a process, for probes", cluster.health, "health.run"),
    Subcommand("doctor", "Diagnose this installation, cluster or deployment", cluster.doctor, "doctor.run"),
    Subcommand("up", "Start a cluster on this machine, in the background", cluster.up, "up.start_cluster"),
    Subcommand("down", "Stop the cluster of `baton up`", cluster.nothing, "cluster.stop_cluster"),
    Subcommand("status", "Show the processes of `baton up`", cluster.nothing, "cluster.show_status"),
    Subcommand("logs", "Print the logs of the processes of `baton up`", cluster.logs, "cluster.show_logs"),
    Subcommand("traces", "Receive traces and show them on a page", records.traces, "traces.serve_traces"),
    Subcommand("trace", "Check the trace of a request", records.trace, "traces.verify_trace"),
)
