"""The interpreter, which all threads share."""

import sys

from runtime.threads import let_others_run, switch_often


def test_python_code_in_threads_gives_the_interpreter_up_after_a_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        switch_often()
        assert sys.getswitchinterval() == 0.001
    finally:
        sys.setswitchinterval(before)


def test_a_value_is_returned_as_it_is_at_each_call() -> None:
    values = [object() for _ in range(100)]
    assert [let_others_run(value) for value in values] == values
