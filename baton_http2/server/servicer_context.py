"""The parts of grpc.aio's ServicerContext that are the same however a call is carried: status, metadata, identity."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpc import StatusCode, aio

from baton_http2.clock import monotonic
from baton_http2.security import peer_identity_key
from baton_http2.wire.metadata import STATUS_CODES, Metadata, Pairs


class CallContext(aio.ServicerContext[Any, Any]):
    """The context of a call with this metadata, whose deadline is in time.monotonic's seconds; None is no deadline.

    The carrier of the call adds its messages and its end.
    """

    def __init__(self, metadata: Metadata, deadline_at: float | None) -> None:
        self._metadata = metadata
        self._deadline_at = deadline_at
        self._code: StatusCode | int | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._is_cancelled = False

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """The identity that the caller has proven."""
        raise NotImplementedError

    @property
    def is_ok(self) -> bool:
        """True unless the servicer has set the code of a failure."""
        return not self._code or self._code is StatusCode.OK

    @property
    def final_code(self) -> StatusCode:
        """The code that the servicer has set, or OK."""
        if self._code is None:
            return StatusCode.OK
        code = STATUS_CODES[self._code] if isinstance(self._code, int) else self._code
        return code or StatusCode.OK

    def set_trailing_metadata(self, trailing_metadata: Pairs) -> None:
        """Sets the metadata that go out with the status."""
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]  # its stubs say Any
        """The metadata that were set."""
        return self._trailing

    def set_code(self, code: StatusCode | int) -> None:
        """Sets the status's code, for a servicer that ends well."""
        self._code = code

    def code(self) -> StatusCode | int | None:  # type: ignore[override]  # its stubs have no None
        """The code that was set, or with which the call has ended; None before."""
        return self._code

    def set_details(self, details: str) -> None:
        """Sets the status's text."""
        self._details = details

    def details(self) -> str:
        """The text that was set, or with which the call has ended."""
        return self._details

    def invocation_metadata(self) -> Metadata:  # type: ignore[override]  # its stubs have a class of its own
        """The metadata that the caller sent beside its request."""
        return self._metadata

    def time_remaining(self) -> float | None:  # type: ignore[override]  # its stubs have no None
        """The time that the caller will still wait; None if it set no deadline."""
        return None if self._deadline_at is None else max(0.0, self._deadline_at - monotonic())

    def cancelled(self) -> bool:
        """True once the caller has gone."""
        return self._is_cancelled

    def peer_identity_key(self) -> str | None:
        """The key of `auth_context` with the caller's identities."""
        return peer_identity_key(self.auth_context())

    def peer_identities(self) -> Sequence[bytes] | None:
        """The caller's identities."""
        key = self.peer_identity_key()
        return None if key is None else self.auth_context()[key]
