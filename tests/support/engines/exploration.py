"""Explicit-state model checking: explores every order of actions, and whether all paths end well."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

Path = tuple[str, ...]


class World(Protocol):
    """A small system that can be built again, and whose next action is chosen from outside."""

    @property
    def is_done(self) -> bool: ...

    def actions(self) -> Sequence[str]:
        """The events that may happen next."""

    def do(self, action: str) -> None: ...

    def state(self) -> Hashable:
        """The state: equal states have the same future."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The states that can be reached, by a path to each, with the states that follow."""

    paths: dict[Hashable, Path]
    following: dict[Hashable, set[Hashable]]
    done: set[Hashable]

    @property
    def stuck(self) -> list[Path]:
        """Paths to deadlocks: states without actions in which work is left."""
        return [self.paths[state] for state, after in self.following.items() if not after and state not in self.done]

    @property
    def is_finite(self) -> bool:
        """True if there is no cycle, so that every path ends."""
        degrees = dict.fromkeys(self.paths, 0)
        for after in self.following.values():
            for state in after:
                degrees[state] += 1
        ready = [state for state, degree in degrees.items() if not degree]
        removed = 0
        while ready:
            removed += 1
            for state in self.following[ready.pop()]:
                degrees[state] -= 1
                if not degrees[state]:
                    ready.append(state)
        return removed == len(self.paths)


def explore(build: Callable[[], World], most_states: int = 100_000) -> Explored:
    """Tries all actions in all states. An action that changes nothing is no action. Raises AssertionError above the
    number of states, so that nothing is left out in silence.
    """
    start = build()
    explored = Explored({start.state(): ()}, {}, set())
    queue = deque([start.state()])
    while queue:
        state = queue.popleft()
        path = explored.paths[state]
        world = replay(build, path)
        if world.is_done:
            explored.done.add(state)
        after = explored.following[state] = set()
        for action in world.actions():
            reached = replay(build, (*path, action)).state()
            if reached == state:
                continue
            after.add(reached)
            if reached not in explored.paths:
                explored.paths[reached] = (*path, action)
                queue.append(reached)
        assert len(explored.paths) <= most_states, "too many states to look at"
    return explored


def replay(build: Callable[[], World], path: Path) -> World:
    """A new world in which the actions of the path have happened."""
    world = build()
    for action in path:
        world.do(action)
    return world
