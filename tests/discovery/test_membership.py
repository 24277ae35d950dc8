"""The workers that a watcher sees before, during and after an outage."""

from support.router.worker_views import worker

from discovery.membership import Membership


def members(*worker_ids: str) -> Membership:
    """A membership that knows these, beyond doubt."""
    membership = Membership()
    membership.replace({one.encode(): worker(one) for one in worker_ids})
    return membership


def test_without_doubt_a_removed_worker_is_gone_at_once() -> None:
    membership = members("a", "b")
    membership.remove(b"a")
    assert membership.workers == (worker("b"),)


def test_without_doubt_a_listing_replaces_everyone() -> None:
    membership = members("a", "b")
    membership.replace({b"c": worker("c")})
    assert membership.workers == (worker("c"),)


def test_in_doubt_an_empty_listing_is_not_believed() -> None:
    membership = members("a")
    membership.hold_removals()
    membership.replace({})
    assert membership.workers == (worker("a"),)


def test_in_doubt_a_removal_is_not_believed() -> None:
    membership = members("a")
    membership.hold_removals()
    membership.remove(b"a")
    assert membership.workers == (worker("a"),)


def test_in_doubt_a_new_worker_and_a_change_are_believed() -> None:
    membership = members("a")
    membership.hold_removals()
    membership.replace({b"a": worker("a", 2), b"b": worker("b")})
    assert membership.workers == (worker("a", 2), worker("b"))


def test_when_the_doubt_ends_who_is_absent_is_gone() -> None:
    membership = members("a", "b")
    membership.hold_removals()
    membership.replace({b"b": worker("b")})
    membership.apply_removals()
    assert membership.workers == (worker("b"),)


def test_when_the_doubt_ends_who_has_come_back_stays() -> None:
    membership = members("a")
    membership.hold_removals()
    membership.remove(b"a")
    membership.put(b"a", worker("a", 2))
    membership.apply_removals()
    assert membership.workers == (worker("a", 2),)


def test_removing_someone_unknown_has_no_effect() -> None:
    membership = members("a")
    membership.remove(b"b")
    assert membership.workers == (worker("a"),)
