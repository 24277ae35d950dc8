"""The time for which a process could have given a sign of life, by what the kernel counts of its threads."""

import os

import pytest

from services.keeper import silence


@pytest.mark.parametrize("schedstat", ["0 0 0\n", "", OSError("no such file"), "not a number\n"])
def test_all_time_counts_where_the_kernel_does_not_count_waits(
    monkeypatch: pytest.MonkeyPatch, schedstat: str | OSError
) -> None:
    read = silence._read

    def reading(path: str) -> str:
        if not path.endswith("schedstat"):
            return read(path)
        if isinstance(schedstat, OSError):
            raise schedstat
        return schedstat

    monkeypatch.setattr(silence, "_read", reading)
    silent = silence.Silence(os.getpid())  # of which a thread can run: this one
    for _ in range(3):
        silent.add(1.0)
    assert silent.seconds == 2.0


def test_of_the_time_in_which_a_thread_waits_for_a_processor_little_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    read = silence._read
    monkeypatch.setattr(silence, "_read", lambda path: "5 7 1\n" if path.endswith("schedstat") else read(path))
    silent = silence.Silence(os.getpid())
    for _ in range(121):
        silent.add(1.0)
    assert silent.seconds == pytest.approx(2.0)  # so that it does not hide for ever that another thread hangs
    silent.end()
    assert silent.seconds == 0.0
