"""The configuration of etcd: its addresses, and the credentials."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from typing_extensions import Self

from rpc.auth.tls import TlsConfig


class EtcdConfig(BaseModel):
    """The members of one etcd cluster, tried in order from the last that worked.

    Endpoints are `host:port`, or URLs whose scheme agrees with `tls`. A call that a member has not answered after
    `call_timeout_seconds` goes to the next; a silent watch ends after twice that. A first registration is retried for
    `start_timeout_seconds`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoints: tuple[str, ...] = Field(default=("127.0.0.1:2379",), min_length=1)
    username: str = ""
    password: SecretStr = SecretStr("")
    tls: TlsConfig | None = None
    call_timeout_seconds: float = Field(default=2.0, gt=0)
    start_timeout_seconds: float = Field(default=30.0, gt=0)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The endpoints as `host:port`."""
        return tuple(endpoint.rpartition("://")[2].rstrip("/") for endpoint in self.endpoints)

    @model_validator(mode="after")
    def _schemes(self) -> Self:
        expected = "http" if self.tls is None else "https"
        for endpoint in self.endpoints:
            scheme, separator, _ = endpoint.rpartition("://")
            if separator and scheme != expected:
                raise ValueError(
                    f"endpoints: {endpoint}: the scheme must be {expected}: https needs `tls`, and `tls` needs https"
                )
        for address in self.addresses:
            if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
                raise ValueError(f"endpoints: {address!r} is not host:port")
        return self
