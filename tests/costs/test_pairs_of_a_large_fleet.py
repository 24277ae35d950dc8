"""The search for pairs of workers, as the fleet grows."""

from dataclasses import replace

from support.growth import growth
from support.router.worker_views import worker

from discovery.pairing import partly_unpaired
from discovery.record import Location, WorkerRecord


def fleet(size: int) -> list[WorkerRecord]:
    prefills = [replace(worker(f"p{n}"), roles=("prefill",), location=Location(f"z{n % 3}")) for n in range(size)]
    return [*prefills, *(replace(one, worker_id=f"d{n}", roles=("decode",)) for n, one in enumerate(prefills))]


def test_the_pairs_of_a_large_fleet_are_found_by_their_kinds() -> None:
    assert growth(lambda records: partly_unpaired(records, "zone"), [fleet(100), fleet(1000)]) < 30
