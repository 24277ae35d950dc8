"""Each worker decides for itself, from the records of all, which one gets memory next and which gives it back."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sleeping.group import Member, has_to_sleep, may_wake

SIZE = 10


def member(name: str, num_bytes: int = 6, **state: object) -> Member:
    return Member(name, num_bytes, SIZE, **state)  # type: ignore[arg-type]


def asked(members: Sequence[Member], least_awake_since: float = 0.0) -> list[str]:
    """Those that are to give their memory back."""
    return [
        each.worker_id
        for each in members
        if has_to_sleep(each, [other for other in members if other is not each], least_awake_since)
    ]


def woken(members: Sequence[Member]) -> list[str]:
    return [each.worker_id for each in members if may_wake(each, [other for other in members if other is not each])]


def test_one_wakes_where_there_is_room() -> None:
    assert woken([member("a", 4, is_awake=True), member("b", wants_since=1.0)]) == ["b"]
    assert woken([member("a", 5, is_awake=True), member("b", wants_since=1.0)]) == []


def test_of_those_that_want_memory_the_first_gets_it_also_if_it_needs_more() -> None:
    small, large = member("a", 2, wants_since=2.0), member("b", 9, wants_since=1.0)
    awake = member("c", 2, is_awake=True)
    assert woken([small, large, awake]) == []
    assert asked([small, large, awake]) == ["c"]
    assert woken([small, large]) == ["b"]


def test_two_that_ask_at_once_are_not_both_let_in() -> None:
    assert woken([member("b", wants_since=1.0), member("a", wants_since=1.0)]) == ["a"]


def test_the_least_recently_used_sleeps_first_and_no_more_than_needed() -> None:
    late, early = member("late", 4, is_awake=True, used_at=2.0), member("early", 4, is_awake=True, used_at=1.0)
    assert asked([late, early, member("w", 4, wants_since=3.0)]) == ["early"]
    assert asked([late, early, member("w", 10, wants_since=3.0)]) == ["late", "early"]


def test_one_without_requests_sleeps_before_one_with_some() -> None:
    idle = member("idle", 5, is_awake=True, used_at=9.0)
    busy = member("busy", 5, is_awake=True, is_busy=True, used_at=1.0)
    assert asked([idle, busy, member("w", 5, wants_since=3.0)]) == ["idle"]


def test_a_busy_one_has_its_turn() -> None:
    busy = member("busy", is_awake=True, is_busy=True, awake_since=5.0)
    wanting = member("w", wants_since=6.0)
    assert asked([busy, wanting], least_awake_since=4.0) == []
    assert asked([busy, wanting], least_awake_since=6.0) == ["busy"]


def test_none_sleeps_in_vain() -> None:
    idle = member("idle", 5, is_awake=True)
    busy = member("busy", 5, is_awake=True, is_busy=True, awake_since=5.0)
    assert asked([idle, busy, member("w", 10, wants_since=6.0)], least_awake_since=4.0) == []


def test_none_sleeps_while_nobody_wants_memory() -> None:
    assert asked([member("a", is_awake=True), member("b")]) == []


_members = st.builds(
    member,
    name=st.just(""),
    num_bytes=st.integers(1, SIZE),
    is_awake=st.booleans(),
    is_busy=st.booleans(),
    awake_since=st.floats(0, 5),
    used_at=st.floats(0, 5),
    wants_since=st.none() | st.floats(0, 5),
)


@given(st.lists(_members, min_size=1, max_size=6))
def test_whatever_there_is_the_group_never_takes_more_than_it_has_and_always_goes_on(found: list[Member]) -> None:
    members = [replace(each, worker_id=str(index)) for index, each in enumerate(found)]
    while sum(each.num_bytes for each in members if each.is_awake) > SIZE:
        awake = next(index for index, each in enumerate(members) if each.is_awake)
        members[awake] = replace(members[awake], is_awake=False)
    waiting = {each.worker_id for each in members if each.wants_since is not None and not each.is_awake}
    for _ in range(40):
        for index, each in enumerate(members):  # one after another, as under the group's lock
            others = [*members[:index], *members[index + 1 :]]
            if may_wake(each, others):
                members[index] = replace(each, is_awake=True, wants_since=None)
                waiting.discard(each.worker_id)
            elif has_to_sleep(each, others, least_awake_since=9.0):
                members[index] = replace(each, is_awake=False)
            assert sum(each.num_bytes for each in members if each.is_awake) <= SIZE
    assert not waiting


@pytest.mark.parametrize("num_bytes", [1, SIZE])
def test_one_alone_wakes(num_bytes: int) -> None:
    assert woken([member("a", num_bytes, wants_since=1.0)]) == ["a"]
