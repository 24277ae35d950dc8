"""A text that grows by pieces."""

_MANY_PIECES = 1024  # so many of the last are joined to one


class GrowingText:
    """A text to which adding, and of which reading from a place on, take as long as that part is, not as the whole."""

    def __init__(self) -> None:
        self._joined: list[str] = []
        self._pieces: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        self._joined, self._pieces = ["".join((*self._joined, *self._pieces))], []
        return self._joined[0]

    def add(self, piece: str) -> None:
        """Adds a piece at the end."""
        if not piece:
            return
        self._pieces.append(piece)
        self._length += len(piece)
        if len(self._pieces) >= _MANY_PIECES:
            self._joined.append("".join(self._pieces))
            self._pieces.clear()

    def after(self, place: int) -> str:
        """The text after its first `place` characters."""
        found, begin = [], self._length
        for pieces in (self._pieces, self._joined):
            for piece in reversed(pieces):
                if begin <= place:
                    break
                begin -= len(piece)
                found.append(piece[max(0, place - begin) :])
        return "".join(reversed(found))
