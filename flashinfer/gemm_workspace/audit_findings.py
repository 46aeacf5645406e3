"""What an audit finds in the nodes of a graph, kept in columns until somebody reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .audit_graph import Layout, Node, candidates, looks_like_an_address, packed, places
from .audit_owners import NO_ADDRESS, Judge, Judgement, Known, Verdict


@dataclass(frozen=True)
class Finding:
    """One device address of one node, or one thing that could not be read."""

    node: str  # its number; 4.0 is node 0 of the child graph that is node 4
    kind: str  # of the node: kernel, memcpy, memset, ...
    name: str  # of the kernel
    where: str  # parameter, extra, source, destination, ...
    offset: int | None  # bytes from the start of the parameter
    address: int | None
    owner: str
    verdict: Verdict
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the address as a number, and in hexadecimal for people."""
        hexadecimal = None if self.address is None else f"{self.address:#x}"
        return {**vars(self), "verdict": str(self.verdict), "address_hex": hexadecimal}


# A node of which something was found: path, kind, name, layout of its parameters, what its extents
# are called, and how many findings there are up to its last. Nothing in it is a container that the
# garbage collection goes into, so that it soon leaves the tuple alone, too.
_Span = tuple[str, str, str, Layout, tuple[str, ...], int]

# Instead of the number of a word: the finding is of the whole node.
_OF_THE_NODE = -1


class Findings:
    """Findings, node by node. Each address is three numbers; no object is made for it before it is
    read."""

    def __init__(self, nodes: Iterable[Node], known: Known) -> None:
        """What ``known`` says of every address in ``nodes``."""
        judge = Judge(known)
        self._said = judge.said
        self._spans: list[_Span] = []
        # Of each finding: which word of its node's parameters it is of, and the extents behind
        # those; the address; the number of what is said of it.
        self._words: list[int] = []
        self._addresses: list[int | None] = []
        self._numbers: list[int] = []
        for node in nodes:
            self._add(node, judge)

    def _add(self, node: Node, judge: Judge) -> None:
        words, addresses, numbers = self._words, self._addresses, self._numbers
        parts, first, judged = packed(node.parts), len(numbers), judge.word
        for word, address in candidates(parts.data):
            number = judged(address)
            if number != NO_ADDRESS:
                words.append(word)
                addresses.append(address)
                numbers.append(number)
        named = len(numbers)
        for word, (_, address, _) in enumerate(node.extents, len(parts.data) // 8):
            number = judge.named(address)
            if number != NO_ADDRESS:
                words.append(word)
                addresses.append(address)
                numbers.append(number)
        if judge.doubtful and not judge.doubtful.isdisjoint(addresses[first:named]):
            self._weigh(first, named, judge)
        for why in node.unread:
            words.append(_OF_THE_NODE)
            addresses.append(None)
            numbers.append(judge.said.add(Judgement(Verdict.NOT_INSPECTED, "", why)))
        if len(numbers) > first:
            extents = tuple(extent.where for extent in node.extents)
            self._spans.append(
                (node.path, node.kind, node.name, parts.layout, extents, len(numbers))
            )

    def _weigh(self, first: int, named: int, judge: Judge) -> None:
        """Take back what is said against words of one node that may be two small numbers.

        Two small numbers side by side can look like a low address. What speaks against such a
        word counts only if another word of the node, which cannot be numbers, has the same owner.
        """
        owners, numbers = self._said.owners, self._numbers
        of_words = [address or 0 for address in self._addresses[first:named]]
        sure = {owners[number] for number in numbers[named:]}
        for at, address in enumerate(of_words, first):
            if looks_like_an_address(address):
                sure.add(owners[numbers[at]])
        for at, address in enumerate(of_words, first):
            if address in judge.doubtful and owners[numbers[at]] not in sure:
                numbers[at] = judge.as_numbers(numbers[at])

    def counts(self) -> Counter[Verdict]:
        """How many findings of each verdict."""
        counted: Counter[Verdict] = Counter()
        for number, count in Counter(self._numbers).items():
            counted[self._said.verdicts[number]] += count
        return counted

    def of(self, verdicts: Collection[Verdict] = tuple(Verdict)) -> Iterator[Finding]:
        """The findings of these verdicts, in order; all of them unless ``verdicts`` is given."""
        said, first = self._said, 0
        wanted = [verdict in verdicts for verdict in said.verdicts]
        places_of: dict[tuple[Layout, tuple[str, ...]], list[tuple[str, int | None]]] = {}
        for path, kind, name, layout, extents, end in self._spans:
            where = places_of.get((layout, extents))
            if where is None:
                # The last one is that of _OF_THE_NODE.
                where = [*places(layout), *((each, None) for each in extents), ("", None)]
                places_of[layout, extents] = where
            for at in range(first, end):
                number = self._numbers[at]
                if wanted[number]:
                    yield Finding(
                        path,
                        kind,
                        name,
                        *where[self._words[at]],
                        self._addresses[at],
                        said.owners[number],
                        said.verdicts[number],
                        said.whys[number],
                    )
            first = end
