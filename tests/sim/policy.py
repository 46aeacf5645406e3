"""What the machine needs of a policy: the calls that a grafted op makes."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from .world import Plan


class Policy:
    """Under test. Raising anything but ``refusals`` is a failure of the policy."""

    # Whether graphs are promised never to be replayed at once, so that one pool is as good as all.
    one_pool: bool = False
    # Whether it can tell a stream from a later one at the same handle; if not, none is destroyed.
    knows_streams: bool = True
    # Whether plans of graphs that are gone go too.
    releases: bool = True
    # Typed errors that an op may meet: the call did not happen, and nothing has changed.
    refusals: tuple[type[BaseException], ...] = ()

    def is_fair(self, refusal: BaseException) -> bool:
        """Whether there is a reason for ``refusal``."""
        return True

    def workspace(self, op: str, nbytes: int) -> torch.Tensor:
        """The workspace of ``op`` on the current stream."""
        raise NotImplementedError

    def at_least(self, workspace: torch.Tensor, nbytes: int) -> torch.Tensor:
        """``workspace``, or a longer one of the current stream."""
        raise NotImplementedError

    def build(self, make: Callable[[], Plan]) -> Plan:
        """A plan, or a refusal under capture."""
        raise NotImplementedError

    def execute(self, plan: Plan, workspace: torch.Tensor, launch: Callable[[], None]) -> None:
        """Call ``launch``, which launches or captures ``plan``."""
        raise NotImplementedError

    def buffer(self, nbytes: int) -> torch.Tensor | None:
        """A buffer of the release's cache, which all streams share."""
        return None

    def clear_buffers(self) -> None:
        """An engine clears the release's cache."""

    def lanes(self) -> int:
        """Workspaces in use."""
        return 0

    def before_capture(self) -> None:
        """A capture is about to begin through a door that a policy can watch."""

    def reserve(self, nbytes: int, lanes: int) -> None:
        """Make room ahead."""

    def seal(self, sealed: bool) -> None:
        """From here on nothing may grow, or it may again."""

    def collect(self) -> None:
        """Give back what no graph can reach any more; no capture runs."""

    def key(self, op: str, pool: Hashable, stream: int) -> Hashable:
        """What the workspace of ``op`` belongs to; ``pool`` is ``None`` outside captures."""
        return op, pool, stream

    def moves(self) -> bool:
        """Whether growth may hand out another address, the former one staying valid."""
        return True

    def room(self, longest: int) -> int | None:
        """Most bytes behind one workspace whose longest request is ``longest``."""
        return None

    def close(self) -> None:
        """The test is over."""
