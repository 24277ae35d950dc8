"""A worker's load between its reports, corrected by what this router has sent there and seen end."""


class CorrectedLoad:
    """One number of a worker's reports, such as its requests.

    A report counts a moment since the last one, and arrives later. So it is compared with the least and the most that
    this router had there since: compared with what is there as it arrives, each request that has just ended or begun
    would count wrongly until the next report.
    """

    __slots__ = ("_least", "_most", "elsewhere", "sent")

    def __init__(self) -> None:
        self.sent = self._least = self._most = 0  # by this router: now, and since the last report
        self.elsewhere = 0  # reported, and not explained by this router's; negative if less was reported than these

    @property
    def value(self) -> int:
        """The load now."""
        found = self.elsewhere + self.sent
        return found if found > 0 else 0  # without a call: each decision asks all workers

    def add(self, amount: int) -> None:
        """Adds what this router sends."""
        self.sent = sent = self.sent + amount
        if sent > self._most:
            self._most = sent

    def remove(self, amount: int) -> None:
        """Removes what has ended."""
        self.sent = sent = self.sent - amount
        if sent < self._least:
            self._least = sent

    def reported(self, amount: int) -> None:
        """Corrects the load by a report."""
        self.elsewhere = amount - min(max(amount, self._least), self._most)
        self._least = self._most = self.sent
