"""The memory that requests may use before they are read: a budget for each peer, and one for the whole process.

A request that is received counts with its bytes. A message of more than a stream's window reserves all its bytes before
its peer may send more of it, and waits while others have them. All of this is for one event loop.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field

# Of each budget, what large messages leave to small ones.
_FOR_SMALL: Final = 0.25
# Large messages that wait for their bytes, of one peer and of all.
_MAX_WAITING_OF_PEER: Final = 32
_MAX_WAITING: Final = 128
# How often those that wait are looked at.
_LOOK_SECONDS: Final = 0.02


class InputLimits(BaseModel):
    """Memory and time for requests that are not read yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    process_bytes: int = Field(
        default=384 * 2**20, ge=2**20, description="Of all requests that are received or parsed; then more are refused."
    )
    peer_bytes: int = Field(default=192 * 2**20, ge=2**20, description="The same, of one address.")
    wait_seconds: float = Field(
        default=30.0, gt=0, description="A message over 1 MiB waits so long for its bytes, and is then refused."
    )
    message_seconds: float = Field(default=300.0, gt=0, description="For a message, from its first byte to its last.")
    stall_seconds: float = Field(
        default=10.0, gt=0, description="Time over which an unfinished message must reach bytes_per_second."
    )
    bytes_per_second: float = Field(default=1024.0, ge=0, description="Least rate of an unfinished message.")


class PeerInput:
    """The memory that one peer's requests use."""

    __slots__ = ("__weakref__", "_budget", "used", "waiting")

    def __init__(self, budget: "InputBudget") -> None:
        self._budget = budget
        self.used = 0
        self.waiting = 0

    def add(self, size: int) -> bool:
        """Counts bytes that have come, or fewer if `size` is negative; whether there was room for them."""
        budget = self._budget
        self.used += size
        budget.used += size
        return size <= 0 or (self.used <= budget.limits.peer_bytes and budget.used <= budget.limits.process_bytes)

    def reserve(self, size: int, decide: Callable[[bool], None]) -> "Reservation | None":
        """Counts the bytes of a large message before they come: None if they are counted.

        Otherwise it calls `decide` later: with True once they are counted, with False when they were waited for too
        long, or soon if they are too many to wait for.
        """
        return self._budget.reserve(self, size, decide)

    async def reserved(self, size: int) -> bool:
        """Waits until the bytes of a large message are counted; False if that takes too long."""
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self.reserve(size, decided.set_result)
        if waiting is None:
            return True
        try:
            return await asyncio.shield(decided)
        except asyncio.CancelledError:
            waiting.cancel()
            if decided.done() and decided.result():
                self.add(-size)
            raise

    def hold(self, size: int, *, is_counted: bool = False) -> "InputHold":
        """Counts bytes until `release`: those of a request that is being parsed. `is_counted` says they are already."""
        if not is_counted:
            self.add(size)
        return InputHold(self, size)


class InputHold:
    """Bytes of a request between its arrival and the end of its parsing; freed once, by the first release."""

    __slots__ = ("_on_release", "_peer", "_size", "is_claimed")

    def __init__(self, peer: PeerInput, size: int) -> None:
        self._peer = peer
        self._size = size
        self._on_release: Callable[[], None] | None = None
        self.is_claimed = False  # by what parses the request, which then releases it

    def grow(self, size: int) -> bool:
        """Counts so many more; whether there was room for them."""
        self._size += size
        return self._peer.add(size)

    def on_release(self, act: Callable[[], None]) -> None:
        """Calls `act` when the bytes are freed."""
        self._on_release = act

    def release(self) -> None:
        """Frees the bytes."""
        size, self._size = self._size, 0
        act, self._on_release = self._on_release, None
        if size:
            self._peer.add(-size)
        if act is not None:
            act()


_HOLD: ContextVar[InputHold | None] = ContextVar("input_hold", default=None)


def offer_hold(hold: InputHold | None) -> None:
    """Records what counts the message that this task deserializes next."""
    _HOLD.set(hold)


def claim_hold() -> InputHold | None:
    """The hold of the message that is being deserialized; the caller releases it once the message is parsed."""
    hold = _HOLD.get()
    if hold is not None:
        hold.is_claimed = True
    return hold


class Pace:
    """The pace of a message: its beginning, and the bytes that had come when its rate was last looked at."""

    __slots__ = ("_began", "_bytes", "_looked", "messages")

    def __init__(self, messages: int, now: float, received: int) -> None:
        self.messages = messages
        self._began = self._looked = now
        self._bytes = received

    def is_slow(self, now: float, received: int, limits: InputLimits) -> bool:
        """True if it takes too long, or has come too slowly since the last look, which was a stall's time ago."""
        if now - self._began > limits.message_seconds:
            return True
        seconds = now - self._looked
        if seconds < limits.stall_seconds:
            return False
        if received - self._bytes < seconds * limits.bytes_per_second:
            return True
        self._looked, self._bytes = now, received
        return False


class Reservation:
    """The bytes of a message that waits for them; `cancel` ends that."""

    __slots__ = ("decide", "is_cancelled", "peer", "size", "until")

    def __init__(self, peer: PeerInput, size: int, until: float, decide: Callable[[bool], None]) -> None:
        self.peer = peer
        self.size = size
        self.until = until
        self.decide = decide
        self.is_cancelled = False

    def cancel(self) -> None:
        """The message is not wanted any more."""
        self.is_cancelled = True


class InputBudget:
    """The budget of a process, for all its servers."""

    def __init__(self, limits: InputLimits) -> None:
        self.limits = limits
        self.used = 0
        self._peers: WeakValueDictionary[str, PeerInput] = WeakValueDictionary()
        self._waiting: list[Reservation] = []
        self._is_looking = False

    def of_peer(self, host: str) -> PeerInput:
        """The account of an address; kept as long as anyone holds it."""
        peer = self._peers.get(host)
        if peer is None:
            peer = self._peers[host] = PeerInput(self)
        return peer

    def reserve(self, peer: PeerInput, size: int, decide: Callable[[bool], None]) -> Reservation | None:
        """Reserves as PeerInput.reserve does."""
        if not self._waiting and self._fits(peer, size):
            peer.add(size)
            return None
        loop = asyncio.get_running_loop()
        waiting = Reservation(peer, size, loop.time() + self.limits.wait_seconds, decide)
        is_hopeless = size > (1 - _FOR_SMALL) * min(self.limits.peer_bytes, self.limits.process_bytes)
        if is_hopeless or peer.waiting >= _MAX_WAITING_OF_PEER or len(self._waiting) >= _MAX_WAITING:
            waiting.until = loop.time()
        self._waiting.append(waiting)
        peer.waiting += 1
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(_LOOK_SECONDS, self._look)
        return waiting

    def _fits(self, peer: PeerInput, size: int) -> bool:
        part, limits = 1 - _FOR_SMALL, self.limits
        return peer.used + size <= part * limits.peer_bytes and self.used + size <= part * limits.process_bytes

    def _look(self) -> None:
        """Gives those that wait their bytes, in their order but for peers that use all of theirs."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiting, self._waiting = self._waiting, []
        left = [each for each in waiting if not self._is_decided(each, now)]
        self._waiting = left + self._waiting
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            loop.call_later(_LOOK_SECONDS, self._look)

    def _is_decided(self, waiting: Reservation, now: float) -> bool:
        is_granted = not waiting.is_cancelled and self._fits(waiting.peer, waiting.size)
        if not (is_granted or waiting.is_cancelled or now >= waiting.until):
            return False
        waiting.peer.waiting -= 1
        if is_granted:
            waiting.peer.add(waiting.size)
        if not waiting.is_cancelled:
            waiting.decide(is_granted)
        return True


class LargeMessage:
    """Of one stream, the bytes that are counted and have not come, and those that wait to be counted."""

    __slots__ = ("_counted", "_reservation", "_reserve")

    def __init__(self, reserve: Callable[[int], Reservation | None]) -> None:
        self._reserve = reserve  # None if that is done, and else `add` is called later
        self._counted = 0
        self._reservation: Reservation | None = None

    @property
    def waits(self) -> bool:
        """True if bytes wait to be counted."""
        return self._reservation is not None

    def beyond_counted(self, more: int) -> int:
        """The number of bytes, of `more` that have come, that were not counted before."""
        counted = min(more, self._counted)
        self._counted -= counted
        return more - counted

    def is_counted(self, missing: int) -> bool:
        """True if all that is still to come is counted; if not, it waits for that."""
        if self._reservation is None and missing > self._counted:
            size = missing - self._counted
            self._reservation = self._reserve(size)
            if self._reservation is None:
                self._counted += size
        return self._reservation is None

    def add(self, size: int) -> None:
        """The bytes that it waited for are counted."""
        self._reservation = None
        self._counted += size

    def drop(self) -> int:
        """Waits for no more; returns the bytes that are counted and have not come, for the caller to give back."""
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        counted, self._counted = self._counted, 0
        return counted
