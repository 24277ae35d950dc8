"""Changes to SGLang's scheduler, in its process.

A decode engine that also computes prompts. Requests whose bootstrap host is LOCAL are scheduled as without
disaggregation, by SGLang's own functions, with a queue of their own.

Rooms that end early. The blocks of a room whose transfer failed or was aborted are free only after a while, since its
sender may still write. A sender whose decode side has closed the room, or does not name its blocks in time, fails.
"""

import importlib
import os
import time
from collections import OrderedDict
from typing import Any

LOCAL = "baton-local"
CLOSING_SECONDS = "BATON_SGLANG_CLOSING_SECONDS"
_REMEMBERED_ROOMS = 4096


def change() -> None:
    """Applies the changes. Call it once, before a Scheduler is made."""
    decode, conn, scheduler = (
        importlib.import_module(f"sglang.srt.{name}")
        for name in ("disaggregation.decode", "disaggregation.nixl.conn", "managers.scheduler")
    )
    _keep_no_ends(scheduler.Scheduler)
    _queue_prompts(scheduler.Scheduler, scheduler.DisaggregationMode)
    _compute_prompts(scheduler.Scheduler)
    _free_later(scheduler.Scheduler, decode)
    _fail_senders(conn.NixlKVManager, conn.NixlKVSender, conn.KVPoll)


def _keep_no_ends(scheduler: Any) -> None:
    """Ends of sequence are among each request's stop tokens: SGLang's ignore_eos would ignore those, too."""
    original = scheduler.init_model_config

    def init_model_config(self: Any) -> None:
        original(self)
        self.model_config.hf_eos_token_id = set()

    scheduler.init_model_config = init_model_config


def _queue_prompts(scheduler: Any, modes: Any) -> None:
    """Prompts of rooms in which nothing is sent wait in a queue of their own, `baton_local`."""
    add, abort, init = scheduler._add_request_to_queue, scheduler.abort_request, scheduler.init_disaggregation

    def init_disaggregation(self: Any) -> None:
        self.baton_local = []
        init(self)

    def add_request(self: Any, req: Any, is_retracted: bool = False) -> None:
        is_local = self.disaggregation_mode == modes.DECODE and req.bootstrap_host == LOCAL
        if is_local and not is_retracted:
            self.baton_local.append(req)
            req.time_stats.set_wait_queue_entry_time()
        else:
            add(self, req, is_retracted=is_retracted)

    def abort_request(self: Any, asked: Any) -> None:
        ended = [req for req in self.baton_local if asked.abort_all or req.rid.startswith(asked.rid)]
        for req in ended:
            self.baton_local.remove(req)
            self.ipc_channels.send_to_tokenizer.send_output(type(asked)(rid=req.rid), req)
        abort(self, asked)

    scheduler.init_disaggregation = init_disaggregation
    scheduler._add_request_to_queue = add_request
    scheduler.abort_request = abort_request


def _compute_prompts(scheduler: Any) -> None:
    """The prompts of `baton_local` are computed between the steps of a decode engine."""
    idle, next_batch = scheduler.is_fully_idle, scheduler.get_next_disagg_decode_batch_to_run

    def is_fully_idle(self: Any, *arguments: Any, **named: Any) -> bool:
        return not self.baton_local and not self.baton_closing and bool(idle(self, *arguments, **named))

    def get_next_batch(self: Any, running_batch: Any) -> Any:
        if not self.baton_local and self.chunked_req is None and not _is_prompt(self.last_batch):
            return next_batch(self, running_batch)
        running_batch = _with_arrived(self, running_batch)
        # SGLang would not look again before a running request has ended, and none may run: rooms hold blocks, too.
        running_batch.batch_is_full = False
        arrived, self.waiting_queue = self.waiting_queue, self.baton_local
        try:
            return self.get_next_batch_to_run(running_batch, self.last_batch)
        finally:
            self.baton_local, self.waiting_queue = self.waiting_queue, arrived

    scheduler.is_fully_idle = is_fully_idle
    scheduler.get_next_disagg_decode_batch_to_run = get_next_batch


def _is_prompt(batch: Any) -> bool:
    return batch is not None and batch.forward_mode.is_extend() and not batch.forward_mode.is_prebuilt()


def _with_arrived(self: Any, running_batch: Any) -> Any:
    """The running batch with the requests whose KV has come, as SGLang's own function does it."""
    chunked, self.chunked_req = self.chunked_req, None
    try:
        arrived = self.get_new_prebuilt_batch(running_batch)
    finally:
        self.chunked_req = chunked
    if not arrived:
        return running_batch
    self.batch_result_processor.process_batch_result_prebuilt(arrived)
    arrived.filter_batch()
    if arrived.is_empty():
        return running_batch
    if running_batch.is_empty():
        return arrived
    running_batch.merge_batch(arrived)
    return running_batch


def _free_later(scheduler: Any, decode: Any) -> None:
    """Keeps the blocks of rooms that ended early. decode.py frees blocks for this reason alone."""
    init, process, free = scheduler.init_disaggregation, scheduler.process_decode_queue, decode.release_kv_cache
    seconds = float(os.environ.get(CLOSING_SECONDS, "1"))
    closing: list[tuple[float, Any, Any]] = []

    def init_disaggregation(self: Any) -> None:
        self.baton_closing = closing
        init(self)

    def release_later(req: Any, tree_cache: Any, is_insert: bool = True) -> None:
        del is_insert
        closing.append((time.monotonic() + seconds, req, tree_cache))

    def process_decode_queue(self: Any) -> None:
        while closing and closing[0][0] <= time.monotonic():
            _, req, tree_cache = closing.pop(0)
            free(req, tree_cache, is_insert=False)
        process(self)

    scheduler.init_disaggregation = init_disaggregation
    scheduler.process_decode_queue = process_decode_queue
    decode.release_kv_cache = release_later


def _fail_senders(manager: Any, sender: Any, states: Any) -> None:
    """Of a room that is closed no further part is sent: SGLang forgets the failure when the part on its way ends."""
    handle, check, poll = manager._handle_abort_notification, manager.check_status, sender.poll
    abort, init = sender.abort, sender.__init__
    closed: OrderedDict[int, None] = OrderedDict()

    def close(room: int) -> None:
        closed[room] = None
        if len(closed) > _REMEMBERED_ROOMS:
            closed.popitem(last=False)

    def handle_abort(self: Any, message: Any) -> bool:
        is_abort = bool(handle(self, message))
        if is_abort and message[1].isdigit():
            close(int(message[1]))
        return is_abort

    def check_status(self: Any, room: int) -> Any:
        return states.Failed if room in closed else check(self, room)

    def abort_sending(self: Any) -> None:
        close(self.bootstrap_room)
        abort(self)

    def remember_start(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.init_time = time.time()

    def poll_in_time(self: Any) -> Any:
        state = poll(self)
        late = self._check_bootstrap_timeout() if state == states.Bootstrapping else None
        return state if late is None else late

    manager._handle_abort_notification, manager.check_status = handle_abort, check_status
    sender.abort, sender.__init__, sender.poll = abort_sending, remember_start, poll_in_time
