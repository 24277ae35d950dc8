"""The cost of work on each worker, in seconds, learnt from the work that this router has sent there."""

from dataclasses import dataclass, field

from discovery.pairing import can_hand_over
from discovery.record import Domain, WorkerRecord, steps_apart
from engine_protocol.timing_profile import TimingProfile
from router.routing.latency import Clock
from router.routing.prefix.prefix_caches import Cache
from router.routing.prefix.work import RankWork, WorkShares
from runtime.clock import monotonic

# How much of a measurement's weight is left when the next one comes.
_KEPT = 0.97
# The least weight of the prior: measurements of a single size would leave the line undetermined.
_LEAST_PRIOR = 0.02
# What long contexts add is believed once it is so many times its standard error.
_LEAST_CERTAINTY = 4.0
# Workers of a group count as equal until the group has so many measurements.
_BELIEVED = 8
# A single measurement counts at most as so many times the usual, and at least as the reciprocal.
_MOST_RATIO = 8.0
# A worker counts as slower or faster than others from this relative difference on.
_CHANCE = 0.25
# The weight of a new measurement in a worker's slowness.
_FACTOR_STEP = 0.05
# The same for how far the usual cost is off, which all members of the group measure.
_BIAS_STEP = 0.1
# After so many seconds without a measurement so much is left of what the earlier ones say: of a usual cost, and of one
# worker's slowness, which is measured less often.
_UNUSED_SECONDS = 10.0
_USUAL_LEFT = 0.5
_SLOWNESS_LEFT = 0.8


class LinearCost:
    """Seconds as `base + amount * (rate + context * bend)`: least squares, in which older measurements count less.

    `context` is what the work must look back on, for each unit of the amount: the tokens before a prompt's, on average.
    It begins with a prior that weighs as much as two measurements, one of amount 0 and one of amount `typical`; `bend`
    is 0 until contexts far beyond `typical` were measured.
    """

    def __init__(self, base: float, rate: float, typical: float) -> None:
        self._prior = (base, rate, typical)
        self._weight = 1.0  # of the prior
        # Sums over (1, amount, amount * context): of each times each, and of each and the seconds times the seconds.
        self._products = [0.0] * 6
        self._seconds = [0.0] * 4
        self.count = self._count_seen = 0
        self.bias = 1.0  # recently, what was measured over what was predicted
        self.base, self.rate, self.bend = base, rate, 0.0

    def seconds(self, amount: float, context: float = 0.0) -> float:
        """The predicted time for an amount."""
        return self.base + amount * (self.rate + context * self.bend)

    def add(self, amount: float, seconds: float, context: float = 0.0) -> None:
        """Adds a measurement."""
        self.count += 1
        self._weight = max(_LEAST_PRIOR, self._weight * _KEPT)
        # Of the same size as the amount, so that the sums can be compared.
        bent = amount * context / self._prior[2]
        new = (1.0, amount, bent, amount * amount, amount * bent, bent * bent)
        self._products = [kept * _KEPT + each for kept, each in zip(self._products, new, strict=True)]
        of_seconds = (seconds, amount * seconds, bent * seconds, seconds * seconds)
        self._seconds = [kept * _KEPT + each for kept, each in zip(self._seconds, of_seconds, strict=True)]
        self._fit()

    def fade(self) -> None:
        """Comes closer to the prior, if nothing was measured since the last call.

        A cost that is believed to be high is not measured again, since its work is done elsewhere: it must not stay.
        """
        if self.count == self._count_seen:
            self._weight = 1.0 - _USUAL_LEFT * (1.0 - self._weight)
            self._products = [each * _USUAL_LEFT for each in self._products]
            self._seconds = [each * _USUAL_LEFT for each in self._seconds]
            self.bias = 1.0 + _USUAL_LEFT * (self.bias - 1.0)
            self._fit()
        self._count_seen = self.count

    def _fit(self) -> None:
        base, rate, typical = self._prior
        weight = self._weight
        n, x, z, xx, xz, zz = self._products
        y, xy, zy, yy = self._seconds
        n, x, xx = n + 2 * weight, x + weight * typical, xx + weight * typical * typical
        last = base + rate * typical
        y, xy, yy = y + weight * (base + last), xy + weight * typical * last, yy + weight * (base * base + last * last)
        # Contexts that are not far beyond the typical amount say nothing of what longer ones would add.
        if zz > typical * typical:
            bent = [[n, x, z], [x, xx, xz], [z, xz, zz + typical * typical]]
            if found := _significant(bent, [y, xy, zy], yy):
                self.base, self.rate, self.bend = found[0], found[1], found[2] / typical
                return
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 0 else 0.0
        intercept = (y - slope * x) / n
        if intercept < 0:
            intercept, slope = 0.0, max(0.0, xy / xx)
        self.base, self.rate, self.bend = intercept, slope, 0.0


def _significant(products: list[list[float]], sums: list[float], squares: float) -> list[float] | None:
    """The three coefficients of least squares, if none is negative, and the last one is not chance."""
    found = _solve(products, sums)
    share = _solve(products, [0.0, 0.0, 1.0])
    if found is None or share is None or min(found) < 0:
        return None
    rest = max(0.0, squares - sum(each * other for each, other in zip(found, sums, strict=True)))
    variance = rest / max(1.0, products[0][0] - len(sums)) * max(0.0, share[2])
    return found if found[2] * found[2] > _LEAST_CERTAINTY**2 * variance else None


def _solve(products: list[list[float]], sums: list[float]) -> list[float] | None:
    """The solution of linear equations; None if they do not determine it."""
    rows, size = [[*row, right] for row, right in zip(products, sums, strict=True)], len(sums)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            return None
        for row in range(size):
            if row != column:
                share = rows[row][column] / rows[column][column]
                rows[row] = [each - share * other for each, other in zip(rows[row], rows[column], strict=True)]
    return [rows[row][size] / rows[row][row] for row in range(size)]


@dataclass(frozen=True, slots=True)
class Priors:
    """The costs that are assumed before anything is measured."""

    prefill_base_seconds: float = 0.01
    prefill_tokens_per_second: float = 20_000.0
    transfer_base_seconds: float = 0.003
    transfer_bytes_per_second: float = 2e9
    entry_seconds: float = 0.005  # until a request with its KV in place joins the decoding batch
    load_base_seconds: float = 0.003  # of a tier below the pool of a device
    host_bytes_per_second: float = 25e9
    disk_bytes_per_second: float = 1.5e9
    stream_seconds: float = 5e-5  # added to each token of the other streams by one more stream


def priors_of(profile: TimingProfile) -> Priors:
    """The priors that a measured model gives. How fast KV moves is not in its profile."""
    return Priors(
        prefill_base_seconds=profile.prefill_base_seconds,
        prefill_tokens_per_second=1 / max(profile.prefill_token_seconds, 1e-9),
        stream_seconds=profile.stream_seconds,
    )


class RelativeCost:
    """The usual cost of a group times the slowness of one member. Each measurement also corrects the usual cost.

    `slowness` is the ratio to the usual cost. Small differences are mostly chance and count as none.
    """

    __slots__ = ("_is_new", "_latest", "_measured", "slowness", "usual")

    def __init__(self, usual: LinearCost) -> None:
        self.usual = usual
        self._measured = self.slowness = 1.0
        self._latest = _MOST_RATIO  # the last ratio to the usual cost
        self._is_new = False  # whether there was a measurement since the last `fade`

    def seconds(self, amount: float, context: float = 0.0) -> float:
        """The predicted time for an amount."""
        usual = self.usual
        return self.slowness * (usual.base + amount * (usual.rate + context * usual.bend))

    def add(self, amount: float, seconds: float, context: float = 0.0) -> None:
        """Adds a measurement, of which an outlier counts only in part."""
        usual = self.usual.seconds(amount, context)
        seconds = min(seconds, _MOST_RATIO * usual)
        self.usual.add(amount, seconds, context)
        self._is_new = True
        latest = max(1 / _MOST_RATIO, seconds / max(usual, 1e-9))
        # The lesser of two in a row: a single one that took long says nothing about the worker.
        ratio, self._latest = min(latest, self._latest), latest
        bias = self.usual.bias
        self.usual.bias += _BIAS_STEP * (ratio - bias)
        if self.usual.count >= _BELIEVED:
            # As long as all are quicker, or slower, than the usual cost says, that is not the merit of this one.
            self._set_measured(self._measured + _FACTOR_STEP * (ratio / bias - self._measured))

    def fade(self) -> None:
        """Comes closer to the usual cost, if nothing was measured since the last call."""
        if not self._is_new:
            self._set_measured(1.0 + _SLOWNESS_LEFT * (self._measured - 1.0))
        self._is_new = False

    def _set_measured(self, slowness: float) -> None:
        self._measured = slowness
        self.slowness = slowness if abs(slowness - 1.0) > _CHANCE else 1.0


class Link(RelativeCost):
    """The cost of moving bytes from one worker to another. `exists` is false where the other cannot read them.

    `distance` are the seconds that a configured preference for near pairs adds.
    """

    __slots__ = ("distance", "exists")

    def __init__(self, usual: LinearCost, exists: bool, distance: float) -> None:
        super().__init__(usual)
        self.exists = exists
        self.distance = distance


@dataclass(frozen=True, slots=True)
class Nearness:
    """The bound on handoffs, and what each step away costs."""

    within: Domain | None = None
    far_seconds: float = 0.0

    def link(self, usual: LinearCost, owner: WorkerRecord, reader: WorkerRecord) -> Link:
        """The link from one worker to another, before anything is measured."""
        exists = can_hand_over(owner, reader, self.within)
        steps = steps_apart(owner.known_location, reader.known_location) if self.far_seconds else 0
        return Link(usual, exists, self.far_seconds * steps)


@dataclass(slots=True, eq=False)
class WorkerCost:
    """The measured costs of one worker. `links` are the links from it, by the reading process; `loans` are the same for
    loans of prefixes, whose blocks are digested on both sides.
    """

    record: WorkerRecord
    process: str
    prefill: RelativeCost  # of tokens
    entry: RelativeCost  # into the decoding batch
    transfer: LinearCost  # usual in its group, as is the next one
    loan: LinearCost
    ranks: tuple[RankWork, ...]
    nearness: Nearness = Nearness()
    links: dict[str, Link] = field(default_factory=dict)
    loans: dict[str, Link] = field(default_factory=dict)
    coming: int = 0  # requests that will decode there once their prompts are computed elsewhere

    def link_to(self, reader: "WorkerCost") -> Link:
        """The cost of moving bytes to another worker."""
        found = self.links.get(reader.process)
        if found is None:
            found = self.links[reader.process] = self.nearness.link(self.transfer, self.record, reader.record)
        return found

    def loan_to(self, reader: "WorkerCost") -> Link:
        """The cost of lending another worker bytes of the prefix cache."""
        found = self.loans.get(reader.process)
        if found is None:
            found = self.loans[reader.process] = self.nearness.link(self.loan, self.record, reader.record)
        return found


@dataclass(frozen=True, slots=True)
class _Usual:
    """The usual costs of a group of workers."""

    prefill: LinearCost
    entry: LinearCost
    transfer: LinearCost
    loan: LinearCost


class Costs:
    """The costs of all workers, and of moving KV between each two of them.

    Workers of one `group` count as equal until measurements show a difference, so a new one is predicted well at once.
    """

    def __init__(
        self, priors: Priors | None = None, clock: Clock = monotonic, nearness: Nearness | None = None
    ) -> None:
        self.priors = priors or Priors()
        self._nearness = nearness or Nearness()
        self.shares = WorkShares(clock)
        self._clock = clock
        self._fades_at = clock() + _UNUSED_SECONDS
        self._groups: dict[str, _Usual] = {}
        self._workers: dict[str, WorkerCost] = {}
        # By the id of the record, which WorkerCost keeps alive.
        self._by_record: dict[int, WorkerCost] = {}

    @property
    def num_workers(self) -> int:
        """The number of workers that are known."""
        return len(self._workers)

    def of(self, record: WorkerRecord) -> WorkerCost:
        """The measured costs of a worker."""
        found = self._by_record.get(id(record))
        if found is None:
            found = self._of_process(record)
            self._by_record.pop(id(found.record), None)
            found.record = record
            self._by_record[id(record)] = found
        return found

    def _of_process(self, record: WorkerRecord) -> WorkerCost:
        process = record.process
        found = self._workers.get(process)
        if found is None:
            # Workers of other roles are another group: who decodes beside it computes prompts more slowly.
            usual = self._usual(f"{record.layout_digest} {record.roles}")
            ranks = [self.shares.rank(Cache(process, rank)) for rank in range(max(1, record.data_parallel_ranks))]
            found = self._workers[process] = WorkerCost(
                record,
                process,
                RelativeCost(usual.prefill),
                RelativeCost(usual.entry),
                usual.transfer,
                usual.loan,
                tuple(ranks),
                self._nearness,
            )
        return found

    def fade(self) -> None:
        """Lets go, little by little, of what is not measured any more. Call it with each decision."""
        now = self._clock()
        if now < self._fades_at:
            return
        self._fades_at = now + _UNUSED_SECONDS
        for usual in self._groups.values():
            for cost in (usual.prefill, usual.entry, usual.transfer, usual.loan):
                cost.fade()
        for worker in self._workers.values():
            for relative in (worker.prefill, worker.entry, *worker.links.values(), *worker.loans.values()):
                relative.fade()

    def forget(self, process: str) -> None:
        """Forgets a worker that has left."""
        gone = self._workers.pop(process, None)
        if gone is not None:
            self._by_record.pop(id(gone.record), None)
            for rank in gone.ranks:
                self.shares.forget(rank)
        for cost in self._workers.values():
            cost.links.pop(process, None)
            cost.loans.pop(process, None)

    def _usual(self, group: str) -> _Usual:
        found = self._groups.get(group)
        if found is None:
            priors = self.priors
            found = self._groups[group] = _Usual(
                prefill=LinearCost(priors.prefill_base_seconds, 1 / priors.prefill_tokens_per_second, 4096.0),
                entry=LinearCost(priors.entry_seconds, 0.0, 1.0),
                transfer=LinearCost(priors.transfer_base_seconds, 1 / priors.transfer_bytes_per_second, 64e6),
                loan=LinearCost(priors.transfer_base_seconds, 1 / priors.transfer_bytes_per_second, 64e6),
            )
        return found
