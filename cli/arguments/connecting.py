"""Options of all commands that call a process: its address, and credentials."""

import argparse


def address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router (default: $BATON_ADDRESS, the cluster of `baton up`, or 127.0.0.1:7070)",
    )
    credentials(parser)


def credentials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="use TLS; implied by each of the next three ($BATON_TLS)")
    parser.add_argument("--ca", metavar="FILE", help="the certificate authority to trust ($BATON_CA)")
    parser.add_argument("--cert", metavar="FILE", help="the client certificate ($BATON_CERT)")
    parser.add_argument("--key", metavar="FILE", help="the key of the client certificate ($BATON_KEY)")
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with the token to send ($BATON_TOKEN_FILE, or $BATON_TOKEN)"
    )
