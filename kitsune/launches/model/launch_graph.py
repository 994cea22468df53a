"""The dependency graph of a step's launches, from the hazards on the bytes that they touch. Loads no torch."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Self

BEGIN: Final = attrgetter("begin")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [begin, end) of a storage."""

    storage: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel or operation as the host issued it, with what it reads and writes.

    `draws`: it draws random numbers. The generator counts on the host, so launches that draw must be issued in the
    recorded order, but need not wait for each other on the device. `keeps_workspace`: its library keeps a workspace for
    every stream on which it has run.
    """

    name: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    draws: bool = False
    keeps_workspace: bool = False

    @property
    def touches(self) -> tuple[int, ...]:
        """The storages that it names, sorted. They must be allocated even if it touches none of their bytes."""
        return tuple(sorted({span.storage for span in (*self.reads, *self.writes)}))


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory that launches touch.

    `is_own`: allocated by this step; otherwise it existed before (parameter, input, optimizer state).
    `is_kept`: read after the step (loss, gradient), so it must outlive the step.
    """

    nbytes: int
    is_own: bool
    is_kept: bool


@dataclass(frozen=True, slots=True)
class LaunchGraph:
    """The launches in recorded order, and their dependencies. Build it with `of`, which checks its arguments.

    `after[i]`: the launches that must have ended before launch i begins, sorted, without those that others imply.
    `issued_after[i]`: the launch that the host must issue before launch i, at most one: the previous draw.
    """

    launches: tuple[Launch, ...]
    storages: tuple[Storage, ...]
    after: tuple[tuple[int, ...], ...]
    issued_after: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, launches: Iterable[Launch], storages: Iterable[Storage]) -> Self:
        """Derives the dependencies. Raises ValueError for an invalid size, and for a launch that touches bytes that do
        not exist."""
        launches, storages = tuple(launches), tuple(storages)
        for number, storage in enumerate(storages):
            if type(storage.nbytes) is not int or storage.nbytes < 0:
                raise ValueError(f"storage {number} cannot have {storage.nbytes!r} bytes")
        for number, launch in enumerate(launches):
            check(number, launch, storages)
        return cls(launches, storages, reduced(hazards(launches, storages)), previous_draws(launches))

    def touchers(self) -> tuple[tuple[int, ...], ...]:
        """For every storage, the launches that touch it, in recorded order. The first one allocates it."""
        found: list[list[int]] = [[] for _ in self.storages]
        for number, launch in enumerate(self.launches):
            for storage in launch.touches:
                found[storage].append(number)
        return tuple(map(tuple, found))

    def read_from(self) -> list[set[int]]:
        """For every launch, those that wrote what it reads (read after write only, no other hazards)."""
        histories = [AccessHistory(storage.nbytes) for storage in self.storages]
        found: list[set[int]] = []
        for number, launch in enumerate(self.launches):
            read = [histories[span.storage].read(span, number) for span in filter(is_filled, launch.reads)]
            for span in filter(is_filled, launch.writes):
                histories[span.storage].write(span, number)
            found.append(set().union(*read))
        return found

    def written(self) -> frozenset[int]:
        """The storages that some launch writes."""
        return frozenset(span.storage for launch in self.launches for span in launch.writes)


def check(number: int, launch: Launch, storages: Sequence[Storage]) -> None:
    """Raises ValueError when the launch names a storage that does not exist, or bytes outside of it."""
    for span in (*launch.reads, *launch.writes):
        who = f"launch {number} ({launch.name})"
        if not 0 <= span.storage < len(storages):
            raise ValueError(f"{who} names storage {span.storage}, but there are only {len(storages)}")
        nbytes = storages[span.storage].nbytes
        if not 0 <= span.begin <= span.end <= nbytes:
            raise ValueError(f"{who} touches bytes {span.begin} to {span.end} of storage {span.storage} ({nbytes} B)")


@dataclass(slots=True)
class Piece:
    """A range of a storage's bytes with one history: their last writer, and their readers since."""

    begin: int
    end: int
    writer: int | None
    readers: list[int]


class AccessHistory:
    """Writers and readers of the bytes of one storage so far, as ordered pieces that cover it."""

    def __init__(self, nbytes: int) -> None:
        self.pieces = [Piece(0, nbytes, None, [])]

    def read(self, span: Span, launch: int) -> set[int]:
        """The launches for which this one must wait in order to read the span (read after write)."""
        pieces = self.pieces[self.cover(span)]
        for piece in pieces:
            piece.readers.append(launch)
        return {piece.writer for piece in pieces if piece.writer is not None}

    def write(self, span: Span, launch: int) -> set[int]:
        """The launches for which this one must wait in order to write it (write after write, write after read)."""
        where = self.cover(span)
        found = {number for piece in self.pieces[where] for number in (piece.writer, *piece.readers)}
        self.pieces[where] = [Piece(span.begin, span.end, launch, [])]
        return {number for number in found if number is not None}

    def cover(self, span: Span) -> slice:
        """The slice of pieces that make up exactly the span; pieces that cross its borders are cut."""
        first = self.cut(span.begin)
        return slice(first, self.cut(span.end))

    def cut(self, at: int) -> int:
        """The index of the piece that begins at this byte; at the end of the storage, one past the last."""
        index = bisect_left(self.pieces, at, key=BEGIN)
        if index == len(self.pieces) or self.pieces[index].begin > at:
            before = self.pieces[index - 1]
            if before.end > at:
                self.pieces.insert(index, Piece(at, before.end, before.writer, list(before.readers)))
                before.end = at
        return index


def hazards(launches: Sequence[Launch], storages: Sequence[Storage]) -> list[set[int]]:
    """For every launch, the earlier ones that it must wait for; some may be implied by others.

    The first launch that touches a storage of the step's own allocates it, so all others that touch it wait for it.
    """
    histories = [AccessHistory(storage.nbytes) for storage in storages]
    makers: dict[int, int] = {}
    found: list[set[int]] = []
    for number, launch in enumerate(launches):
        needed = {makers.setdefault(storage, number) for storage in launch.touches if storages[storage].is_own}
        for span in filter(is_filled, launch.reads):
            needed |= histories[span.storage].read(span, number)
        for span in filter(is_filled, launch.writes):
            needed |= histories[span.storage].write(span, number)
        found.append(needed - {number})
    return found


def is_filled(span: Span) -> bool:
    return span.begin < span.end


def reduced(needed: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    """The transitive reduction: the same order with the fewest edges. Sets of ancestors are bit sets in integers.

    Edges point to earlier launches, so an implied edge is always implied through a later launch than its target.
    """
    ancestors: list[int] = []
    kept: list[tuple[int, ...]] = []
    for candidates in needed:
        above, direct = 0, []
        for candidate in sorted(candidates, reverse=True):
            if not above >> candidate & 1:
                above |= ancestors[candidate] | 1 << candidate
                direct.append(candidate)
        ancestors.append(above)
        kept.append(tuple(reversed(direct)))
    return tuple(kept)


def previous_draws(launches: Sequence[Launch]) -> tuple[tuple[int, ...], ...]:
    """For every launch that draws random numbers, the previous one that draws."""
    latest: tuple[int, ...] = ()
    found: list[tuple[int, ...]] = []
    for number, launch in enumerate(launches):
        found.append(latest if launch.draws else ())
        latest = (number,) if launch.draws else latest
    return tuple(found)
