"""The changes to SGLang's scheduler, on classes with the methods of SGLang 0.5.16 that they change."""

import time
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from services.engines.sglang.inside import scheduler as changes


class States(IntEnum):
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


def changed_sender() -> tuple[Any, Any]:
    """A manager's and a sender's class."""

    class Manager:
        def __init__(self) -> None:
            self.request_status: dict[int, States] = {}
            self.bootstrap_timeout = 10.0

        def _handle_abort_notification(self, message: list[bytes]) -> bool:
            return message[0] == b"ABORT"

        def check_status(self, room: int) -> States:
            return self.request_status[room]

    class Sender:
        def __init__(self, manager: Manager, room: int) -> None:
            self.kv_mgr, self.bootstrap_room, self.init_time = manager, room, None
            manager.request_status[room] = States.Bootstrapping

        def poll(self) -> States:
            return self.kv_mgr.check_status(self.bootstrap_room)

        def abort(self) -> None:
            self.kv_mgr.request_status[self.bootstrap_room] = States.Failed

        def _check_bootstrap_timeout(self) -> States | None:
            late = self.init_time is not None and time.time() - self.init_time > self.kv_mgr.bootstrap_timeout
            return States.Failed if late else None

    changes._fail_senders(Manager, Sender, States)
    return Manager, Sender


def test_a_closed_room_stays_failed_when_the_part_on_its_way_has_ended() -> None:
    manager_class, sender_class = changed_sender()
    manager = manager_class()
    sender = sender_class(manager, 7)
    manager.request_status[7] = States.Transferring
    assert sender.poll() == States.Transferring
    assert manager._handle_abort_notification([b"ABORT", b"7"])
    manager.request_status[7] = States.Transferring
    assert sender.poll() == States.Failed


def test_a_sender_for_a_room_that_is_closed_already_fails_at_once() -> None:
    manager_class, sender_class = changed_sender()
    manager = manager_class()
    manager._handle_abort_notification([b"ABORT", b"7"])
    assert sender_class(manager, 7).poll() == States.Failed
    assert sender_class(manager, 8).poll() == States.Bootstrapping


def test_an_aborted_sender_stays_failed() -> None:
    manager_class, sender_class = changed_sender()
    manager = manager_class()
    sender = sender_class(manager, 7)
    sender.abort()
    manager.request_status[7] = States.Success
    assert sender.poll() == States.Failed


def test_a_sender_whose_decode_side_names_no_blocks_in_time_fails() -> None:
    manager_class, sender_class = changed_sender()
    manager = manager_class()
    manager.bootstrap_timeout = -1.0
    assert sender_class(manager, 7).poll() == States.Failed


@dataclass(eq=False)
class Request:
    rid: str
    bootstrap_host: str = changes.LOCAL
    time_stats: Any = field(default_factory=lambda: SimpleNamespace(set_wait_queue_entry_time=lambda: None))


@dataclass
class Asked:
    rid: str
    abort_all: bool = False


@dataclass
class Batch:
    """A running batch."""

    batch_is_full: bool = False


MODES = SimpleNamespace(DECODE="decode")


def changed_scheduler() -> Any:
    class Scheduler:
        """SGLang's own part: what its methods get."""

        disaggregation_mode = MODES.DECODE

        def __init__(self) -> None:
            self.waiting_queue: list[Request] = []
            self.elsewhere: list[Request] = []
            self.sent: list[Any] = []
            self.chunked_req = self.last_batch = None
            self.baton_closing: list[Any] = []
            self.scheduled: list[list[str]] = []
            sending = SimpleNamespace(send_output=lambda output, req: self.sent.append(output))
            self.ipc_channels = SimpleNamespace(send_to_tokenizer=sending)
            self.init_disaggregation()

        def init_disaggregation(self) -> None:
            pass

        def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
            self.elsewhere.append(req)

        def abort_request(self, asked: Asked) -> None:
            self.elsewhere = [req for req in self.elsewhere if not req.rid.startswith(asked.rid)]

        def is_fully_idle(self) -> bool:
            return not self.elsewhere

        def get_new_prebuilt_batch(self, running: Any) -> None:
            assert self.chunked_req is None

        def get_next_disagg_decode_batch_to_run(self, running: Any) -> str:
            return "without prompts"

        def get_next_batch_to_run(self, running: Any, last: Any) -> str:
            self.scheduled.append([req.rid for req in self.waiting_queue])
            self.waiting_queue = self.waiting_queue[1:]
            return "with prompts"

    changes._queue_prompts(Scheduler, MODES)
    changes._compute_prompts(Scheduler)
    return Scheduler()


def test_a_decode_engine_schedules_its_own_prompts_apart_from_those_whose_kv_comes() -> None:
    scheduler = changed_scheduler()
    scheduler.waiting_queue = [Request("arrived", "10.0.0.1")]
    assert scheduler.get_next_disagg_decode_batch_to_run(Batch()) == "without prompts"
    scheduler._add_request_to_queue(Request("here"))
    scheduler._add_request_to_queue(Request("there", "10.0.0.1"))
    assert [req.rid for req in scheduler.elsewhere] == ["there"]
    assert scheduler.get_next_disagg_decode_batch_to_run(Batch()) == "with prompts"
    assert scheduler.scheduled == [["here"]]
    assert [req.rid for req in scheduler.waiting_queue] == ["arrived"]
    assert scheduler.get_next_disagg_decode_batch_to_run(Batch()) == "without prompts"


def test_a_prompt_that_is_computed_in_parts_does_not_stop_requests_whose_kv_has_come() -> None:
    scheduler = changed_scheduler()
    scheduler.chunked_req = chunked = Request("long")
    assert scheduler.get_next_disagg_decode_batch_to_run(Batch()) == "with prompts"
    assert scheduler.chunked_req is chunked


def test_a_prompt_that_found_no_room_is_looked_at_again_though_nothing_runs() -> None:
    scheduler, running = changed_scheduler(), Batch(batch_is_full=True)
    scheduler._add_request_to_queue(Request("here"))
    scheduler.get_next_disagg_decode_batch_to_run(running)
    assert not running.batch_is_full


def test_a_retracted_request_goes_sglangs_own_way() -> None:
    scheduler = changed_scheduler()
    scheduler._add_request_to_queue(Request("here"), is_retracted=True)
    assert [req.rid for req in scheduler.elsewhere] == ["here"]


def test_an_aborted_prompt_that_waits_here_is_told_and_leaves_the_engine_idle() -> None:
    scheduler = changed_scheduler()
    scheduler._add_request_to_queue(Request("a1"))
    scheduler._add_request_to_queue(Request("b1"))
    assert not scheduler.is_fully_idle()
    scheduler.abort_request(Asked("a"))
    assert [output.rid for output in scheduler.sent] == ["a1"]
    assert [req.rid for req in scheduler.baton_local] == ["b1"]


def test_blocks_of_a_room_that_ended_early_are_free_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []

    class Scheduler:
        def init_disaggregation(self) -> None:
            pass

        def process_decode_queue(self) -> None:
            pass

    module: Any = SimpleNamespace(release_kv_cache=lambda req, cache, is_insert: freed.append(req))
    monkeypatch.setenv(changes.CLOSING_SECONDS, "0.05")
    changes._free_later(Scheduler, module)
    scheduler: Any = Scheduler()
    scheduler.init_disaggregation()
    module.release_kv_cache("r1", None, is_insert=False)
    scheduler.process_decode_queue()
    assert (freed, len(scheduler.baton_closing)) == ([], 1)
    time.sleep(0.06)
    scheduler.process_decode_queue()
    assert (freed, scheduler.baton_closing) == (["r1"], [])
