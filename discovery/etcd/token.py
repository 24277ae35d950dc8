"""Authentication at etcd: the token for a user's name and password."""

from grpc import StatusCode, aio
from pydantic import SecretStr

from baton.errors import Unauthenticated
from baton.etcd.v1 import auth_pb2
from discovery.etcd.methods import AUTHENTICATE, Metadata

# With this a member without a leader refuses, instead of answering from old data.
_HAS_LEADER = ("hasleader", "true")

# etcd sends these as INVALID_ARGUMENT; a bad or expired token is UNAUTHENTICATED.
_REFUSALS = ("user name is empty", "revision in header is old", "revision of auth store is old")


class EtcdToken:
    """The token of one user, fetched on first use and again after `forget`. Without a user there is none."""

    def __init__(self, username: str, password: SecretStr, timeout_seconds: float) -> None:
        self._username = username
        self._password = password
        self._timeout_seconds = timeout_seconds
        self._metadata: Metadata | None = None if username else (_HAS_LEADER,)

    async def metadata(self, channel: aio.Channel) -> Metadata:
        """The metadata of every call. Raises Unauthenticated if etcd refuses the password."""
        if self._metadata is None:
            self._metadata = await self._authenticate(channel)
        return self._metadata

    def was_refused(self, error: aio.AioRpcError) -> bool:
        """True if a call failed because of its token. Raises Unauthenticated if there is no user to get another for."""
        details = error.details() or ""
        refused = error.code() is StatusCode.UNAUTHENTICATED or any(text in details for text in _REFUSALS)
        if refused and not self._username:
            raise Unauthenticated(f"etcd requires a user and a password: {details}") from error
        return refused

    def forget(self, metadata: Metadata) -> None:
        """Drops the token in `metadata`, unless it was replaced meanwhile."""
        if self._metadata is metadata and self._username:
            self._metadata = None

    async def _authenticate(self, channel: aio.Channel) -> Metadata:
        request = auth_pb2.AuthenticateRequest(name=self._username, password=self._password.get_secret_value())
        try:
            response = await AUTHENTICATE.call(channel, request, (), self._timeout_seconds)
        except aio.AioRpcError as error:
            match error.code():
                case StatusCode.FAILED_PRECONDITION:  # authentication is off
                    return (_HAS_LEADER,)
                case StatusCode.INVALID_ARGUMENT | StatusCode.UNAUTHENTICATED:
                    raise Unauthenticated(f"etcd refuses user {self._username}: {error.details()}") from error
            raise
        return (_HAS_LEADER, ("token", response.token))
