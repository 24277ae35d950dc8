"""A keeper in this process, for engines that come and go."""

import contextlib
import os
import selectors
import threading
from collections.abc import Iterator

import psutil

from services.engines.context import KeptMemory
from services.keeper import fork_server
from services.keeper.client import KeeperClient
from services.keeper.conversation import Conversation
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import Answer, pair


class KeepsHere:
    """The holdings of a keeper; each engine gets a client of its own."""

    def __init__(self) -> None:
        self.kept = KeptDescriptors()

    @contextlib.contextmanager
    def memory(self, *, weights: bool = False, kv: bool = False, starts: int = 0) -> Iterator[KeptMemory]:
        """The context of an engine, of a worker that was started so often before."""
        own, end = pair()
        conversation = Conversation(own, self.kept, Answer(starts=starts), os.getpid())
        thread = threading.Thread(target=_serve, args=[conversation])
        thread.start()
        client = KeeperClient(end)
        try:
            yield KeptMemory(client, weights, kv)
        finally:
            client.close()
            thread.join()


def _serve(conversation: Conversation) -> None:
    while conversation.sources:
        with selectors.DefaultSelector() as selector:
            for source in conversation.sources:
                selector.register(source, selectors.EVENT_READ)
            selector.select()
        conversation.serve()


@contextlib.contextmanager
def keeper_here() -> Iterator[KeepsHere]:
    """Frees all at the end."""
    keeper = KeepsHere()
    try:
        yield keeper
    finally:
        for name in keeper.kept.names:
            keeper.kept.drop(name)


def workers_of(keeper: int) -> list[psutil.Process]:
    """The processes that a keeper's process runs: the worker, if it lives, and after it one that is to follow it."""
    found = [each for each in psutil.Process(keeper).children() if each.name() != fork_server.NAME]
    return sorted(found, key=lambda each: each.create_time())
