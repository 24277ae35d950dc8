"""Sockets that listen: at every address of a host, at one port, which the processes of one server may share."""

import socket


def open_sockets(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """A bound socket for each address of the host, all at one port, where 0 is any free one. Raises OSError.

    With `shares_port` other processes of this user may bind the same one, and the kernel spreads the connections over
    those that listen.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host):
            # With the protocol: without it asyncio has small writes wait until earlier ones are acknowledged.
            each = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # Of "::" the other family too, as gRPC has it.
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
            each.setblocking(False)
            each.bind((address, port))
            port = each.getsockname()[1]
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
