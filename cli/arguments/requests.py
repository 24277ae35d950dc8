"""Options of the commands that send requests."""

import argparse

from baton.sampling_options import OPTIONS
from cli.arguments.values import UINT32, address, count, integer, number, positive


def generate(parser: argparse.ArgumentParser) -> None:
    _answer(parser)
    _prompt(parser)
    _sampling(parser)
    _guided(parser)
    parser.add_argument("--json", action="store_true", help="print each event of the stream as a line of JSON")
    parser.add_argument("--timing", action="store_true", help="print the timings of all stages at the end")
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="the request's deadline")
    _tenant(parser)
    parser.add_argument(
        "--priority",
        type=int,
        choices=range(-10, 11),
        default=0,
        metavar="N",
        help="-10 to 10; higher priorities leave the router's queue first",
    )
    address(parser)


def _answer(parser: argparse.ArgumentParser) -> None:
    """Options of the answer: it is kept, recorded, or one that is resumed."""
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", default="", help="the text to continue; - reads it from standard input"
    )
    parser.add_argument(
        "--keep",
        type=positive,
        metavar="SECONDS",
        help="let the answer survive the loss of a router for so long; prints its handle to standard error",
    )
    parser.add_argument(
        "--record", action="store_true", help="ask for a record, and print the id for `baton why` to standard error"
    )
    parser.add_argument("--resume", default="", metavar="HANDLE", help="instead of a PROMPT: the answer of this handle")


def _prompt(parser: argparse.ArgumentParser) -> None:
    """Options of the reading of the prompt."""
    parser.add_argument("--model", default="", help="required only if several models are served")
    parser.add_argument(
        "--chat", action="store_true", help="send PROMPT as a user message, rendered by the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="put a system message before it; implies --chat")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image file or URI for the user message; may be repeated; implies --chat",
    )
    parser.add_argument(
        "--raw", action="store_true", help="PROMPT is not a chat message, and has a placeholder for each image"
    )
    parser.add_argument("--token-ids", action="store_true", help="PROMPT is token ids, separated by commas or spaces")


def chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="required only if several models are served")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    _sampling(parser)
    parser.add_argument("--timing", action="store_true", help="print the timings of each answer")
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="the deadline of each answer")
    _tenant(parser)
    address(parser)


def embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="a text; - reads texts from standard input, one a line"
    )
    parser.add_argument("--model", default="", help="required only if several models are served")
    parser.add_argument(
        "--dimensions",
        type=count(UINT32),
        metavar="N",
        help="return the first N numbers of each vector (default: all)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale vectors to the length 1, or not (default: as the model says)",
    )
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="the request's deadline")
    _tenant(parser)
    address(parser)


def draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what is drawn; - reads standard input")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="of several, FILE-2.png is the second")
    parser.add_argument("--video", action="store_true", help="a clip: FILE.mp4, or FILE-1.png and the other frames")
    parser.add_argument("--frames", type=count(UINT32), metavar="N", help="of a clip (default: as the model says)")
    parser.add_argument("--frames-per-second", type=positive, metavar="N", help="of a clip")
    parser.add_argument("--model", default="", help="required only if several models draw")
    parser.add_argument("--negative-prompt", default="", metavar="TEXT", help="what is not to be in the picture")
    parser.add_argument("--guidance-scale", type=float, metavar="N", help="how closely it follows the prompt")
    for name in ("width", "height"):
        parser.add_argument(f"--{name}", type=count(UINT32), metavar="PIXELS", help="default: as the model says")
    parser.add_argument("--steps", type=count(UINT32), metavar="N", help="more take longer")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same picture again")
    parser.add_argument("--number", type=count(UINT32), metavar="N", help="how many pictures (default: 1)")
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help="the request's deadline")
    _tenant(parser)
    address(parser)


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text that would be continued; - reads standard input")
    parser.add_argument("--token-ids", action="store_true", help="PROMPT is token ids, separated by commas or spaces")
    parser.add_argument("--model", default="", help="required only if several models are served")
    address(parser)


def _guided(parser: argparse.ArgumentParser) -> None:
    grammars = parser.add_mutually_exclusive_group()
    grammars.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that is valid under this schema")
    grammars.add_argument("--regex", metavar="EXPRESSION", help="the answer matches this regular expression")
    grammars.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="the answer is this text; may be repeated"
    )
    grammars.add_argument(
        "--grammar", metavar="FILE", help="the answer follows this grammar, in Lark's notation or GBNF"
    )


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora", default="", metavar="NAME", help="the adapter to use")
    parser.add_argument("--max-tokens", type=integer(UINT32), metavar="N", help="generate at most N tokens")
    parser.add_argument(
        "--min-tokens-per-message",
        type=integer(UINT32),
        metavar="N",
        help="after the first token, receive at least N tokens at once, or those of the last 200 ms",
    )
    for option in OPTIONS.values():
        reads = integer(int(option.row.high)) if option.kind is int else number
        parser.add_argument(option.flag, type=reads, metavar="N", help=option.row.help)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated"
    )


def _tenant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tenant", default="", metavar="NAME", help="the tenant whose quota applies, unless credentials name one"
    )
