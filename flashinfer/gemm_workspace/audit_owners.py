"""Whose memory an address of a captured graph is in, and whether it still is what was captured.

Works on plain data. The order of the questions is the order of certainty: the fork's ledger, the
graph's own allocations, the caching allocator, the driver.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .audit_graph import HIGH, looks_like_an_address
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
from .audit_ranges import Ranges

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


class Said:
    """All that was said, by number: columns, since an object each would be many in a large graph.

    Python's garbage collection goes by the number of objects, and one over all of a process that
    has torch takes longer than an audit.
    """

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.owners: list[str] = []
        self.whys: list[str] = []

    def add(self, said: Judgement) -> int:
        """The number that ``said`` has from now on."""
        self.verdicts.append(said.verdict)
        self.owners.append(said.owner)
        self.whys.append(said.why)
        return len(self.whys) - 1


#: Instead of the number of a judgement: the word is no address of a device.
NO_ADDRESS = -1


class Judge:
    """Judges addresses for one graph. Each distinct one is judged once, and each block of torch's
    once for all that are in it."""

    def __init__(self, known: Known) -> None:
        self.said = Said()
        # Words that may be two small numbers, and would be held against the graph.
        self.doubtful: set[int] = set()
        self._known = known
        self._words: dict[int, int] = {}
        self._named: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._as_numbers: dict[int, int] = {}
        at_capture = known.at_capture
        self._then = None if at_capture is None else at_capture.snapshot
        spans = [
            known.now.span(),
            known.ledger.span(),
            None if self._then is None else self._then.span(),
        ]
        self._low = min((span[0] for span in spans if span), default=0)
        self._high = max((span[1] for span in spans if span), default=0)
        # Of two that the graph allocates in the same place, the first one gives its name.
        self._own_allocations = Ranges(reversed(known.own_allocations))

    def word(self, address: int) -> int:
        """What is said of a word of a parameter, by number, or :data:`NO_ADDRESS`."""
        number = self._words.get(address)
        if number is None:
            number = self._words[address] = self._judge(address, False)
            if (
                number != NO_ADDRESS
                and not looks_like_an_address(address)
                and self.said.verdicts[number] in (Verdict.STALE, Verdict.SUSPECT)
            ):
                self.doubtful.add(address)
        return number

    def named(self, address: int) -> int:
        """The same of an address that a node names: it is one by what the node is."""
        number = self._named.get(address)
        if number is None:
            number = self._named[address] = self._judge(address, True)
        return number

    def as_numbers(self, number: int) -> int:
        """What is said instead of ``number`` where the word may be two numbers."""
        instead = self._as_numbers.get(number)
        if instead is None:
            of = self.said
            why = (
                "may be two 32-bit numbers; as an address it would be "
                f"{of.verdicts[number]}: {of.whys[number]}"
            )
            instead = of.add(Judgement(Verdict.UNKNOWN, of.owners[number], why))
            self._as_numbers[number] = instead
        return instead

    def _judge(self, address: int, named: bool) -> int:
        known = self._known
        owned = known.ledger.find(address)
        if owned is not None:
            return self.said.add(self._ours(address, owned))
        own = self._own_allocations.find(address)
        if own is not None:
            owner = f"memory that the graph allocates at {own[0]:#x}"
            return self.said.add(Judgement(Verdict.OWN_POOL, owner))
        now = known.now.find(address)
        if now >= 0:
            return self._in_block(now, address)
        outside = self._outside(address, named)
        return NO_ADDRESS if outside is None else self.said.add(outside)

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

    def _in_block(self, now: int, address: int) -> int:
        then = -1 if self._then is None else self._then.find(address)
        # Both numbers in one: a pair would be one more object for the garbage collection.
        key = (now << 32) + then
        number = self._blocks.get(key)
        if number is None:
            block = self._known.now.numbered(now)
            was = None if self._then is None or then < 0 else self._then.numbered(then)
            said = self._of_block(block, was)
            if said is None:
                # An idle block: the history may know different frees of different parts of it.
                return self.said.add(self._of_idle(block, was, address))
            number = self._blocks[key] = self.said.add(said)
        return number

    def _of_block(self, block: Block, was: Block | None) -> Judgement | None:
        """What is said of all addresses in ``block``; ``None`` if it depends on the address."""
        known, owner = self._known, _block_name(block)
        if known.own_pool is not None and block.pool == known.own_pool:
            return Judgement(Verdict.OWN_POOL, owner)
        if block.state == IN_USE:
            return self._in_use(block, was, owner)
        if was is not None and was.state == IN_USE:
            return Judgement(
                Verdict.STALE, owner, f"in use at capture ({_block_name(was)}), freed since"
            )
        return None if block.state == FREE else _suspect(block, was)

    def _of_idle(self, block: Block, was: Block | None, address: int) -> Judgement:
        freed = self._known.history.last_free(address)
        if freed is None:
            return _suspect(block, was)
        return Judgement(
            Verdict.STALE,
            _block_name(block),
            f"the allocator's history has its free{_at(freed.time)}",
        )

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

    # Nobody's that we know. ----------------------------------------------------------------------

    def _outside(self, address: int, named: bool) -> Judgement | None:
        was = None if self._then is None else self._then.block(address)
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


def _suspect(block: Block, was: Block | None) -> Judgement:
    since = f"{block.state} now" if was is None else f"{block.state}, and was so at capture"
    return Judgement(Verdict.SUSPECT, _block_name(block), since)


def _block_name(block: Block) -> str:
    pool = "" if block.pool == DEFAULT_POOL else f" of pool {block.pool}"
    return f"torch's block of {block.nbytes} bytes at {block.address:#x}{pool}, {block.state}"


def _place_name(place: Place) -> str:
    return f"device memory of {place.nbytes} bytes at {place.address:#x}"


def _at(time: int | None) -> str:
    return "" if time is None else f" at {time} us"
