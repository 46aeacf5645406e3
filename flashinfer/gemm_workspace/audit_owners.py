"""Whose memory an address of a captured graph is in, and whether it still is what was captured.

Works on plain data. The order of the questions is the order of certainty: the fork's ledger, the
graph's own allocations, the caching allocator, the driver.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .audit_graph import HIGH, Word
from .audit_memory import (
    DEFAULT_POOL,
    FREE,
    IN_USE,
    AtCapture,
    Block,
    History,
    Ledger,
    Owned,
    Place,
    Pool,
    Snapshot,
)

# Blocks of the caching allocator start at multiples of this (bytes).
_BLOCK_ALIGNMENT = 512
# Sizes of matrices and strides are below it.
_SMALL = 1 << 20


class Verdict(str, enum.Enum):
    """What can be said of an address, from the worst on."""

    STALE = "stale"
    SUSPECT = "suspect"
    NOT_INSPECTED = "not inspected"
    UNKNOWN = "unknown"
    LIVE = "live"
    OWN_POOL = "own pool"

    __str__ = str.__str__


class Judgement(NamedTuple):
    """A verdict, the owner now, and what it rests on."""

    verdict: Verdict
    owner: str
    why: str = ""


def _nobody(_address: int) -> Place | None:
    return None


def _not_of_the_host(_address: int) -> bool:
    return False


@dataclass(frozen=True)
class Known:
    """Everything that is known of memory when a graph is audited."""

    now: Snapshot
    ledger: Ledger = field(default_factory=Ledger)
    history: History = field(default_factory=History)
    own_pool: Pool | None = None
    at_capture: AtCapture | None = None
    # Memory that the graph's own nodes allocate: address and bytes.
    own_allocations: Sequence[tuple[int, int]] = ()
    # What the driver knows of an address.
    lookup: Callable[[int], Place | None] = _nobody
    # Whether the process can read the address: then it is none of a device's.
    of_the_host: Callable[[int], bool] = _not_of_the_host


class Judge:
    """Judges the words of one graph. Each distinct address is judged once."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._judged: dict[tuple[int, bool], Judgement | None] = {}
        spans = [span for span in (known.now.span(), known.ledger.span()) if span is not None]
        at_capture = known.at_capture
        if at_capture is not None and at_capture.snapshot is not None:
            span = at_capture.snapshot.span()
            spans += [] if span is None else [span]
        self._low = min((low for low, _ in spans), default=0)
        self._high = max((high for _, high in spans), default=0)

    def words(self, words: Sequence[Word]) -> list[tuple[Word, Judgement]]:
        """Those of the ``words`` of one node that are addresses, with what is said of each.

        Two small numbers side by side can look like a low address. What speaks against such a
        word counts only if another word of the node, which cannot be numbers, has the same owner.
        """
        judged = [
            (word, judgement)
            for word in words
            if (judgement := self._word(word.value, word.named)) is not None
        ]
        sure = {said.owner for word, said in judged if word.looks_like_an_address}
        return [
            (word, said)
            if word.looks_like_an_address
            or said.verdict not in (Verdict.STALE, Verdict.SUSPECT)
            or said.owner in sure
            else (word, said._replace(verdict=Verdict.UNKNOWN, why=_two_numbers(said)))
            for word, said in judged
        ]

    def _word(self, address: int, named: bool) -> Judgement | None:
        key = (address, named)
        if key not in self._judged:
            self._judged[key] = self._judge(address, named)
        return self._judged[key]

    def _judge(self, address: int, named: bool) -> Judgement | None:
        known = self._known
        owned = known.ledger.find(address)
        if owned is not None:
            return self._ours(address, owned)
        for start, nbytes in known.own_allocations:
            if start <= address < start + nbytes:
                return Judgement(Verdict.OWN_POOL, f"memory that the graph allocates at {start:#x}")
        block = known.now.block(address)
        if block is not None:
            return self._in_block(block, address)
        return self._outside(address, named)

    # The fork's own storage. ---------------------------------------------------------------------

    def _ours(self, address: int, owned: Owned) -> Judgement:
        if address >= owned.address + owned.mapped:
            return Judgement(
                Verdict.UNKNOWN,
                owned.owner,
                f"reserved behind its {owned.mapped} mapped bytes, and never mapped: a number, or "
                "an end that is not read",
            )
        if not owned.used:
            return Judgement(
                Verdict.STALE,
                owned.owner,
                "the ledger says that no graph and no stream has it: the next new lane gets it",
            )
        before = self._known.at_capture
        if before is None:
            return Judgement(Verdict.LIVE, owned.owner)
        was = before.ledger.find(address)
        if was is not None and was.owner != owned.owner:
            return Judgement(Verdict.SUSPECT, owned.owner, f"at capture it was {was.owner}")
        if owned.captured and before.capture is not None and before.capture not in owned.users:
            return Judgement(
                Verdict.SUSPECT,
                owned.owner,
                "the ledger says that this graph does not hold it: it can get another owner",
            )
        return Judgement(Verdict.LIVE, owned.owner)

    # Blocks of torch's allocator. ----------------------------------------------------------------

    def _in_block(self, block: Block, address: int) -> Judgement:
        known, owner = self._known, _block_name(block)
        if known.own_pool is not None and block.pool == known.own_pool:
            return Judgement(Verdict.OWN_POOL, owner)
        was = self._at_capture(address)
        if block.state == IN_USE:
            return self._in_use(block, was, owner)
        if was is not None and was.state == IN_USE:
            return Judgement(
                Verdict.STALE, owner, f"in use at capture ({_block_name(was)}), freed since"
            )
        freed = known.history.last_free(address) if block.state == FREE else None
        if freed is not None:
            return Judgement(
                Verdict.STALE, owner, f"the allocator's history has its free{_at(freed.time)}"
            )
        if was is not None:
            return Judgement(Verdict.SUSPECT, owner, f"{block.state}, and was so at capture")
        return Judgement(Verdict.SUSPECT, owner, f"{block.state} now")

    def _in_use(self, block: Block, was: Block | None, owner: str) -> Judgement:
        before, known = self._known.at_capture, self._known
        if before is None or before.snapshot is None:
            return Judgement(Verdict.LIVE, owner)
        if was is None:
            return Judgement(
                Verdict.SUSPECT, owner, "torch had no memory there at capture: another owner"
            )
        freed = known.history.freed_since(was, before.time) if was.state == IN_USE else None
        if freed is not None:
            return Judgement(
                Verdict.STALE,
                owner,
                f"the allocator's history has its free{_at(freed.time)}, after the capture; "
                "another owner has the place now",
            )
        if was != block:
            return Judgement(
                Verdict.SUSPECT, owner, f"another owner than at capture: {_block_name(was)} then"
            )
        return Judgement(Verdict.LIVE, owner)

    def _at_capture(self, address: int) -> Block | None:
        before = self._known.at_capture
        if before is None or before.snapshot is None:
            return None
        return before.snapshot.block(address)

    # Nobody's that we know. ----------------------------------------------------------------------

    def _outside(self, address: int, named: bool) -> Judgement | None:
        was = self._at_capture(address)
        place = self._known.lookup(address)
        if was is not None:
            owner = "nobody" if place is None else _place_name(place)
            return Judgement(
                Verdict.STALE if was.state == IN_USE else Verdict.SUSPECT,
                owner,
                f"{was.state} at capture ({_block_name(was)}), given back to the driver since",
            )
        if place is not None:
            if not place.on_device:
                return None
            return Judgement(Verdict.UNKNOWN, _place_name(place), "not torch's, and not the fork's")
        freed = self._known.history.last_free(address)
        if freed is not None:
            return Judgement(
                Verdict.STALE,
                "nobody",
                f"the allocator's history has its free{_at(freed.time)}; no memory is there now",
            )
        # Numbers and what stands in padding bytes end here; an address that a node names does not,
        # and one that looks like the start of a block, among the others, hardly is anything else.
        if named:
            if self._known.of_the_host(address):
                return None
            return Judgement(Verdict.SUSPECT, "nobody", "no memory is there now")
        if (
            address >= HIGH
            and not _two_small(address)
            and address % _BLOCK_ALIGNMENT == 0
            and self._low <= address < self._high
            and not self._known.of_the_host(address)
        ):
            return Judgement(
                Verdict.SUSPECT, "nobody", "stands among device addresses, and no memory is there"
            )
        return None


def _two_small(address: int) -> bool:
    """Whether both halves are small numbers: sizes that stand side by side, as cuBLASLt's split-K
    reduction has them, and hardly a block: that would be within 1 MiB of a multiple of 4 GiB."""
    return address >> 32 < _SMALL and address & 0xFFFF_FFFF < _SMALL


def _two_numbers(said: Judgement) -> str:
    return f"may be two 32-bit numbers; as an address it would be {said.verdict}: {said.why}"


def _block_name(block: Block) -> str:
    pool = "" if block.pool == DEFAULT_POOL else f" of pool {block.pool}"
    return f"torch's block of {block.nbytes} bytes at {block.address:#x}{pool}, {block.state}"


def _place_name(place: Place) -> str:
    return f"device memory of {place.nbytes} bytes at {place.address:#x}"


def _at(time: int | None) -> str:
    return "" if time is None else f" at {time} us"
