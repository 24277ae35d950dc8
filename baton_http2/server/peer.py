"""The client at the other end of a connection: its address, its identity, and the memory of its requests."""

import asyncio

from baton_http2.input_budget import InputBudget
from baton_http2.security import AuthContext, auth_context


class Peer:
    """A client. `address` is as gRPC writes it; connections are counted by `host`, and so is the memory of `input`."""

    __slots__ = ("_auth_context", "_transport", "address", "host", "input")

    def __init__(self, transport: asyncio.Transport, budget: InputBudget) -> None:
        self._transport = transport
        self._auth_context: AuthContext | None = None
        name = transport.get_extra_info("peername")
        self.address, self.host = "unknown:", ""
        if isinstance(name, tuple):
            self.address = f"ipv6:%5B{name[0]}%5D:{name[1]}" if len(name) == 4 else f"ipv4:{name[0]}:{name[1]}"
            self.host = str(name[0])
        self.input = budget.of_peer(self.host)

    @property
    def auth_context(self) -> AuthContext:
        """The identity that the client has proven; read once."""
        if self._auth_context is None:
            self._auth_context = auth_context(self._transport.get_extra_info("ssl_object"))
        return self._auth_context
