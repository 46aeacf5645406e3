"""Who needs which workspace: the model, kept by looking at the calls from outside.

A *place* is the workspace of one key, and its users are a stream (eager launches; for good, as
nobody is told when a stream goes) or graphs. What may be held at any time follows:

    bytes held <= most places needed at once x (longest request + growth room)
                  + 4 x longest buffer of the release's cache

where *needed* counts a graph until it is gone with its last replay and a call outside every
capture had the chance to notice, and the lanes that were reserved on top."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from .memory import Violation
from .world import Graph, Stream, World


@dataclass
class Place:
    address: int
    users: set[Stream | Graph] = field(default_factory=set)


class Ledger:
    def __init__(self, world: World) -> None:
        self.world = world
        self.places: dict[Hashable, Place] = {}
        self.most = 0
        self.longest = 0
        self.buffer = 0

    def use(self, key: Hashable, address: int, nbytes: int, moves: bool) -> None:
        """The current stream got ``nbytes`` at ``address`` for ``key``."""
        stream = self.world.stream
        user = stream.capture.graph if stream.capture else stream
        place = self.places.setdefault(key, Place(address))
        used = any(isinstance(each, Stream) or not each.destroyed for each in place.users)
        if used and not moves and place.address != address:
            raise Violation(f"the workspace of {key} moved while it was in use")
        place.address = address
        place.users.add(user)
        self.longest = max(self.longest, nbytes)
        self.most = max(self.most, len(self.places))

    def reserved(self, nbytes: int, lanes: int) -> None:
        """Somebody asked for ``lanes`` spare ones."""
        self.longest = max(self.longest, nbytes)
        self.most = max(self.most, len(self.places) + lanes)

    def collected(self) -> None:
        """The policy had its chance to notice which graphs are gone."""
        for place in self.places.values():
            place.users = {u for u in place.users if not self.is_gone(u)}
        self.places = {key: place for key, place in self.places.items() if place.users}

    def is_gone(self, user: Stream | Graph) -> bool:
        """A graph that nothing could be tied to counts for the life of the process."""
        return isinstance(user, Graph) and user.released and not user.untied

    def check_bytes(self, room: int) -> None:
        """``room``: what one place may take, by the policy's own rule of growth."""
        held, buffer = self.world.held_bytes(), 4 * self.buffer
        if held > self.most * room + buffer:
            raise Violation(
                f"{held} bytes are held; at most {self.most} workspaces of at most {room} bytes "
                f"were ever needed at once, and {buffer} bytes for the release's cache"
            )
