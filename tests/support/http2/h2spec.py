"""The cases of h2spec 2.6 (its sections `generic`, `http2` and `hpack`), by its own numbers, and what our server does.

h2spec takes any of several reactions for right; here each case has the one of this server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from support.http2.peer import Peer, head, message

PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, COMPRESSION = 1, 3, 5, 6, 7, 9
END, BOTH = "END_HEADERS", ("END_HEADERS", "END_STREAM")


@dataclass(frozen=True, slots=True)
class Answered:
    """The stream is answered, with this status of HTTP."""

    status: str = "200"
    stream: int = 1


@dataclass(frozen=True, slots=True)
class Alive:
    """The connection goes on."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The stream is reset, and the connection goes on."""

    code: int
    stream: int = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """The connection is ended by a GOAWAY."""

    code: int


Outcome = Answered | Alive | Reset | Ended
# What is sent; a number stands for waiting until that stream has ended.
Sent = Sequence["Frame | bytes | int"]
Case = tuple[Callable[[Peer], Sent], Outcome]


def raw(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def request(peer: Peer, *more: tuple[str, str], stream: int = 1, end: bool = False, **replaced: str) -> HeadersFrame:
    block = peer.block(head(replaced.pop("call", "unary"), *more, **replaced))
    return HeadersFrame(stream, block, flags=BOTH if end else [END])


def fields(peer: Peer, headers: Sequence[tuple[str, str]]) -> HeadersFrame:
    return HeadersFrame(1, peer.block(headers), flags=BOTH)


def body(stream: int = 1) -> DataFrame:
    return DataFrame(stream, message(b"hi"), flags=["END_STREAM"])


def ending() -> DataFrame:
    return DataFrame(1, flags=["END_STREAM"])


def call(peer: Peer, stream: int = 1) -> list[Frame]:
    return [request(peer, stream=stream), body(stream)]


def waiting(peer: Peer) -> list[Frame]:
    """A call whose request has ended, and whose answer has not."""
    return [request(peer, call="hang"), body()]


def represented(representation: str) -> Case:
    """A request with a field in this representation, in hexadecimal."""

    def sent(peer: Peer) -> Sent:
        block = peer.block(head("unary")) + bytes.fromhex(representation)
        return [HeadersFrame(1, block, flags=[END]), body()]

    return sent, Answered()


def resized(sizes: str) -> Case:
    return lambda peer: [HeadersFrame(1, bytes.fromhex(sizes) + peer.block(head("unary")), flags=[END]), body()], (
        Answered()
    )


def block(payload: str) -> Case:
    return lambda _: [raw(1, 5, 1, bytes.fromhex(payload))], Ended(COMPRESSION)


def malformed(*headers: tuple[str, str]) -> Case:
    return lambda peer: [fields(peer, headers)], Reset(PROTOCOL)


def without(name: str) -> list[tuple[str, str]]:
    return [each for each in head("unary") if each[0] != name]


def pieces(peer: Peer, count: int) -> list[Frame]:
    """A request whose header block comes in so many frames after the first."""
    encoded = peer.block(head("unary"))
    parts: list[Frame] = [HeadersFrame(1, encoded[:4])]
    parts += [ContinuationFrame(1, encoded[4 + at : 5 + at]) for at in range(count - 1)]
    return [*parts, ContinuationFrame(1, encoded[3 + count :], flags=[END]), body()]


GENERIC: dict[str, Case] = {
    "generic/1/1": (lambda peer: call(peer), Answered()),
    "generic/2/1": (lambda _: [PriorityFrame(1, depends_on=0, stream_weight=255)], Alive()),
    "generic/2/2": (lambda peer: [*waiting(peer), WindowUpdateFrame(1, window_increment=1)], Alive()),
    "generic/2/3": (lambda peer: [*waiting(peer), PriorityFrame(1, depends_on=0, stream_weight=255)], Alive()),
    "generic/2/4": (lambda peer: [*waiting(peer), RstStreamFrame(1, error_code=8)], Alive()),
    "generic/2/5": (lambda peer: [*call(peer), 1, PriorityFrame(1, depends_on=0, stream_weight=255)], Alive()),
    "generic/3.1/1": (lambda peer: call(peer), Answered()),
    "generic/3.1/2": (
        lambda peer: [request(peer), DataFrame(1, b"\0\0\0"), DataFrame(1, b"\0\1x"), body()],
        Answered(),
    ),
    "generic/3.1/3": (
        lambda peer: [request(peer), DataFrame(1, message(b"x"), pad_length=5, flags=["PADDED", "END_STREAM"])],
        Answered(),
    ),
    "generic/3.2/1": (lambda peer: call(peer), Answered()),
    "generic/3.2/2": (
        lambda peer: [HeadersFrame(1, peer.block(head("unary")), pad_length=6, flags=[END, "PADDED"]), body()],
        Answered(),
    ),
    "generic/3.2/3": (
        lambda peer: [HeadersFrame(1, peer.block(head("unary")), stream_weight=255, flags=[END, "PRIORITY"]), body()],
        Answered(),
    ),
    "generic/3.3/1": (lambda peer: [PriorityFrame(1, stream_weight=0), *call(peer)], Answered()),
    "generic/3.3/2": (lambda peer: [PriorityFrame(1, stream_weight=255), *call(peer)], Answered()),
    "generic/3.3/3": (lambda peer: [PriorityFrame(1, depends_on=3, stream_weight=255), *call(peer)], Answered()),
    "generic/3.3/4": (lambda peer: [PriorityFrame(1, depends_on=3, exclusive=True), *call(peer)], Answered()),
    "generic/3.3/5": (lambda peer: [PriorityFrame(5, depends_on=3), *call(peer, 3)], Answered(stream=3)),
    "generic/3.4/1": (lambda peer: [*waiting(peer), RstStreamFrame(1, error_code=8)], Alive()),
    "generic/3.5/1": (lambda _: [SettingsFrame(settings={3: 100})], Alive()),
    "generic/3.7/1": (lambda _: [PingFrame(opaque_data=b"h2spec01")], Alive()),
    "generic/3.8/1": (lambda _: [GoAwayFrame(0)], Alive()),
    "generic/3.9/1": (lambda peer: [WindowUpdateFrame(0, window_increment=1), *call(peer)], Answered()),
    "generic/3.9/2": (lambda peer: [request(peer), WindowUpdateFrame(1, window_increment=1), body()], Answered()),
    "generic/3.10/1": (lambda peer: pieces(peer, 1), Answered()),
    "generic/3.10/2": (lambda peer: pieces(peer, 3), Answered()),
    "generic/4/1": (lambda peer: [request(peer, method="GET", end=True)], Answered("405")),
    "generic/4/2": (lambda peer: [request(peer, method="HEAD", end=True)], Answered("405")),
    "generic/4/3": (lambda peer: call(peer), Answered()),
    "generic/4/4": (
        lambda peer: [request(peer), DataFrame(1, message(b"x")), fields(peer, [("x-trailer", "x")])],
        Answered(),
    ),
    "generic/5/1": represented("be"),  # the newest field of the request
    "generic/5/2": represented("7a 01 78"),  # user-agent: x
    "generic/5/3": represented("7a 81 f3"),
    "generic/5/4": represented("40 06 782d74657374 01 78"),  # x-test: x
    "generic/5/5": represented("40 85 f2b24a84ff 81 f3"),
    "generic/5/6": represented("0f 2b 01 78"),
    "generic/5/7": represented("0f 2b 81 f3"),
    "generic/5/8": represented("00 06 782d74657374 01 78"),
    "generic/5/9": represented("00 85 f2b24a84ff 81 f3"),
    "generic/5/10": represented("1f 2b 01 78"),
    "generic/5/11": represented("1f 2b 81 f3"),
    "generic/5/12": represented("10 06 782d74657374 01 78"),
    "generic/5/13": represented("10 85 f2b24a84ff 81 f3"),
    "generic/5/14": resized("3f 01"),  # to 32
    "generic/5/15": resized("3f 01 3f e1 1f"),  # to 32, and back
}

CONNECTION: dict[str, Case] = {
    "http2/3.5/1": (lambda _: [], Alive()),
    "http2/4.1/1": (lambda _: [raw(255, 0, 0, bytes(8))], Alive()),
    "http2/4.1/2": (lambda _: [raw(6, 0x16, 0, bytes(8))], Alive()),
    "http2/4.1/3": (lambda _: [raw(6, 0, 1 << 31, bytes(8))], Alive()),
    "http2/4.2/1": (
        lambda peer: [request(peer), DataFrame(1, message(bytes(16_379)), flags=["END_STREAM"])],
        Answered(),
    ),
    "http2/4.2/2": (lambda peer: [request(peer), raw(0, 1, 1, bytes(16_385))], Ended(SIZE)),
    "http2/4.2/3": (lambda _: [raw(1, 5, 1, bytes(16_385))], Ended(SIZE)),
    "http2/4.3/1": block("3f ff ff ff ff ff"),
    "http2/4.3/2": (lambda peer: [pieces(peer, 1)[0], PriorityFrame(1)], Ended(PROTOCOL)),
    "http2/4.3/3": (lambda peer: [pieces(peer, 1)[0], request(peer, stream=3)], Ended(PROTOCOL)),
    "http2/5.4.1/1": (lambda _: [raw(6, 0, 3, bytes(8))], Ended(PROTOCOL)),
    "http2/5.4.1/2": (lambda _: [raw(6, 0, 3, bytes(8))], Ended(PROTOCOL)),
    "http2/5.5/1": (lambda _: [raw(0x16, 0, 0, bytes(8))], Alive()),
    "http2/5.5/2": (lambda peer: [pieces(peer, 1)[0], raw(0x16, 0, 0, bytes(8))], Ended(PROTOCOL)),
    "http2/6.5/1": (lambda _: [raw(4, 1, 0, bytes(6))], Ended(SIZE)),
    "http2/6.5/2": (lambda _: [raw(4, 0, 1, bytes(6))], Ended(PROTOCOL)),
    "http2/6.5/3": (lambda _: [raw(4, 0, 0, bytes(3))], Ended(SIZE)),
    "http2/6.5.2/1": (lambda _: [SettingsFrame(settings={2: 2})], Ended(PROTOCOL)),
    "http2/6.5.2/2": (lambda _: [SettingsFrame(settings={4: 2**31})], Ended(FLOW)),
    "http2/6.5.2/3": (lambda _: [SettingsFrame(settings={5: 16_383})], Ended(PROTOCOL)),
    "http2/6.5.2/4": (lambda _: [SettingsFrame(settings={5: 2**24})], Ended(PROTOCOL)),
    "http2/6.5.2/5": (lambda _: [SettingsFrame(settings={0xFF: 1})], Alive()),
    "http2/6.5.3/1": (
        lambda peer: [raw(4, 0, 0, b"\0\4\0\0\0\x64\0\4\0\0\0\x01"), *call(peer), WindowUpdateFrame(1, 100)],
        Answered(),
    ),
    "http2/6.5.3/2": (lambda _: [SettingsFrame(settings={1: 0})], Alive()),
    "http2/6.7/1": (lambda _: [PingFrame(opaque_data=b"h2spec01")], Alive()),
    "http2/6.7/2": (lambda _: [PingFrame(opaque_data=b"invalid!", flags=["ACK"])], Alive()),
    "http2/6.7/3": (lambda _: [raw(6, 0, 1, bytes(8))], Ended(PROTOCOL)),
    "http2/6.7/4": (lambda _: [raw(6, 0, 0, bytes(6))], Ended(SIZE)),
    "http2/6.8/1": (lambda _: [raw(7, 0, 1, bytes(8))], Ended(PROTOCOL)),
    "http2/6.9/1": (lambda _: [raw(8, 0, 0, bytes(4))], Ended(PROTOCOL)),
    "http2/6.9/3": (lambda _: [raw(8, 0, 0, bytes(3))], Ended(SIZE)),
    "http2/6.9.1/2": (lambda _: [raw(8, 0, 0, b"\x7f\xff\xff\xff")] * 2, Ended(FLOW)),
    "http2/6.9.2/3": (lambda _: [SettingsFrame(settings={4: 2**31})], Ended(FLOW)),
    "http2/7/1": (lambda _: [GoAwayFrame(0, error_code=0xFF)], Alive()),
    "http2/7/2": (lambda peer: [*waiting(peer), RstStreamFrame(1, error_code=0xFF)], Alive()),
}

STREAMS: dict[str, Case] = {
    "http2/5.1/1": (lambda _: [body()], Ended(PROTOCOL)),
    "http2/5.1/2": (lambda _: [RstStreamFrame(1, error_code=8)], Ended(PROTOCOL)),
    "http2/5.1/3": (lambda _: [WindowUpdateFrame(1, window_increment=100)], Ended(PROTOCOL)),
    "http2/5.1/4": (lambda peer: [ContinuationFrame(1, peer.block(head("unary")), flags=[END])], Ended(PROTOCOL)),
    "http2/5.1/5": (lambda peer: [*waiting(peer), DataFrame(1, b"x")], Reset(CLOSED)),
    "http2/5.1/6": (lambda peer: [*waiting(peer), request(peer)], Reset(CLOSED)),
    "http2/5.1/7": (lambda peer: [*waiting(peer), ContinuationFrame(1, b"", flags=[END])], Ended(PROTOCOL)),
    "http2/5.1/8": (lambda peer: [request(peer), RstStreamFrame(1, error_code=8), body()], Reset(CLOSED)),
    "http2/5.1/9": (lambda peer: [request(peer), RstStreamFrame(1, error_code=8), request(peer)], Ended(CLOSED)),
    "http2/5.1/10": (
        lambda peer: [request(peer), RstStreamFrame(1, error_code=8), ContinuationFrame(1, b"", flags=[END])],
        Ended(PROTOCOL),
    ),
    "http2/5.1/11": (lambda peer: [*call(peer), 1, DataFrame(1, b"x")], Reset(CLOSED)),
    "http2/5.1/12": (lambda peer: [*call(peer), 1, request(peer)], Ended(CLOSED)),
    "http2/5.1/13": (lambda peer: [*call(peer), 1, ContinuationFrame(1, b"", flags=[END])], Ended(PROTOCOL)),
    "http2/5.1.1/1": (lambda peer: call(peer, 2), Ended(PROTOCOL)),
    "http2/5.1.1/2": (lambda peer: [*call(peer, 5), *call(peer, 3)], Ended(CLOSED)),
    "http2/5.1.2/1": (
        lambda peer: [request(peer, stream=stream, call="hang") for stream in (1, 3, 5)],
        Reset(REFUSED, stream=5),
    ),
    "http2/5.3.1/1": (lambda _: [raw(1, 0x25, 1, b"\0\0\0\1\x10\x82")], Ended(PROTOCOL)),
    "http2/5.3.1/2": (lambda peer: [*waiting(peer), PriorityFrame(1, depends_on=1)], Reset(PROTOCOL)),
    "http2/6.1/1": (lambda _: [raw(0, 1, 0, b"x")], Ended(PROTOCOL)),
    "http2/6.1/2": (lambda peer: [*waiting(peer), DataFrame(1, b"x")], Reset(CLOSED)),
    "http2/6.1/3": (lambda peer: [request(peer), raw(0, 9, 1, b"\x10x")], Ended(PROTOCOL)),
    "http2/6.2/1": (lambda peer: [pieces(peer, 1)[0], PriorityFrame(1)], Ended(PROTOCOL)),
    "http2/6.2/2": (lambda peer: [pieces(peer, 1)[0], request(peer, stream=3)], Ended(PROTOCOL)),
    "http2/6.2/3": (lambda peer: [raw(1, 5, 0, peer.block(head("unary")))], Ended(PROTOCOL)),
    "http2/6.2/4": (lambda peer: [raw(1, 0x0D, 1, b"\xff" + peer.block(head("unary")))], Ended(PROTOCOL)),
    "http2/6.3/1": (lambda _: [raw(2, 0, 0, bytes(5))], Ended(PROTOCOL)),
    "http2/6.3/2": (lambda peer: [*waiting(peer), raw(2, 0, 1, bytes(4))], Reset(SIZE)),
    "http2/6.4/1": (lambda _: [raw(3, 0, 0, bytes(4))], Ended(PROTOCOL)),
    "http2/6.4/2": (lambda _: [RstStreamFrame(1, error_code=8)], Ended(PROTOCOL)),
    "http2/6.4/3": (lambda peer: [*waiting(peer), raw(3, 0, 1, bytes(3))], Ended(SIZE)),
    "http2/6.9/2": (lambda peer: [*waiting(peer), raw(8, 0, 1, bytes(4))], Reset(PROTOCOL)),
    "http2/6.9.1/3": (lambda peer: [*waiting(peer), *[raw(8, 0, 1, b"\x7f\xff\xff\xff")] * 2], Reset(FLOW)),
    "http2/6.10/1": (lambda peer: pieces(peer, 3), Answered()),
    "http2/6.10/2": (lambda peer: [*pieces(peer, 3)[:2], body()], Ended(PROTOCOL)),
    "http2/6.10/3": (lambda peer: [pieces(peer, 1)[0], raw(9, 4, 0, b"\x82")], Ended(PROTOCOL)),
    "http2/6.10/4": (lambda peer: [request(peer), ContinuationFrame(1, b"", flags=[END])], Ended(PROTOCOL)),
    "http2/6.10/5": (lambda peer: [*pieces(peer, 1)[:2], ContinuationFrame(1, b"", flags=[END])], Ended(PROTOCOL)),
    "http2/6.10/6": (
        lambda peer: [request(peer), DataFrame(1, b"\0"), ContinuationFrame(1, b"", flags=[END])],
        Ended(PROTOCOL),
    ),
}

MESSAGES: dict[str, Case] = {
    "http2/8.1/1": (lambda peer: [request(peer, call="hang"), request(peer)], Reset(PROTOCOL)),
    "http2/8.1.2/1": malformed(*head("unary", ("X-TEST", "ok"))),
    "http2/8.1.2.1/1": malformed((":test", "ok"), *head("unary")),
    "http2/8.1.2.1/2": malformed((":status", "200"), *head("unary")),
    "http2/8.1.2.1/3": (
        lambda peer: [request(peer, call="hang"), fields(peer, [(":method", "POST")])],
        Reset(PROTOCOL),
    ),
    "http2/8.1.2.1/4": malformed(*without(":path"), (":path", "/test.Echo/unary")),
    "http2/8.1.2.2/1": malformed(*head("unary", ("connection", "keep-alive"))),
    "http2/8.1.2.2/2": malformed(*head("unary", te="trailers, deflate")),
    "http2/8.1.2.3/1": malformed((":path", ""), *without(":path")),
    "http2/8.1.2.3/2": malformed(*without(":method")),
    "http2/8.1.2.3/3": malformed(*without(":scheme")),
    "http2/8.1.2.3/4": malformed(*without(":path")),
    "http2/8.1.2.3/5": malformed((":method", "POST"), *head("unary")),
    "http2/8.1.2.3/6": malformed((":scheme", "http"), *head("unary")),
    "http2/8.1.2.3/7": malformed((":path", "/"), *head("unary")),
    "http2/8.1.2.6/1": (lambda peer: [request(peer, ("content-length", "1")), body()], Reset(PROTOCOL)),
    "http2/8.1.2.6/2": (
        lambda peer: [request(peer, ("content-length", "1")), DataFrame(1, b"\0\0\0\0\2"), DataFrame(1, b"hi")],
        Reset(PROTOCOL),
    ),
    "http2/8.2/1": (lambda peer: [*waiting(peer), PushPromiseFrame(1, 2, flags=[END])], Ended(PROTOCOL)),
}

HPACK: dict[str, Case] = {
    "hpack/2.3.3/1": block("82 86 c6"),  # 70, of a table with 61 fields
    "hpack/2.3.3/2": block("82 86 0f 37 01 78"),
    "hpack/4.2/1": block("82 86 84 3f 01"),
    "hpack/5.2/1": block("82 86 00 85 f2b24a84ff 84 49509fff"),
    "hpack/5.2/2": block("82 86 00 85 f2b24a84ff 83 495090"),
    "hpack/5.2/3": block("82 86 00 85 f2b24a84ff 87 4951fffffffa7f"),
    "hpack/6.1/1": block("80"),
    "hpack/6.3/1": block("3f e2 1f 82"),
}

CASES: dict[str, Case] = {**GENERIC, **CONNECTION, **STREAMS, **MESSAGES, **HPACK}
